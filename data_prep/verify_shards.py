"""Check a shard set from end to end, for instance after it was copied.

    python data_prep/verify_shards.py DIR [--decode] [--workers N]

Compares sizes, checksums, members and their order, indexes, labels and the sample table with each other and with
DIR/manifest.json, and sees whether each shard is a fair sample of all classes. --decode also decodes every image. Ends with 0
and a line when all is well, with 1 and a table of what is wrong otherwise.
"""

from __future__ import annotations

import argparse
import json
import os
from contextlib import closing
from itertools import accumulate, pairwise
from pathlib import Path

import numpy as np
from tqdm import tqdm

from data_prep.shard_checks import Finding, Findings, ShardCheck, check_shard
from data_prep.workers import run_tasks
from pipeline.data.manifest import MANIFEST, REENCODED, REJECTED, SAMPLE_DTYPE, Manifest, SplitInfo, file_sha256
from pipeline.errors import UserError, run_command


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="the shard set: the folder that holds manifest.json")
    parser.add_argument("--decode", action="store_true", help="decode every image")
    parser.add_argument("--workers", type=int, default=len(os.sched_getaffinity(0)), help="default: one per core")
    args = parser.parse_args()
    if args.workers < 1:
        raise UserError(f"--workers is {args.workers}, at least 1 needed: pass a positive number.")
    manifest = Manifest.read(args.folder)
    findings = verify(args.folder, manifest, args.workers, args.decode)
    if findings:
        print_table(findings)
        return 1
    counts = ", ".join(f"{split} {info.samples} images in {len(info.shards)} shards" for split, info in manifest.splits.items())
    print(f"{args.folder}: all is well ({counts}{', every image decoded' if args.decode else ''})")
    return 0


def verify(folder: Path, manifest: Manifest, workers: int = 1, decode: bool = False) -> list[Finding]:
    """Everything that is wrong with a shard set.

    Args:
        folder: the shard set.
        manifest: its manifest.
        workers: processes, each of which looks at one shard at a time.
        decode: decode every image.

    Returns:
        Sorted by file; empty for a whole set.
    """
    findings = _check_folder(folder, manifest)
    tasks: list[ShardCheck] = []
    for split, info in manifest.splits.items():
        rows, wrong = _read_sample_table(folder, manifest, split)
        findings += wrong
        limits = [0, *accumulate(shard.samples for shard in info.shards)]
        for number, (first, last) in enumerate(pairwise(limits)):
            part = None if rows is None else rows[first:last]
            tasks.append(
                ShardCheck(folder, number, info.shards[number], part, manifest.classes, info.samples_per_class, decode)
            )
    total = sum(task.info.samples for task in tasks)
    with tqdm(total=total, desc="verifying", unit=" images", disable=None) as bar:
        with closing(run_tasks(check_shard, tasks, min(workers, len(tasks) or 1), bar)) as results:
            for wrong in results:
                findings += wrong
    return sorted(findings, key=lambda finding: finding.file)  # stable: in the order of checking within a file


def print_table(findings: list[Finding]) -> None:
    """One row for each finding."""
    rows = [("file", "check", "found", "needed"), *((f.file, f.check, f.found, f.needed) for f in findings)]
    widths = [max(len(row[column]) for row in rows) for column in range(3)]
    for row in rows:
        print("  ".join([*(text.ljust(width) for text, width in zip(row, widths)), row[3]]).rstrip())
    print(f"{len(findings)} findings in {len({finding.file for finding in findings})} files")


def _check_folder(folder: Path, manifest: Manifest) -> list[Finding]:
    """Files that should not be there, and the lists beside the shards."""
    known = {shard.file for info in manifest.splits.values() for shard in info.shards}
    foreign = [path.name for path in sorted(folder.glob("*.tar")) if path.name not in known]
    findings = [Finding(name, "foreign tar", "not in the manifest", f"only the shards of {MANIFEST}") for name in foreign]
    for path in sorted(folder.glob(".*-in-progress")):
        findings.append(Finding(path.name, "unfinished split", "being written, or cut off", "run the sharder again"))
    findings += _check_list(folder, REJECTED, {split: info.rejected for split, info in manifest.splits.items()})
    findings += _check_list(folder, REENCODED, {split: info.reencoded for split, info in manifest.splits.items()})
    return findings


def _check_list(folder: Path, name: str, expected: dict[str, int]) -> list[Finding]:
    """Does a list have as many lines for each split as the manifest says?"""
    findings, path = Findings(name), folder / name
    try:
        splits = [json.loads(line)["split"] for line in path.read_text().splitlines()] if path.exists() else []
    except (ValueError, KeyError, TypeError, OSError) as error:
        findings.add("list", f"damaged ({type(error).__name__})", "a JSON object with a split on each line")
        return findings.table()
    for split, count in expected.items():
        findings.expect("list", splits.count(split), count, f"lines of {split}: ")
    return findings.table()


def _read_sample_table(folder: Path, manifest: Manifest, split: str) -> tuple[np.ndarray | None, list[Finding]]:
    """(samples,) of ``SAMPLE_DTYPE``, or None when it is unusable, and what is wrong with it."""
    info: SplitInfo = manifest.splits[split]
    findings, path = Findings(info.samples_file), folder / info.samples_file
    try:
        findings.expect("sha256", file_sha256(path)[:16], info.samples_sha256[:16])
        rows = np.load(path)
    except (OSError, ValueError, EOFError) as error:
        findings.add("sample table", f"cannot be read ({getattr(error, 'strerror', None) or error})", f"{info.samples} samples")
        return None, findings.table()
    if rows.dtype != SAMPLE_DTYPE or rows.shape != (info.samples,):
        findings.add("sample table", f"shape {rows.shape}", f"({info.samples},) by the manifest")
        return None, findings.table()
    counts = np.bincount(rows["label"].clip(0, len(manifest.classes)), minlength=len(manifest.classes)).tolist()
    findings.expect("samples per class", counts == info.samples_per_class, True, "as in the manifest: ")
    findings.expect("samples", sum(shard.samples for shard in info.shards), info.samples, "of all shards: ")
    return rows, findings.table()


def command() -> None:
    """``python data_prep/verify_shards.py``."""
    run_command(main)


if __name__ == "__main__":
    command()
