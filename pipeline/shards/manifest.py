"""Read, write and validate the index of a shard set: ``manifest.json`` and the sample tables ``*-samples.npy``.

This is the contract between the writer and the readers of shards. Both are validated when they are read, so that no later use of a
value can fail.
"""

from __future__ import annotations

import json
import mmap
import os
import re
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path

import numpy as np
from xxhash import xxh3_64_intdigest

from pipeline.errors import UserError
from pipeline.files import open_regular, replace_text
from pipeline.stores.place import Place

FORMAT_VERSION = 1
KEPT_FORMATS = ("png", "webp", "tif", "bmp")  # suffixes of the members that are not JPEGs
MANIFEST = "manifest.json"
REJECTED, REENCODED = "rejected.jsonl", "reencoded.jsonl"
SHARDER = "python -m data_prep.shard_imagenet --source IMAGES --output DIR"
SAMPLE_DTYPE = np.dtype(
    [
        ("offset", "<u8"),  # of the image in its tar, bytes
        ("checksum", "<u8"),  # XXH3-64 of the image, verified on every read (10 us per image)
        ("bytes", "<u4"),
        ("shard", "<u4"),
        ("label", "<u4"),
        ("width", "<u2"),  # pixels, as stored (EXIF orientation is not applied)
        ("height", "<u2"),
    ]
)
_ROWS_AT_ONCE = 1 << 14  # 512 kB, so that a chunk stays in the CPU cache for all comparisons
_RESTORE = f"restore the file, or write the shards again with {SHARDER}"


@dataclass(frozen=True)
class ShardInfo:
    """Manifest entry of one tar and its index; sizes in bytes, SHA-256 in hexadecimal."""

    file: str
    samples: int
    bytes: int
    sha256: str
    idx_file: str
    idx_bytes: int
    idx_sha256: str


@dataclass(frozen=True)
class SplitInfo:
    """Manifest entry of one split (train or val)."""

    samples: int
    bytes: int
    seed: int
    samples_per_shard: int
    source: dict  # provenance: kind, path, fingerprint, subset and its rule, image rules
    samples_per_class: list[int]
    samples_file: str
    samples_sha256: str
    shards: list[ShardInfo]
    rejected: int = 0  # rejected images, listed in rejected.jsonl
    reencoded: int = 0  # re-encoded images, listed in reencoded.jsonl
    formats: dict[str, int] = field(default_factory=dict)  # suffix -> non-JPEG images


@dataclass(frozen=True)
class ShardManifest:
    """The content of ``manifest.json``."""

    classes: list[str]  # identifiers of the classes (folder names, wnids), in index order
    splits: dict[str, SplitInfo] = field(default_factory=dict)
    version: int = FORMAT_VERSION
    class_names: list[str] | None = None  # what tables and figures call the classes, in index order; None: their identifiers

    def write(self, folder: Path) -> None:
        replace_text(folder / MANIFEST, json.dumps(asdict(self), indent=1))

    @staticmethod
    def read(folder: Path) -> ShardManifest:
        """Read ``folder/manifest.json``. Raises UserError: missing, or as :meth:`parse`."""
        path = folder / MANIFEST
        if path.is_file():
            return ShardManifest.parse(path.read_bytes(), path)
        if unfinished := ", ".join(name for name in ("train", "val") if in_progress_file(folder, name).exists()):
            raise UserError(
                f"{path} is missing because the sharding of {unfinished} into this folder was not finished",
                "run the same sharding command again, which writes the missing shards",
            )
        raise UserError(f"{path} is missing: the folder is not a shard set", f"write the shards with {SHARDER}")

    @staticmethod
    def parse(content: bytes, path: Place) -> ShardManifest:
        """Parse and validate the manifest at a path or URL. Raises UserError: damaged, invalid values, or another format version."""
        try:
            tree = json.loads(content)
            if tree["version"] != FORMAT_VERSION:
                raise _Invalid(f"its version must be {FORMAT_VERSION}, got {tree['version']!r:.60}")
            for split in tree["splits"].values():
                split["shards"] = [ShardInfo(**shard) for shard in split["shards"]]
            tree["splits"] = {name: SplitInfo(**split) for name, split in tree["splits"].items()}
            manifest = ShardManifest(**tree)
            manifest._check()
        except _Invalid as error:
            raise UserError(f"{path} is damaged: {error}", _RESTORE) from None
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise UserError(f"{path} is damaged: it is not a complete manifest ({error!r})", _RESTORE) from None
        return manifest

    def _check(self) -> None:
        _check_values("", self, {"classes": _NAMES})
        if self.class_names is not None:
            _check_values("", self, {"class_names": _NAMES})
            self._check_length("class_names", self.class_names)
        for name, split in self.splits.items():
            _check_values(f"splits.{name}.", split, _SPLIT_VALUES)
            _check_values(f"splits.{name}.source.", split.source, _SOURCE_VALUES)
            self._check_length(f"splits.{name}.samples_per_class", split.samples_per_class)
            for number, shard in enumerate(split.shards):
                _check_values(f"splits.{name}.shards.{number}.", shard, _SHARD_VALUES)

    def _check_length(self, where: str, values: list) -> None:
        if len(values) != len(self.classes):
            raise _Invalid(f"{where} must have {len(self.classes)} entries, one for each class, got {len(values)}")


