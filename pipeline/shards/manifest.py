"""Read, write and validate the index of a shard set: ``manifest.json`` and the sample tables ``*-samples.npy``.

The contract between writer and readers of shards, validated when it is read, so that no later use of a value can fail.
"""

import json
import mmap
import os
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from itertools import islice
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, TypeAdapter, ValidationError
from xxhash import xxh3_64_intdigest

from pipeline.errors import UserError, first_invalid
from pipeline.files import open_regular, replace_text
from pipeline.stores.place import Place

KEPT_FORMATS = ("png", "webp", "tif", "bmp")  # suffixes of the members that are not JPEGs
MANIFEST = "manifest.json"
REJECTED, REENCODED = "rejected.jsonl", "reencoded.jsonl"
SHARDER = "pervit shard --source IMAGES --output DIR"
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


_STRICT = ConfigDict(extra="forbid", strict=True)
_Count = Annotated[int, Field(ge=0, lt=1 << 63)]
_Positive = Annotated[int, Field(ge=1, lt=1 << 63)]
_Digest = Annotated[str, Field(pattern="^[0-9a-f]{64}$")]
_KeptFormat = Annotated[str, Field(pattern=f"^({'|'.join(KEPT_FORMATS)})$")]
_Names = Annotated[list[str], Field(min_length=1)]


def _check_file_name(name: str) -> str:
    if not name.isprintable() or "/" in name or name in ("", ".", ".."):
        raise ValueError("a name should be the plain name of a file in this folder")
    return name


_FileName = Annotated[str, AfterValidator(_check_file_name)]


@dataclass(frozen=True)
class ShardInfo:
    """Manifest entry of one tar and its index; sizes in bytes, SHA-256 in hexadecimal."""

    __pydantic_config__ = _STRICT

    file: _FileName
    samples: _Count
    bytes: _Count
    sha256: _Digest
    idx_file: _FileName
    idx_bytes: _Count
    idx_sha256: _Digest


class _Source(BaseModel):
    """What a split's provenance must have; it also has kind, path and image rules."""

    fingerprint: str
    subset: Annotated[float, Field(gt=0, le=1)]
    subset_rule: Literal["random", "first"]


def _check_source(source: dict[str, Any]) -> dict[str, Any]:
    """The keys stay in their own order, so that a manifest which is read and written again has the same bytes."""
    _Source.model_validate(source, strict=True)
    return source


@dataclass(frozen=True)
class SplitInfo:
    """Manifest entry of one split (train or val)."""

    __pydantic_config__ = _STRICT

    samples: _Positive
    bytes: _Count
    seed: Annotated[int, Field(ge=0)]
    samples_per_shard: _Positive
    source: Annotated[dict[str, Any], AfterValidator(_check_source)]
    samples_per_class: list[_Count]
    samples_file: _FileName
    samples_sha256: _Digest
    shards: Annotated[list[ShardInfo], Field(min_length=1)]
    rejected: _Count = 0  # rejected images, listed in rejected.jsonl
    reencoded: _Count = 0  # re-encoded images, listed in reencoded.jsonl
    formats: dict[_KeptFormat, _Count] = field(default_factory=dict)  # suffix -> non-JPEG images


