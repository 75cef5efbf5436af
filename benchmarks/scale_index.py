"""Opening a shard set, and asking it for a batch, as a function of the number of its samples.

    python benchmarks/scale_index.py [--samples 1281167 14197122 100000000] [--sparse 1000000000] [--folder DIR]

Writes synthetic sets into a temporary folder beneath --folder: a real manifest and a real sample table of 32 bytes a sample, and tars
and indices of 10,000 samples each that are sparse files of the right size. The table of the --sparse size is a sparse file itself, whose
rows cannot be checked: its checksum and the check of its rows are left out, and estimated from the largest real one. Each size is
measured in a process of its own, with the files in the page cache:

    manifest           megabytes, and seconds to read and check it
    files              seconds to see that all tars and indices are there and as large as they should be
    table              seconds for its checksum and the check of every row
    open               seconds for all of it, which every process of a training takes at its start
    memory             of the process after opening: its own, and pages of the index, which the processes of a node share
    batch              milliseconds for the order and the rows of 256 samples in full and in block order, median, and over the smallest

Bounded: the largest table takes 32 bytes times --samples on the disk, and is removed.
"""

from __future__ import annotations

import argparse
import multiprocessing
import statistics
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

import numpy as np
import psutil

from data_prep.shard_writer import shard_name
from pipeline.command_line import run_command
from pipeline.files import file_sha256
from pipeline.shards import shard_set as shards
from pipeline.shards.manifest import SAMPLE_DTYPE, ShardInfo, ShardManifest, SplitInfo
from pipeline.stream.order import Blocks, block_sample_at, sample_at

