"""Write one shard in a worker process: its tar, its index, and a record that marks it as finished.

The record ``.train-000007.finished.npz`` is written last. It holds everything that the manifest needs from the shard, so that
the process that writes the manifest does not read the tars again, even after interruptions.

Tars are POSIX ustar, one header block per member, no time stamps: the bytes that ``tarfile`` writes, but a header is formatted in 1 us
instead of 16, because headers differ only in name, size and checksum.
"""

from __future__ import annotations

import hashlib
import json
import tarfile
import zipfile
from collections import Counter
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import BinaryIO

import numpy as np
from xxhash import xxh3_64_intdigest

from data_prep.output import Output
from data_prep.sources import Source, SourceImage
from data_prep.workers import count_image
from pipeline.files import replace_file
from pipeline.shards.image_checks import ImageRules, Rejected, StoredImage, prepare_image
from pipeline.shards.manifest import SAMPLE_DTYPE, ShardInfo, sample_key

BLOCK = 512  # bytes: headers and data are aligned to it
RECORD = 20 * BLOCK  # an archive is padded to a multiple of it

_TEMPLATE = tarfile.TarInfo("").tobuf(format=tarfile.USTAR_FORMAT)  # mode 0644, owner 0, time 0
_CHECKSUM = slice(148, 156)
_TEMPLATE_SUM = sum(_TEMPLATE) - sum(_TEMPLATE[_CHECKSUM]) - sum(_TEMPLATE[124:135]) + 8 * ord(" ")  # no size, blank checksum


def member_header(name: str, size: int) -> bytes:
    """The header block of a regular file.

    Args:
        name: ASCII, at most 100 characters.
        size: in bytes, below 8 GiB.

    Raises:
        ValueError: name or size do not fit a ustar header.
    """
    encoded, digits = name.encode("ascii"), b"%011o" % size
    if len(encoded) > 100 or len(digits) > 11:
        raise ValueError(f"{name!r} of {size} bytes does not fit a ustar header")
    checksum = b"%06o\0 " % (_TEMPLATE_SUM + sum(encoded) + sum(digits))
    start = encoded.ljust(100, b"\0") + _TEMPLATE[100:124]
    return start + digits + _TEMPLATE[135:148] + checksum + _TEMPLATE[156:]


class TarWriter:
    """Appends members to a file and computes its SHA-256.

    Args:
        file: empty, open for binary writing.

    Attributes:
        offset: bytes written so far.
    """

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._digest = hashlib.sha256()
        self.offset = 0

    def add(self, members: list[tuple[str, bytes]]) -> list[int]:
        """Append the members of a sample, (name, data) each, in one write.

        Returns:
            Offset of each member's data.
        """
        parts, places, offset = [], [], self.offset
        for name, data in members:
            places.append(offset + BLOCK)
            padding = -len(data) % BLOCK
            parts += [member_header(name, len(data)), data, bytes(padding)]
            offset += BLOCK + len(data) + padding
        self._write(b"".join(parts))
        return places

    def close(self) -> str:
        """Write the end of the archive: two zero blocks, and padding to a full record. The file stays open.

        Returns:
            SHA-256 of the archive, hexadecimal.
        """
        end = self.offset + 2 * BLOCK
        self._write(bytes(2 * BLOCK + -end % RECORD))
        return self._digest.hexdigest()

    def _write(self, data: bytes) -> None:
        self._file.write(data)
        self._digest.update(data)
        self.offset += len(data)


@dataclass(frozen=True)
class ShardTask:
    """The task of writing one shard, sent to a worker.

    Attributes:
        source: only the shard's samples, in the order of the tar.
        output: the shard set.
        split: ``train`` or ``val``.
        number: of the shard.
        classes: class names in index order.
        rules: how images are checked and stored.
        job: digest of the job's description; records with another digest belong to another job.
    """

    source: Source
    output: Output
    split: str
    number: int
    classes: list[str]
    rules: ImageRules
    job: str


@dataclass(frozen=True)
class FinishedShard:
    """A finished shard's contribution to the manifest and the lists.

    Attributes:
        rows: (samples,) of ``SAMPLE_DTYPE``.
        info: its manifest entry.
        rejected: rejected images, a line of ``rejected.jsonl`` each.
        reencoded: re-encoded images, a line of ``reencoded.jsonl`` each.
        formats: suffix -> number of its images that are not JPEGs.
    """

    rows: np.ndarray
    info: ShardInfo
    rejected: list[dict] = field(default_factory=list)
    reencoded: list[dict] = field(default_factory=list)
    formats: dict[str, int] = field(default_factory=dict)