@dataclass(frozen=True)
class ShardManifest:
    """The content of ``manifest.json``."""

    __pydantic_config__ = _STRICT

    classes: _Names  # identifiers of the classes (folder names, wnids), in index order
    splits: dict[str, SplitInfo] = field(default_factory=dict)
    version: Literal[1] = 1  # of the format
    class_names: _Names | None = None  # what tables and figures call the classes, in index order; None: their identifiers

    def write(self, folder: Path) -> None:
        replace_text(folder / MANIFEST, json.dumps(asdict(self), indent=1))

    @staticmethod
    def read(folder: Path) -> "ShardManifest":
        """Read ``folder/manifest.json``. Raises UserError: missing, unreadable, or as :meth:`parse`."""
        path = find_manifest(folder)
        try:
            return ShardManifest.parse(path.read_bytes(), path)
        except OSError as error:
            raise UserError(f"{path} cannot be read ({error.strerror})", "restore the file") from None

    @staticmethod
    def parse(content: bytes, path: Place) -> "ShardManifest":
        """Parse and validate the manifest at a path or URL. Raises UserError: damaged, invalid values, or another format version."""
        try:
            manifest: ShardManifest = _VALID.validate_json(content)
        except ValidationError as error:
            raise UserError(f"{path} is damaged: {first_invalid(error)}", _RESTORE) from None
        lists: dict[str, Any] = {f"splits.{n}.samples_per_class": info.samples_per_class for n, info in manifest.splits.items()}
        lists["class_names"] = manifest.class_names or manifest.classes
        for where, values in lists.items():
            if len(values) != len(manifest.classes):
                need = f"must have {len(manifest.classes)} entries, one for each class, got {len(values)}"
                raise UserError(f"{path} is damaged: {where} {need}", _RESTORE)
        for where, names in {"classes": manifest.classes, "class_names": manifest.class_names or []}.items():
            if len({*names}) < len(names):
                raise UserError(f"{path} is damaged: {where} must have each name once", _RESTORE)
        return manifest


_VALID = TypeAdapter(ShardManifest)


def find_manifest(folder: Path) -> Path:
    """The manifest's path. Raises UserError: the folder has none, with what it is instead."""
    path = folder / MANIFEST
    if path.is_file():
        return path
    if unfinished := ", ".join(name for name in ("train", "val") if in_progress_file(folder, name).exists()):
        problem = f"{path} is missing because the sharding of {unfinished} into this folder was not finished"
        raise UserError(problem, "run the same sharding command again, which writes the missing shards")
    if _holds_images(folder):
        first = "move its images into a folder for each class, then " if _holds_images(folder, depth=1) else ""
        remedy = f"{first}write shards of it with pervit shard --source {folder} --output DIR"
        raise UserError(f"{folder} is a folder of images, not a shard set: it has no {MANIFEST}", remedy)
    raise UserError(f"{path} is missing: the folder is not a shard set", f"write the shards with {SHARDER}")


def _holds_images(folder: Path, depth: int = 3) -> bool:
    """Whether one of the first entries of a folder, or of those in it, is an image."""
    from pipeline.shards.image_checks import is_image  # Pillow, for this message alone

    with suppress(OSError), os.scandir(folder) as entries:
        for entry in islice(entries, 8):
            if is_image(entry.name) or depth > 1 and entry.is_dir() and _holds_images(Path(entry.path), depth - 1):
                return True
    return False


def map_sample_table(path: Path, samples: int) -> np.ndarray:
    """Map a sample table, with as many rows as the manifest says, into memory: (samples,) of ``SAMPLE_DTYPE``, read-only.
    Raises ValueError: not a sample table, or the wrong number of rows; the message says what was found; OSError."""
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


def find_misfit(rows: np.ndarray, shards: list[ShardInfo], samples_per_class: list[int]) -> str | None:
    """Describe the first of (n,) rows of ``SAMPLE_DTYPE`` with an out-of-range value, or a number of them that is not the manifest's;
    None if there is none."""
    sizes, classes = np.array([shard.bytes for shard in shards], dtype=np.uint64), len(samples_per_class)
    written = {"shard": np.array([shard.samples for shard in shards]), "label": np.array(samples_per_class)}
    found = {name: np.zeros_like(counts) for name, counts in written.items()}
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
        for name, counts in found.items():
            counts += np.bincount(part[name], minlength=len(counts))
    for name, counts in written.items():
        for number in np.flatnonzero(counts != found[name])[:1]:
            return f"samples with {name} {number} must be {counts[number]}, got {found[name][number]}"
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


def sample_key(shard: int, place: int) -> str:
    """The WebDataset key of the sample at ``place`` of its shard, counted from 0: ``000007-001234``."""
    return f"{shard:06d}-{place:06d}"
