"""Train a model of timm's with its optimizer, schedule and loss, in the form of timm's train.py::

    torchrun --nproc-per-node 2 -m examples.loader.with_timm data/imagenet --model resnet18

In train.py itself, this takes the place of ``create_loader`` for the training set, with --no-prefetcher and without its own mixup::

    loader_train = ImageLoader(args.data_dir, batch_size=args.batch_size, mixed_targets=True, device=device)
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import timm
import torch
import torch.distributed as dist
from timm.loss import SoftTargetCrossEntropy
from timm.optim import create_optimizer_v2
from timm.scheduler import create_scheduler_v2
from timm.utils import AverageMeter, init_distributed_device
from torch.nn.parallel import DistributedDataParallel

from pipeline import ImageLoader


def main(arguments: Sequence[str] | None = None) -> tuple[int, float]:
    """Train; returns the images that this process has seen and the mean loss of the last epoch."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", help="a shard set, of `pervit shard`")
    parser.add_argument("--model", default="resnet18")
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--batch-size", type=int, default=64, help="images, of each process")
    parser.add_argument("--image-size", type=int, default=224, help="pixels")
    options = parser.parse_args(arguments)

    options.device = "cuda" if torch.cuda.is_available() else "cpu"
    device = init_distributed_device(options)
    size = {"batch_size": options.batch_size, "image_size": options.image_size}
    seen, losses = 0, AverageMeter()
    with ImageLoader(options.data, **size, mixed_targets=True, device=device) as loader:
        model: torch.nn.Module = timm.create_model(options.model, num_classes=len(loader.classes)).to(device)
        optimizer = create_optimizer_v2(model, opt="adamw", lr=5e-4, weight_decay=0.05)
        schedule, epochs = create_scheduler_v2(optimizer, num_epochs=options.epochs, updates_per_epoch=len(loader))
        criterion = SoftTargetCrossEntropy()  # of the targets that Mixup and CutMix have made
        if options.distributed:
            model = DistributedDataParallel(model)
        for epoch in range(epochs):
            model.train()
            losses.reset()
            for images, targets in loader:
                loss = criterion(model(images), targets)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                losses.update(loss.item(), len(images))
                seen += len(images)
            schedule.step(epoch + 1)
            print(f"epoch {epoch}: loss {losses.avg:.3f}", flush=True)
    if options.distributed:
        dist.destroy_process_group()
    return seen, losses.avg


if __name__ == "__main__":
    main()