def write_shard(task: ShardTask) -> list[dict]:
    """Write one tar, its index and its record, and publish them in this order, each as a whole.

    Returns:
        The rejected images.

    Raises:
        Stopped: the parent asked the worker to stop; no partial files remain.
    """
    label_of = {name: label for label, name in enumerate(task.classes)}
    rows = np.zeros(len(task.source), dtype=SAMPLE_DTYPE)
    lines: list[str] = []  # of the index
    rejected: list[dict] = []
    reencoded: list[dict] = []
    formats: Counter[str] = Counter()  # of the images that are not JPEGs
    digests: list[str] = []

    def write_tar(file: BinaryIO) -> None:
        tar = TarWriter(file)
        for number in range(len(task.source)):
            original = task.source.read(number)
            try:
                if original.refused:
                    raise Rejected(original.refused)
                image = prepare_image(original.data, task.rules, original.name)
            except Rejected as error:
                rejected.append(_listed(task, original, reason=str(error), bytes=len(original.data)))
            else:
                key = sample_key(task.number, len(lines))
                label = label_of[original.class_name]
                if image.reencoded:
                    reencoded.append(_listed(task, original, reason=image.reencoded, key=key))
                offset, line = _add_sample(tar, key, image, original, label)
                checksum = xxh3_64_intdigest(image.data)
                rows[len(lines)] = (offset, checksum, len(image.data), task.number, label, image.width, image.height)
                lines.append(line)
                formats.update([image.suffix] if image.suffix != "jpg" else [])
            count_image()
        digests.append(tar.close())

    path = task.output.folder / shard_name(task.split, task.number, "tar")
    replace_file(path, write_tar)
    index_path = task.output.folder / shard_name(task.split, task.number, "idx")
    index = "\n".join([f"v1.2 {len(lines)}", *lines, ""]).encode()
    replace_file(index_path, lambda file: file.write(index))
    info = ShardInfo(
        file=path.name,
        samples=len(lines),
        bytes=path.stat().st_size,
        sha256=digests[0],
        idx_file=index_path.name,
        idx_bytes=len(index),
        idx_sha256=hashlib.sha256(index).hexdigest(),
    )
    task.output.publish(info.file, info.sha256)
    task.output.publish(info.idx_file, info.idx_sha256)
    _write_record(task, FinishedShard(rows[: len(lines)], info, rejected, reencoded, dict(formats)))
    return rejected


def shard_name(split: str, number: int, suffix: str) -> str:
    """File name of a shard, such as ``train-000007.tar``."""
    return f"{split}-{number:06d}.{suffix}"


def record_file(folder: Path, split: str, number: int) -> Path:
    """The record of a finished shard; exists until the manifest is written."""
    return folder / f".{shard_name(split, number, 'finished.npz')}"


def read_record(output: Output, sizes: dict[str, int], split: str, number: int, job: str) -> FinishedShard | None:
    """The record of a shard that this job has finished; None if there is none or the sizes of tar and index differ from it.

    Args:
        output: the shard set.
        sizes: of its files (:meth:`~data_prep.output.Output.sizes`).
        split, number: of the shard.
        job: digest of the job's description.
    """
    try:
        with np.load(record_file(output.folder, split, number)) as record:
            about, rows = json.loads(record["about"].tobytes()), record["rows"]
        info = ShardInfo(**about["info"])
        found = [sizes[name] for name in (info.file, info.idx_file)]
    except (OSError, EOFError, ValueError, KeyError, zipfile.BadZipFile):
        return None
    if about["job"] != job or found != [info.bytes, info.idx_bytes]:
        return None
    return FinishedShard(rows, info, about["rejected"], about["reencoded"], about.get("formats", {}))


def _write_record(task: ShardTask, shard: FinishedShard) -> None:
    about = {"job": task.job, **asdict(replace(shard, rows=np.empty(0)))}
    del about["rows"]
    encoded = np.frombuffer(json.dumps(about).encode(), dtype=np.uint8)
    path = record_file(task.output.folder, task.split, task.number)
    replace_file(path, lambda file: np.savez(file, rows=shard.rows, about=encoded))
    task.output.publish(path.name)


def _add_sample(tar: TarWriter, key: str, image: StoredImage, original: SourceImage, label: int) -> tuple[int, str]:
    """Append the sample's members.

    Returns:
        The offset of the image, and the sample's line of the index.
    """
    about = {"file": original.name, "wnid": original.class_name, "width": image.width, "height": image.height}
    members = {image.suffix: image.data, "cls": str(label).encode(), "json": json.dumps(about).encode()}
    offsets = tar.add([(f"{key}.{suffix}", data) for suffix, data in members.items()])
    entries = [f"{suffix} {offset} {len(data)} {key}.{suffix}" for offset, (suffix, data) in zip(offsets, members.items())]
    return offsets[0], " ".join(entries)


def _listed(task: ShardTask, image: SourceImage, **details: object) -> dict:
    return {"split": task.split, "file": image.name, "wnid": image.class_name, **details}
