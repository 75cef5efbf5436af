"""Verify a shard set: shards, sample tables, lists, and classes and images of its splits. Damage is reported, never raised."""

from __future__ import annotations

import json
from collections.abc import Mapping, Set
from contextlib import closing
from itertools import accumulate, pairwise
from pathlib import Path

import numpy as np
from tqdm import tqdm

from data_prep.shard_checks import Finding, Findings, ShardCheck, check_shard
from data_prep.workers import run_tasks
from pipeline.errors import counted, first_few
from pipeline.files import file_sha256, open_regular
from pipeline.shards.manifest import (
    MANIFEST,
    REENCODED,
    REJECTED,
    ShardManifest,
    SplitInfo,
    find_misfit,
    map_sample_table,
)


def verify(folder: Path, manifest: ShardManifest, workers: int = 1, decode: bool = False) -> list[Finding]:
    """Verify a shard set.

    Args:
        folder: the shard set.
        manifest: its manifest.
        workers: worker processes.
        decode: decode every image.

    Returns:
        Findings sorted by file; empty for an intact set.
    """
    findings = _check_folder(folder, manifest)
    tasks: list[ShardCheck] = []
    for split, info in manifest.splits.items():
        rows, wrong = read_sample_table(folder, manifest, split)
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
    return sorted(findings, key=lambda finding: finding.file)  # stable: keeps the order of the checks within a file


def print_table(findings: list[Finding]) -> None:
    """Print one row per finding and a summary."""
    rows = [("file", "check", "found", "needed"), *((f.file, f.check, f.found, f.needed) for f in findings)]
    widths = [max(len(row[column]) for row in rows) for column in range(3)]
    for row in rows:
        print("  ".join([*(text.ljust(width) for text, width in zip(row, widths)), row[3]]).rstrip())
    files = len({finding.file for finding in findings})
    print(f"{counted(len(findings), 'finding')} in {counted(files, 'file')}")


def _check_folder(folder: Path, manifest: ShardManifest) -> list[Finding]:
    """Check for foreign tars and unfinished splits, the lists beside the shards, and the classes of the splits."""
    known = {shard.file for info in manifest.splits.values() for shard in info.shards}
    foreign = [path.name for path in sorted(folder.glob("*.tar")) if path.name not in known]
    findings = [Finding(name, "foreign tar", "not in the manifest", f"only the shards of {MANIFEST}") for name in foreign]
    for path in sorted(folder.glob(".*-in-progress")):
        findings.append(Finding(path.name, "unfinished split", "in progress or interrupted", "run the sharder again"))
    present = {name: classes_with_images(manifest.classes, info.samples_per_class) for name, info in manifest.splits.items()}
    if wrong := untaught_classes(present.get("train", set()), present.get("val", set())) if len(present) > 1 else "":
        findings.append(Finding(MANIFEST, "classes", wrong, "train images of every class"))
    findings += _check_list(folder, REJECTED, {split: info.rejected for split, info in manifest.splits.items()})
    findings += _check_list(folder, REENCODED, {split: info.reencoded for split, info in manifest.splits.items()})
    return findings


def _check_list(folder: Path, name: str, expected: dict[str, int]) -> list[Finding]:
    """Check that a list has as many lines per split as the manifest says."""
    findings, path = Findings(name), folder / name
    try:
        splits = [json.loads(line)["split"] for line in _lines_of(path)]
    except (ValueError, KeyError, TypeError, OSError) as error:
        findings.add("list", f"damaged ({type(error).__name__})", "a JSON object with a split on each line")
        return findings.table()
    for split, count in expected.items():
        findings.expect("list", splits.count(split), count, f"lines of {split}: ")
    return findings.table()


def _lines_of(path: Path) -> list[str]:
    """The lines of a text file; none if it does not exist."""
    if not path.exists():
        return []
    with open(open_regular(path), encoding="utf-8") as file:
        return file.read().splitlines()


def read_sample_table(folder: Path, manifest: ShardManifest, split: str) -> tuple[np.ndarray | None, list[Finding]]:
    """Read and check a split's sample table.

    Returns:
        (samples,) of ``SAMPLE_DTYPE``, or None if it is unreadable, and the findings.
    """
    info = manifest.splits[split]
    findings, path = Findings(info.samples_file), folder / info.samples_file
    try:
        findings.expect("sha256", file_sha256(path)[:16], info.samples_sha256[:16])
        rows = np.array(map_sample_table(path, info.samples))
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        findings.add("sample table", f"cannot be read ({reason})", f"{info.samples} samples by the manifest")
        return None, findings.table()
    if wrong := find_misfit(rows, info.shards, info.samples_per_class):
        findings.add("sample table", wrong, "values in range, as many as in the manifest")
    return rows, findings.table()


def untaught_classes(train: Set[str], val: Set[str]) -> str:
    """Describe the classes of val that train has no images of; empty if there are none.

    Args:
        train: classes with images in the train split.
        val: classes with images in the val split.
    """
    foreign = sorted(val - train)
    return f"val has images of {_listed(foreign)} that train has none of" if foreign else ""


def unseen_classes(train: Set[str], val: Set[str]) -> str:
    """Describe the classes of train that val has no images of; empty if there are none."""
    unseen = sorted(train - val)
    return f"val has no images of {_listed(unseen)} that train has, so accuracy says nothing about them" if unseen else ""


def same_images(splits: Mapping[str, SplitInfo], split: str, fingerprint: str) -> str:
    """Warn of another split that was written from the same images; empty if there is none.

    Args:
        splits: those in the shard set's manifest.
        split: the split to compare with the others; need not be in the manifest yet.
        fingerprint: of its source.
    """
    for name, info in splits.items():
        if name != split and info.source["fingerprint"] == fingerprint:
            return f"the {split} split has the images of its {name} split: accuracy on them says nothing about unseen images"
    return ""


def classes_with_images(names: list[str], counts: list[int]) -> set[str]:
    """The names of the classes with a count above 0."""
    return {name for name, count in zip(names, counts) if count}


def of_classes(with_images: Set[str], classes: list[str]) -> str:
    """The number of classes, as in the manifest, and those without images: ``4 classes, of which 1 has no image (c),``."""
    without = [name for name in classes if name not in with_images]
    has = f", of which {len(without):,} {'has' if len(without) == 1 else 'have'} no image ({first_few(without)}),"
    return counted(len(classes), "class") + has * bool(without)


def _listed(classes: list[str]) -> str:
    return f"{counted(len(classes), 'class')} ({first_few(classes)})"
