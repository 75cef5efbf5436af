"""Train in a plain loop of PyTorch's, which stops anywhere and goes on with the next image, on any number of processes::

torchrun --nproc-per-node 2 -m examples.loader.plain data/digits --state digits.pt --steps 50
python -m examples.loader.plain data/digits --state digits.pt
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from pipeline import ImageLoader
from pipeline.cluster.environment import read_rank


def network(classes: int) -> nn.Module:
    layers = [nn.Conv2d(3, 16, 5, 4), nn.ReLU(), nn.Conv2d(16, 32, 3, 2), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten()]
    return nn.Sequential(*layers, nn.Linear(32, classes))


def main(arguments: Sequence[str] | None = None) -> tuple[int, int]:
    """Train; returns the images that this process has seen and the epoch in which it ended."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", help="a shard set, of `pervit shard`")
    parser.add_argument("--state", type=Path, default=Path("state.pt"), help="where to save, and what to go on from")
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--steps", type=int, help="stop after as many, to go on another time")
    parser.add_argument("--batch-size", type=int, default=64, help="images, of each process")
    parser.add_argument("--image-size", type=int, default=64, help="pixels")
    options = parser.parse_args(arguments)

    rank, ranks = read_rank()
    if ranks > 1:
        dist.init_process_group()
    device = torch.device("cuda", rank % torch.cuda.device_count()) if torch.cuda.is_available() else torch.device("cpu")
    seen = taken = 0
    with ImageLoader(options.data, batch_size=options.batch_size, image_size=options.image_size, device=device) as loader:
        model = network(len(loader.classes)).to(device)
        optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
        if options.state.exists():
            weights, moments, place = torch.load(options.state, map_location=device, weights_only=True)
            model.load_state_dict(weights)
            optimizer.load_state_dict(moments)
            loader.load_state_dict(place)
        trained = DistributedDataParallel(model) if ranks > 1 else model
        while loader.epoch < options.epochs and taken != options.steps:
            for batch in loader:
                images, _ = batch
                loss = nn.functional.cross_entropy(trained(images), batch.mixed)  # mixed: DeiT's recipe has Mixup and CutMix
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                seen, taken = seen + len(images), taken + 1
                if taken == options.steps:
                    break
            if rank == 0:
                print(f"epoch {loader.epoch}, step {taken}: loss {loss.item():.3f}", flush=True)
                torch.save([part.state_dict() for part in (model, optimizer, loader)], options.state)
        ended = loader.epoch
    if ranks > 1:
        dist.destroy_process_group()
    return seen, ended


if __name__ == "__main__":
    main()
