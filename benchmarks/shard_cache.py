"""The cache of a node against a local disk, and against a source with a delay for each read.

    python benchmarks/shard_cache.py --shards DIR [--delay-ms 50] [--rounds 5] [--json FILE]

DIR is a shard set on a local disk. It is also the slow source: each read of it waits for --delay-ms first, as for a distant file
system. In each round all ways take turns, each in a part of the stream of its own.

    local disk     no cache, no delay: what there is to be had
    full cache     a source with the delay, and a cache that has all shards
    source         a source with the delay, and no cache

Measured twice: reading, which gives encoded images that were compared with their checksums, and loading, which decodes and resizes
them besides. Then, once: how long it takes to fill the cache, one shard at a time, and how many images a second a loader gives that
begins with an empty cache.

Examples:
    python benchmarks/shard_cache.py --shards data/imagenet
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch

from pipeline.config import AugmentConfig, DataConfig
from pipeline.loader.batches import TrainBatches
from pipeline.loader.loader import Loader
from pipeline.loader.reader import BadSamples, Reader
from pipeline.shards.files.cache import ShardCache
from pipeline.shards.files.cached import CachedFiles
from pipeline.shards.shard_set import ShardSet

WAYS = ("local disk", "full cache", "source")
QUEUE = 8  # batches that were made ahead while others had their turns, at most


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shards", type=Path, required=True)
    parser.add_argument("--delay-ms", type=float, default=50.0)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument(
        "--batches", type=int, default=16, help="of a turn of loading; reading has 8 times as many, the source 4"
    )
    parser.add_argument("--json", type=Path, help="also write the numbers here")
    args = parser.parse_args()
    delay = args.delay_ms / 1e3
    with tempfile.TemporaryDirectory() as scratch:
        cache = ShardCache(Path(scratch) / "cache")
        sets = {"local disk": ShardSet(args.shards, "train")}
        filled = first_pass(slow(ShardSet(args.shards, "train", cache=cache), delay), args.batch_size)
        sets["full cache"] = slow(ShardSet(args.shards, "train", cache=cache), delay)
        sets["source"] = slow(ShardSet(args.shards, "train"), delay)
        found = {what: compare(sets, make, args) for what, make in (("reading", read), ("loading", load))}
    print(
        f"delay {args.delay_ms:g} ms, batches of {args.batch_size}, {len(os.sched_getaffinity(0))} cores, medians of {args.rounds} rounds\n"
    )
    for what, rows in found.items():
        print(f"{what:14}{'images/s':>10}{'local disk = 1':>16}{'CPU ms/image':>14}")
        for way in WAYS:
            rate, cpu = (statistics.median(row[way][key] for row in rows) for key in ("images_per_s", "cpu_ms"))
            ratio = statistics.median(row[way]["images_per_s"] / row["local disk"]["images_per_s"] for row in rows)
            print(f"{way:14}{rate:10.1f}{ratio:16.3f}{cpu:14.3f}")
        print()
    print(
        f"filling {filled['mb']:.1f} MB in {filled['shards']} shards: {filled['seconds']:.2f} s, {filled['mb'] / filled['seconds']:.0f} MB/s; "
        f"meanwhile {filled['images_per_s']:.1f} images/s"
    )
    if args.json:
        args.json.write_text(json.dumps({**found, "filling": filled}, indent=1))


def slow(shards: ShardSet, delay: float) -> ShardSet:
    """The set, whose source waits before each read."""
    source = shards.files.source if isinstance(shards.files, CachedFiles) else shards.files
    plain_read = source.read

    def read(name: str, offset: int, size: int) -> bytes | memoryview:
        time.sleep(delay)
        return plain_read(name, offset, size)

    source.read = read  # type: ignore[method-assign]
    return shards


def compare(sets: dict[str, ShardSet], make: Callable[[ShardSet, int], Stream], args: argparse.Namespace) -> list:
    """The rounds: way -> images/s, CPU milliseconds per image."""
    streams = {way: make(shards, args.batch_size) for way, shards in sets.items()}
    for stream in streams.values():
        stream.next()
    rows, factor = [], 8 if make is read else 1
    for number in range(args.rounds):
        order = WAYS[number % 3 :] + WAYS[: number % 3]
        row = {}
        for way in order:
            for _ in range(QUEUE):
                streams[way].next()
            began, cpu, images = time.perf_counter(), cpu_seconds(), 0
            for _ in range(4 if way == "source" else args.batches * factor):
                images += streams[way].next()
            row[way] = {
                "images_per_s": images / (time.perf_counter() - began),
                "cpu_ms": 1e3 * (cpu_seconds() - cpu) / images,
            }
        rows.append(row)
    for stream in streams.values():
        stream.close()
    return rows


class Stream:
    """Batches on demand; nothing is read while another way has its turn, but what was asked for ahead."""

    def __init__(self, source: Reader | Loader) -> None:
        self._source = source

    def next(self) -> int:
        if isinstance(self._source, Reader):
            return len(self._source.next().images)
        return len(next(self._source).labels)

    def close(self) -> None:
        self._source.close()


def read(shards: ShardSet, batch_size: int) -> Stream:
    """Encoded images, verified."""
    return Stream(Reader(source(shards, batch_size), BadSamples(shards, 0), 0, depth=4))


def load(shards: ShardSet, batch_size: int) -> Stream:
    """Images of 224 pixels, on the CPU."""
    return Stream(Loader(source(shards, batch_size), DataConfig(num_threads=len(os.sched_getaffinity(0))), torch.device("cpu")))


def source(shards: ShardSet, batch_size: int) -> TrainBatches:
    return TrainBatches(
        shards=shards,
        seed=0,
        image_size=224,
        global_batch_size=batch_size,
        batch_size=batch_size,
        data=DataConfig(),
        augment=AugmentConfig(),
    )


def first_pass(shards: ShardSet, batch_size: int) -> dict[str, float]:
    """Load while the cache fills."""
    files = shards.files
    assert isinstance(files, CachedFiles)
    stream, images, began = load(shards, batch_size), 0, time.perf_counter()
    while len(files._copies) < len(shards.info.shards):
        images += stream.next()
    seconds = time.perf_counter() - began
    stream.close()
    files.close()
    size = sum(shard.bytes for shard in shards.info.shards) / 1e6
    return {"mb": size, "shards": len(shards.info.shards), "seconds": seconds, "images_per_s": images / seconds}


def cpu_seconds() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


if __name__ == "__main__":
    main()