PER_SHARD, BYTES, CLASSES, BATCH, ROUNDS = 10_000, 100_000, 1000, 256, 200
ROOM = 512 * (4 + -(-BYTES // 512))  # of a sample in its tar: headers and padding too
IMAGENET, IMAGENET_21K = 1_281_167, 14_197_122


@dataclass
class Row:
    samples: int
    shards: int
    manifest_mb: float
    manifest: float
    files: float
    table: float | None
    opening: float
    own_mib: float
    shared_mib: float
    full_ms: float
    block_ms: float


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", nargs="*", type=int, default=[10**6, IMAGENET, IMAGENET_21K, 10**8], help="of real tables")
    parser.add_argument("--sparse", type=int, default=10**9, help="of one more set, with a sparse table; 0: none")
    parser.add_argument("--folder", type=Path, help="where there is room (default: the system's temporary folder)")
    args = parser.parse_args()
    rows: list[Row] = []
    for samples, real in [*((number, True) for number in args.samples), *([(args.sparse, False)] if args.sparse else [])]:
        with tempfile.TemporaryDirectory(dir=args.folder) as folder:
            write_set(Path(folder), samples, real)
            with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
                rows.append(pool.submit(measure, Path(folder), real).result())
    report(rows)


def write_set(folder: Path, samples: int, real: bool) -> None:
    """A train split of synthetic samples."""
    table = folder / "train-samples.npy"
    rows = np.lib.format.open_memmap(table, mode="w+", dtype=SAMPLE_DTYPE, shape=(samples,))
    for first in range(0, samples if real else 0, 2**20):
        number = np.arange(first, min(samples, first + 2**20))
        part = rows[first : first + len(number)]
        part["offset"], part["bytes"], part["checksum"] = 512 + number % PER_SHARD * ROOM, BYTES, number
        part["shard"], part["label"], part["width"], part["height"] = number // PER_SHARD, number % CLASSES, 500, 375
    rows.flush()
    del rows
    infos = []
    for number in range(-(-samples // PER_SHARD)):
        tar, index = (shard_name("train", number, suffix) for suffix in ("tar", "idx"))
        for name, size in ((tar, PER_SHARD * ROOM + 1024), (index, 50 * PER_SHARD)):
            with open(folder / name, "wb") as file:
                file.truncate(size)
        infos.append(ShardInfo(tar, PER_SHARD, PER_SHARD * ROOM + 1024, "0" * 64, index, 50 * PER_SHARD, "0" * 64))
    digest = file_sha256(table) if real else "0" * 64
    source = {"kind": "synthetic", "fingerprint": "0" * 64, "subset": 1.0, "subset_rule": "random"}
    split = SplitInfo(samples, samples * BYTES, 0, PER_SHARD, source, [samples // CLASSES] * CLASSES, table.name, digest, infos)
    ShardManifest([f"n{number:08d}" for number in range(CLASSES)], {"train": split}).write(folder)


def measure(folder: Path, real: bool) -> Row:
    """Open a set and ask for batches, in this process."""
    process = psutil.Process()
    before = process.memory_full_info()
    manifest, read = timed(lambda: ShardManifest.read(folder))
    size = (folder / "manifest.json").stat().st_size / 1e6
    info = manifest.splits["train"]
    del manifest
    nothing = mock.patch.multiple(shards, file_sha256=lambda path: info.samples_sha256, find_out_of_range=lambda *rest: None)
    with nothing:
        unchecked, without_table = timed(lambda: shards.ShardSet(folder, "train"))
    opened, opening = timed(lambda: shards.ShardSet(folder, "train")) if real else (unchecked, without_table)
    after = process.memory_full_info()
    own, mapped = after.uss - before.uss, after.rss - before.rss
    shared = min(mapped, opened.samples.nbytes)
    blocks, pick = Blocks(256, 64), np.random.default_rng(0)
    taken: dict[str, list[float]] = {"full": [], "block": []}
    for _ in range(ROUNDS):
        first = int(pick.integers(0, len(opened) - BATCH))
        place = np.arange(first, first + BATCH)
        for name, seconds in taken.items():
            begun = time.perf_counter()
            order = (
                sample_at(place, 0, len(opened), 0)
                if name == "full"
                else block_sample_at(place, np.zeros(1), len(opened), 0, blocks)
            )
            opened.samples[order]["label"].sum()
            seconds.append(time.perf_counter() - begun)
    medians = [1e3 * statistics.median(seconds) for seconds in taken.values()]
    return Row(
        samples=len(opened),
        shards=len(info.shards),
        manifest_mb=size,
        manifest=read,
        files=without_table - read,
        table=opening - without_table if real else None,
        opening=opening,
        own_mib=max(own - shared, 0) / 2**20,
        shared_mib=shared / 2**20,
        full_ms=medians[0],
        block_ms=medians[1],
    )


def timed(make):  # type: ignore[no-untyped-def]
    """What ``make`` returns, and the seconds it took."""
    begun = time.perf_counter()
    made = make()
    return made, time.perf_counter() - begun


def report(rows: list[Row]) -> None:
    print(
        "| samples | shards | manifest, MB | manifest, s | files, s | table, s | open, s | own, MiB | of the index, MiB | batch full, ms | batch block, ms |"
    )
    print("|---|---|---|---|---|---|---|---|---|---|---|")
    largest = max((row for row in rows if row.table is not None), key=lambda row: row.samples, default=None)
    for row in rows:
        table, opening = f"{row.table:.2f}" if row.table is not None else "", f"{row.opening:.2f}"
        if row.table is None and largest and largest.table is not None:
            estimate = largest.table * row.samples / largest.samples
            table, opening = f"about {estimate:.0f}", f"about {row.opening + estimate:.0f}"
        print(
            f"| {row.samples:,} | {row.shards:,} | {row.manifest_mb:.2f} | {row.manifest:.2f} | {row.files:.2f} | {table} | {opening} "
            f"| {row.own_mib:.0f} | {row.shared_mib:.0f} | {row.full_ms:.2f} ({row.full_ms / rows[0].full_ms:.2f}) "
            f"| {row.block_ms:.2f} ({row.block_ms / rows[0].block_ms:.2f}) |"
        )


if __name__ == "__main__":
    run_command(main)