class _Invalid(ValueError):
    """A value that no writer produces."""


def _is_whole(value: object, least: int = 0) -> bool:
    return type(value) is int and least <= value < 1 << 63


def _is_plain_name(value: object) -> bool:
    return isinstance(value, str) and value.isprintable() and "/" not in value and value not in ("", ".", "..")


def _is_text_list(value: object) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(name, str) for name in value)


# A predicate for a value, and what the value must be.
_Rule = tuple[Callable[..., bool], str]
_COUNT: _Rule = (_is_whole, "a whole number of at least 0")
_POSITIVE: _Rule = (partial(_is_whole, least=1), "a whole number of at least 1")
_FILE: _Rule = (_is_plain_name, "the plain name of a file in this folder")
_DIGEST: _Rule = (
    lambda value: isinstance(value, str) and bool(re.fullmatch("[0-9a-f]{64}", value)),
    "a SHA-256 of 64 hexadecimal digits",
)
_NAMES: _Rule = (_is_text_list, "a list of at least 1 name")
_SHARD_VALUES = {
    **dict.fromkeys(("file", "idx_file"), _FILE),
    **dict.fromkeys(("samples", "bytes", "idx_bytes"), _COUNT),
    **dict.fromkeys(("sha256", "idx_sha256"), _DIGEST),
}
_SPLIT_VALUES: dict[str, _Rule] = {
    **dict.fromkeys(("samples", "samples_per_shard"), _POSITIVE),
    **dict.fromkeys(("bytes", "rejected", "reencoded"), _COUNT),
    "seed": (lambda value: type(value) is int and value >= 0, _COUNT[1]),
    "source": (lambda value: isinstance(value, dict), "an object"),
    "samples_per_class": (lambda value: isinstance(value, list) and all(map(_is_whole, value)), "a list of counts"),
    "samples_file": _FILE,
    "samples_sha256": _DIGEST,
    "shards": (bool, "a list of at least 1 shard"),
    "formats": (
        lambda value: isinstance(value, dict) and all(key in KEPT_FORMATS and _is_whole(count) for key, count in value.items()),
        f"counts of {', '.join(KEPT_FORMATS)}",
    ),
}
_SOURCE_VALUES: dict[str, _Rule] = {
    "fingerprint": (lambda value: isinstance(value, str), "a string"),
    "subset": (lambda value: type(value) in (int, float) and 0 < value <= 1, "a share above 0 and at most 1"),
    "subset_rule": (lambda value: value in ("random", "first"), "random or first"),
}


