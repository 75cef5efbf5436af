"""Train with PyTorch Lightning, whose checkpoints hold the loader's place in the epoch::

python -m examples.loader.with_lightning data/digits --folder runs/lightning --steps 30
python -m examples.loader.with_lightning data/digits --folder runs/lightning
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import lightning
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn

from examples.loader.plain import network
from pipeline import ImageLoader


class Classifier(lightning.LightningModule):
    def __init__(self, data: str, batch_size: int, image_size: int, classes: int = 10) -> None:
        super().__init__()
        self.model, self.seen = network(classes), 0
        self.data, self.batch_size, self.image_size = data, batch_size, image_size

    def train_dataloader(self) -> ImageLoader:  # called when the processes are connected: the loader finds its rank
        return ImageLoader(self.data, "train", self.batch_size, self.image_size, mixed_targets=True, device=self.device)

    def training_step(self, batch: tuple[Tensor, Tensor], _: int) -> Tensor:
        images, targets = batch
        self.seen += len(images)
        return nn.functional.cross_entropy(self.model(images), targets)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), 1e-3)


def main(arguments: Sequence[str] | None = None) -> int:
    """Train, from the last checkpoint if there is one; returns the images that this process has seen."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", help="a shard set, of `pervit shard`")
    parser.add_argument("--folder", type=Path, default=Path("runs/lightning"), help="of the checkpoints")
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--steps", type=int, default=-1, help="stop after as many, to go on another time")
    parser.add_argument("--batch-size", type=int, default=64, help="images, of each process")
    parser.add_argument("--image-size", type=int, default=64, help="pixels")
    options = parser.parse_args(arguments)

    classifier = Classifier(options.data, options.batch_size, options.image_size)
    saving = ModelCheckpoint(options.folder, save_last=True, every_n_train_steps=10, save_on_train_epoch_end=True)
    length = {"max_epochs": options.epochs, "max_steps": options.steps}
    trainer = lightning.Trainer(**length, callbacks=[saving], logger=False, enable_progress_bar=False)
    last = options.folder / "last.ckpt"
    trainer.fit(classifier, ckpt_path=last if last.exists() else None)
    return classifier.seen


if __name__ == "__main__":
    main()
