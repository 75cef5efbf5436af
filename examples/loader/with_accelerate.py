"""Train with accelerate, which saves the loader's place beside model and optimizer; the loader itself needs no ``prepare``::

accelerate launch --num-processes 2 -m examples.loader.with_accelerate data/digits --folder runs/accelerate --steps 30
python -m examples.loader.with_accelerate data/digits --folder runs/accelerate
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import torch
from accelerate import Accelerator
from torch import nn

from examples.loader.plain import network
from pipeline import ImageLoader


def main(arguments: Sequence[str] | None = None) -> tuple[int, int]:
    """Train, from what is saved if there is something; returns the images that this process has seen and the epoch in which it ended."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", help="a shard set, of `pervit shard`")
    parser.add_argument("--folder", type=Path, default=Path("runs/accelerate"), help="what is saved")
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--steps", type=int, help="stop after as many, to go on another time")
    parser.add_argument("--batch-size", type=int, default=64, help="images, of each process")
    parser.add_argument("--image-size", type=int, default=64, help="pixels")
    options = parser.parse_args(arguments)

    accelerator = Accelerator()
    rank, ranks = accelerator.process_index, accelerator.num_processes
    size = {"batch_size": options.batch_size, "image_size": options.image_size}
    seen = taken = 0
    with ImageLoader(options.data, **size, rank=rank, world_size=ranks, device=accelerator.device) as loader:
        model = network(len(loader.classes))
        model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), 1e-3))
        accelerator.register_for_checkpointing(loader)
        if options.folder.exists():
            accelerator.load_state(str(options.folder))
        while loader.epoch < options.epochs and taken != options.steps:
            for batch in loader:
                images, _ = batch
                loss = nn.functional.cross_entropy(model(images), batch.mixed)
                optimizer.zero_grad()
                accelerator.backward(loss)
                optimizer.step()
                seen, taken = seen + len(images), taken + 1
                if taken == options.steps:
                    break
            accelerator.print(f"epoch {loader.epoch}, step {taken}: loss {loss.item():.3f}", flush=True)
            accelerator.save_state(str(options.folder))
        ended = loader.epoch
    accelerator.end_training()
    return seen, ended


if __name__ == "__main__":
    main()