def _check_values(where: str, values: object, rules: dict[str, _Rule]) -> None:
    for name, (fits, words) in rules.items():
        value = values.get(name) if isinstance(values, dict) else getattr(values, name)
        if not fits(value):
            raise _Invalid(f"{where}{name} must be {words}, got {value!r:.60}")


def map_sample_table(path: Path, samples: int) -> np.ndarray:
    """Map a sample table, with as many rows as the manifest says, into memory: (samples,) of ``SAMPLE_DTYPE``, read-only.

    Raises:
        ValueError: not a sample table, or the wrong number of rows; the message says what was found.
        OSError
    """
    os.close(open_regular(path))
    try:
        rows = np.lib.format.open_memmap(path, mode="r")
    except OSError:
        raise
    except Exception as error:  # NumPy evaluates the header, and can raise nearly any exception for a malformed one
        raise ValueError(" ".join(str(error).split()) or type(error).__name__) from None
    if rows.dtype != SAMPLE_DTYPE or rows.ndim != 1:
        raise ValueError(f"it holds an array of shape {rows.shape} and {len(rows.dtype)} fields")
    if len(rows) != samples:
        raise ValueError(f"it lists {len(rows)} samples")
    return rows


def forget_pages(rows: np.ndarray) -> None:
    """Stop counting a mapped table's pages as this process's memory; they stay in the page cache.

    After a look at every row, each process of a node would otherwise be charged with all of the table that they share.
    """
    mapped = getattr(rows, "_mmap", None)
    if mapped is not None:
        mapped.madvise(mmap.MADV_DONTNEED)
        mapped.madvise(mmap.MADV_RANDOM)  # else each row that is not in the page cache would be read with 128 kB around it


def find_out_of_range(rows: np.ndarray, shard_bytes: list[int], classes: int) -> str | None:
    """Describe the first of (n,) rows of ``SAMPLE_DTYPE`` with an out-of-range value; None if there is none."""
    sizes = np.array(shard_bytes, dtype=np.uint64)
    for first in range(0, len(rows), _ROWS_AT_ONCE):
        part = rows[first : first + _ROWS_AT_ONCE]
        shard, size = part["shard"], part["bytes"]
        room = sizes.take(shard, mode="clip")
        wrong = {
            "shard": (shard >= len(sizes), f"below {len(sizes)}"),
            "label": (part["label"] >= classes, f"below {classes}"),
            "width": (part["width"] == 0, "at least 1"),
            "height": (part["height"] == 0, "at least 1"),
            "bytes": ((size == 0) | (size > room), "at least 1 and within its tar"),
            "offset": (part["offset"] > room - size, "within its tar"),
        }
        for name, (rows_wrong, allowed) in wrong.items():
            if rows_wrong.any():
                row = int(rows_wrong.argmax())
                return f"{name} of sample {first + row} must be {allowed}, got {part[name][row]}"
    return None


def sample_damage(data: bytes | memoryview, row: np.void) -> str:
    """Compare what was read of a sample with its row of the sample table; empty if it is what was written."""
    size, checksum = int(row["bytes"]), int(row["checksum"])
    if len(data) != size:
        return f"is cut off: {len(data)} of its {size} bytes are there, at offset {row['offset']}"
    if (found := xxh3_64_intdigest(data)) != checksum:
        return f"was changed after it was written: its checksum must be {checksum:016x}, got {found:016x}"
    return ""


def in_progress_file(folder: Path, split: str) -> Path:
    """A marker file that exists from a split's first shard until the manifest lists the split."""
    return folder / f".{split}-in-progress"


def shard_name(split: str, number: int, suffix: str) -> str:
    """File name of a shard, such as ``train-000007.tar``."""
    return f"{split}-{number:06d}.{suffix}"


def sample_key(shard: int, place: int) -> str:
    """The WebDataset key of the sample at ``place`` of its shard, counted from 0: ``000007-001234``."""
    return f"{shard:06d}-{place:06d}"
