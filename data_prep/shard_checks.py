"""Verify one shard: its tar, its index and its rows of the sample table. Damage is reported, never raised."""

from __future__ import annotations

import hashlib
import json
import os
import tarfile
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO, NamedTuple

import numpy as np
from xxhash import xxh3_64_intdigest

from data_prep.shard_writer import BLOCK
from data_prep.workers import count_image
from pipeline.files import open_regular
from pipeline.shards.image_checks import Rejected, check_decodes
from pipeline.shards.image_headers import jpeg_header, kept_format
from pipeline.shards.manifest import KEPT_FORMATS, ShardInfo, sample_key

MEMBERS = ("jpg", "cls", "json")  # or another of IMAGES instead of the first
IMAGES = ("jpg", *KEPT_FORMATS)
_MOST_OF_A_KIND = 5  # findings of one check and shard that are listed individually
_SIGMAS = 7  # tolerance of the class balance: a random draw exceeds it about once in 10^11 shards


@dataclass(frozen=True)
class Finding:
    """A problem: a row of the table."""

    file: str
    check: str
    found: str
    needed: str


@dataclass(frozen=True)
class ShardCheck:
    """The task of verifying one shard, sent to a worker.

    Attributes:
        folder: the shard set.
        number: of the shard.
        info: its manifest entry.
        rows: (samples,) of ``SAMPLE_DTYPE``; None if the sample table is damaged.
        classes: class names in index order.
        samples_per_class: of the whole split.
        decode: decode every image.
    """

    folder: Path
    number: int
    info: ShardInfo
    rows: np.ndarray | None
    classes: list[str]
    samples_per_class: list[int]
    decode: bool


@dataclass
class Findings:
    """Collects the findings about one file; of each check, the first few are kept and the others counted."""

    file: str
    rows: list[Finding] = field(default_factory=list)
    counts: Counter = field(default_factory=Counter)

    def add(self, check: str, found: object, needed: object) -> None:
        self.counts[check] += 1
        if self.counts[check] <= _MOST_OF_A_KIND:
            self.rows.append(Finding(self.file, check, str(found), str(needed)))

    def expect(self, check: str, found: object, needed: object, about: str = "") -> None:
        """Add a finding if ``found`` differs from ``needed``."""
        if found != needed:
            self.add(check, f"{about}{found}", needed)

    def table(self) -> list[Finding]:
        more = [(check, count - _MOST_OF_A_KIND) for check, count in self.counts.items() if count > _MOST_OF_A_KIND]
        return self.rows + [Finding(self.file, check, f"and {count} more", "") for check, count in more]


class Member(NamedTuple):
    """A member of a tar."""

    name: str
    offset: int  # of its data
    data: bytes


@dataclass
class Sample:
    """Consecutive members with the same key."""

    key: str
    offset: int = 0  # of the image
    size: int = 0  # of the image, bytes
    checksum: int = 0  # XXH3-64 of the image
    pixels: str = ""  # width x height
    text: dict[str, bytes] = field(default_factory=dict)  # the other members
    index: list[str] = field(default_factory=list)  # its line of the index, one entry per member


def check_shard(task: ShardCheck) -> list[Finding]:
    """Read a shard once and compare tar, index, sample table and manifest with each other.

    Returns:
        Findings; empty for an intact shard.
    """
    findings, info = Findings(task.info.file), task.info
    try:
        with open(open_regular(task.folder / info.file), "rb") as file:
            reader = _Reader(file)
            samples = _read_samples(reader, findings, task.decode)
            sha256, size = reader.finish()
    except OSError as error:
        findings.add("tar", f"cannot be read ({error.strerror})", f"{info.bytes} bytes")
        return findings.table()
    findings.expect("size", size, info.bytes)
    findings.expect("sha256", sha256[:16], info.sha256[:16])
    findings.expect("samples", len(samples), info.samples)
    labels = [_check_label(task, sample, findings) for sample in samples]
    for place, sample in enumerate(samples):
        findings.expect("key", sample.key, sample_key(task.number, place))
    if task.rows is not None:
        for sample, label, row in zip(samples, labels, task.rows):
            _check_row(sample, label, row, findings)
        findings.expect("shard of the sample table", sorted(set(task.rows["shard"].tolist()) - {task.number}), [])
    _check_class_balance(task, labels, findings)
    return findings.table() + _check_index(task, samples)


