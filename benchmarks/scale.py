"""Start-up time of the loader and cost of the sample order as a function of the size of the set.

    python benchmarks/scale.py --shards DIR [--samples 1281167]

DIR is any shard set; a sample table of --samples rows that point into its real tars is written to a temporary folder beside it.
Prints the seconds from building the loader to the first batch, the memory, and the cost of a batch's order for sets of 10^3 to
10^9 samples relative to the smallest.
"""

from __future__ import annotations

import argparse
import multiprocessing
import statistics
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
import psutil
import torch

from pipeline.command_line import run_command
from pipeline.config import AugmentConfig, DataConfig
from pipeline.data.batches import TrainBatches
from pipeline.data.loader import Loader
from pipeline.data.manifest import ShardManifest, file_sha256
from pipeline.data.order import Blocks, block_sample_at, sample_at
from pipeline.data.shards import ShardSet

BATCH, ROUNDS = 128, 9


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shards", required=True, type=Path, help="a shard set with a train split")
    parser.add_argument(
        "--samples", type=int, default=1_281_167, help="rows of the synthetic sample table (default: ImageNet's)"
    )
    args = parser.parse_args()
    small = in_its_own_process(args.shards)
    with tempfile.TemporaryDirectory(dir=args.shards.parent) as folder:
        enlarge(args.shards, Path(folder), args.samples)
        large = in_its_own_process(Path(folder))
    print(
        "| samples | opening the shards | building the loader to the first batch | memory of the process |\n|---|---|---|---|"
    )
    for samples, opening, first, memory in (small, large):
        print(f"| {samples:,} | {opening:.2f} s | {first:.2f} s | {memory:.0f} MiB |")
    print(f"ratio of the times to the first batch, opening included: {sum(large[1:3]) / sum(small[1:3]):.2f}\n")
    print_order_costs()


def enlarge(source: Path, target: Path, samples: int) -> None:
    """Write a shard set whose sample table repeats the source's samples."""
    for file in source.iterdir():
        if file.suffix in (".tar", ".idx"):
            target.joinpath(file.name).hardlink_to(file)
    manifest = ShardManifest.read(source)
    info = manifest.splits["train"]
    rows = np.resize(np.load(source / info.samples_file), samples)
    np.save(target / info.samples_file, rows)
    info = replace(info, samples=samples, samples_sha256=file_sha256(target / info.samples_file))
    ShardManifest(manifest.classes, {"train": info}).write(target)


def in_its_own_process(folder: Path) -> tuple[int, float, float, float]:
    """:func:`first_batch` in a fresh process, so that its memory is measured alone."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        return pool.submit(first_batch, folder).result()


def first_batch(folder: Path) -> tuple[int, float, float, float]:
    """Samples, seconds to open the shards, seconds to the first batch of the whole recipe, MiB of this process."""
    started = time.perf_counter()
    shards = ShardSet(folder, "train")
    opened = time.perf_counter()
    config = DataConfig()
    recipe = AugmentConfig(rand_augment_ops=2, erasing=0.25, mixup=0.8, cutmix=1.0, repeats=3)
    loader = Loader(
        TrainBatches(
            shards=shards,
            seed=0,
            image_size=224,
            global_batch_size=BATCH,
            batch_size=BATCH,
            rank=0,
            world_size=1,
            data=config,
            augment=recipe,
        ),
        config,
        torch.device("cpu"),
        cpu_threads=2,
    )
    next(loader)
    done = time.perf_counter()
    memory = psutil.Process().memory_info().rss / 2**20
    loader.close()
    return len(shards), opened - started, done - opened, memory


def print_order_costs() -> None:
    """Print the cost of a batch's order: medians of interleaved rounds."""
    blocks = Blocks(256, 64)
    orders = {
        "full": lambda position, size: sample_at(position, 0, size, 0),
        "block": lambda position, size: block_sample_at(position, 0, size, 0, blocks),
    }
    sizes = [10**3, 10**6, 10**9]
    seconds: dict[tuple[str, int], list[float]] = {(name, size): [] for name in orders for size in sizes}
    for round_ in range(ROUNDS):
        for (name, size), taken in seconds.items():
            started = time.perf_counter()
            for batch in range(20):
                first = (round_ * 20 + batch) * 7919 * BATCH % (size - BATCH)
                orders[name](np.arange(first, first + BATCH), size)
            taken.append((time.perf_counter() - started) / 20)
    print(f"| order of a batch of {BATCH} | " + " | ".join(f"{size:.0e} samples" for size in sizes) + " |\n|---|---|---|---|")
    for name in orders:
        medians = [statistics.median(seconds[name, size]) for size in sizes]
        cells = [f"{1e3 * m:.2f} ms (x {m / medians[0]:.2f})" for m in medians]
        print(f"| {name} | " + " | ".join(cells) + " |")


if __name__ == "__main__":
    run_command(main)