class _Reader:
    """Reads a file and computes its SHA-256."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._digest = hashlib.sha256()
        self.size = os.fstat(file.fileno()).st_size  # bytes
        self.offset = 0

    def read(self, size: int) -> bytes:
        data = self._file.read(size)
        self._digest.update(data)
        self.offset += len(data)
        return data

    def finish(self) -> tuple[str, int]:
        """Read the rest of the file; SHA-256 and size of the whole file."""
        while self.read(1 << 20):
            pass
        return self._digest.hexdigest(), self.offset


def _members(reader: _Reader, findings: Findings) -> Iterator[Member]:
    """The tar's members, up to its end or the first damage."""
    while True:
        start, block = reader.offset, reader.read(BLOCK)
        if len(block) == BLOCK and not any(block):
            return
        try:
            header = tarfile.TarInfo.frombuf(block, tarfile.ENCODING, "surrogateescape")
        except (tarfile.HeaderError, ValueError) as error:
            findings.add("tar", f"no header at byte {start} ({error})", "a header or the archive's end")
            return
        padded = -(-header.size // BLOCK) * BLOCK
        if header.type not in tarfile.REGULAR_TYPES or header.size < 0:
            findings.add("tar", f"{header.name} is of type {header.type!r}", "regular files only")
            return
        if reader.offset + padded > reader.size:
            findings.add(
                "tar", f"{header.name} ends at byte {reader.offset + header.size} of {reader.size}", "members within the tar"
            )
            return
        offset = reader.offset
        yield Member(header.name, offset, reader.read(padded)[: header.size])


def _read_samples(reader: _Reader, findings: Findings, decode: bool) -> list[Sample]:
    """Read and check the tar's samples."""
    samples: list[Sample] = []
    seen: set[str] = set()
    for name, offset, data in _members(reader, findings):
        key, _, suffix = name.partition(".")
        if not samples or samples[-1].key != key:
            if key in seen:
                findings.add("key adjacency", f"{key} comes again at byte {offset}", "members of a key follow each other")
            seen.add(key)
            samples.append(Sample(key))
        sample = samples[-1]
        sample.index.append(f"{suffix} {offset} {len(data)} {name}")
        if suffix in IMAGES:
            sample.offset, sample.size, sample.checksum = offset, len(data), xxh3_64_intdigest(data)
            sample.pixels = _check_image(key, suffix, data, findings, decode)
            count_image()
        else:
            sample.text[suffix] = data
    for sample in samples:
        suffixes = [entry.partition(" ")[0] for entry in sample.index]
        image = suffixes[0] if suffixes and suffixes[0] in IMAGES else MEMBERS[0]
        findings.expect("members", suffixes, [image, *MEMBERS[1:]], f"{sample.key}: ")
    return samples


def _check_image(key: str, suffix: str, data: bytes, findings: Findings, decode: bool) -> str:
    """Check an image; its size from the header as ``WIDTHxHEIGHT``, empty if it is damaged."""
    try:
        if suffix == MEMBERS[0]:
            _, _, width, height, _ = jpeg_header(data)
        else:
            found = kept_format(data)
            if found is None or found[0] != suffix:
                raise ValueError(f"not a {suffix} that shards keep")
            _, width, height = found
        if decode:
            check_decodes(data)
    except Rejected as error:
        findings.add("decode", f"{key}: {error}", "an image that decodes")
    except ValueError as error:
        findings.add("image", f"{key}: {error}", "an intact JPEG" if suffix == MEMBERS[0] else f"an intact {suffix}")
        return ""
    return f"{width}x{height}"


def _check_label(task: ShardCheck, sample: Sample, findings: Findings) -> int | None:
    """Check a sample's label and JSON member; the label, or None if it is invalid."""
    try:
        label = int(sample.text.get("cls", b""))
        class_name = task.classes[label] if label >= 0 else None
    except (ValueError, IndexError):
        label, class_name = None, None
    if class_name is None:
        text = sample.text.get("cls", b"nothing")[:20]
        findings.add("label", f"{sample.key}: {text.decode(errors='replace')}", f"0 to {len(task.classes) - 1}")
        return None
    try:
        about = json.loads(sample.text.get("json", b""))
        wnid, pixels = about["wnid"], f"{about['width']}x{about['height']}"
    except (ValueError, KeyError, TypeError):
        findings.add("json", f"{sample.key}: damaged", "file, wnid, width, height")
        return label
    findings.expect("label", wnid, class_name, f"{sample.key}: label {label} with wnid ")
    findings.expect("json", pixels, sample.pixels or pixels, f"{sample.key}: ")
    return label


def _check_row(sample: Sample, label: int | None, row: np.void, findings: Findings) -> None:
    expected = {"offset": sample.offset, "bytes": sample.size, "checksum": sample.checksum, "label": label}
    for name, value in expected.items():
        if value is not None:
            findings.expect(f"sample table: {name}", int(row[name]), value, f"{sample.key}: ")
    if sample.pixels:
        findings.expect("sample table: pixels", f"{row['width']}x{row['height']}", sample.pixels, f"{sample.key}: ")


def _check_class_balance(task: ShardCheck, labels: list[int | None], findings: Findings) -> None:
    """Check that the shard's class counts are those of a random draw from the split, to find shards that were not shuffled.

    A class with share p occurs among n samples with probability q = 1 - (1 - p)^n, so the expected number of classes is sum(q),
    with variance at most sum(q (1 - q)); the expected count of a class is n p, with variance below n p.
    """
    counts = np.bincount([label for label in labels if label is not None], minlength=len(task.classes))  # (classes,)
    n, total = int(counts.sum()), sum(task.samples_per_class)
    if n == 0 or total == 0 or len(task.samples_per_class) != len(counts):
        return
    share = np.asarray(task.samples_per_class) / total  # (classes,)
    present = 1 - (1 - share) ** n  # (classes,)
    least = present.sum() - _SIGMAS * np.sqrt((present * (1 - present)).sum()) - 1
    if (found := np.count_nonzero(counts)) < least:
        findings.add("class balance", f"{found} classes in {n} samples", f"about {present.sum():.0f}, a random draw")
    most = n * share + _SIGMAS * (np.sqrt(n * share) + 1)  # (classes,)
    if (counts > most).any():
        worst = int(np.argmax(counts - most))
        too_many = f"{counts[worst]} of {n} samples are {task.classes[worst]}"
        findings.add("class balance", too_many, f"about {n * share[worst]:.0f}, a random draw")


def _check_index(task: ShardCheck, samples: list[Sample]) -> list[Finding]:
    """Check that the index matches the tar."""
    findings, info = Findings(task.info.idx_file), task.info
    try:
        with open(open_regular(task.folder / info.idx_file), "rb") as file:
            content = file.read()
    except OSError as error:
        findings.add("index", f"cannot be read ({error.strerror})", f"{info.idx_bytes} bytes")
        return findings.table()
    findings.expect("size", len(content), info.idx_bytes)
    findings.expect("sha256", hashlib.sha256(content).hexdigest()[:16], info.idx_sha256[:16])
    found = content.decode(errors="replace").splitlines()
    needed = [f"v1.2 {len(samples)}", *(" ".join(sample.index) for sample in samples)]
    findings.expect("index", len(found), len(needed), "lines: ")
    for number, (line, right) in enumerate(zip(found, needed), 1):
        if line != right:
            findings.add("index", f"line {number}: {line[:60]!r}", f"{right[:60]!r} by the tar")
    return findings.table()
