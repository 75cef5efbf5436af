"""``manifest.json`` of a shard set: the contract between the writer and the readers of shards."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np

from pipeline.data.kept_formats import FORMATS
from pipeline.errors import UserError
from pipeline.files import open_regular, replace_text
from pipeline.stores.place import Place

FORMAT_VERSION = 2
EXTENDED_VERSION = 3  # of a manifest with class_names or with images that are no JPEGs: readers of version 2 alone refuse it
MANIFEST = "manifest.json"
REJECTED, REENCODED = "rejected.jsonl", "reencoded.jsonl"
SHARDER = "python -m data_prep.shard_imagenet --source IMAGES --output DIR"

SAMPLE_DTYPE = np.dtype(
    [
        ("offset", "<u8"),  # of the JPEG in its tar, bytes
        ("checksum", "<u8"),  # XXH3-64 of the JPEG, verified on every read (10 us per image)
        ("bytes", "<u4"),
        ("shard", "<u4"),
        ("label", "<u4"),
        ("width", "<u2"),  # pixels, as stored (EXIF orientation is not applied)
        ("height", "<u2"),
    ]
)
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
    source: dict  # provenance: kind, path, fingerprint, subset and its rule (none: random), image rules
    samples_per_class: list[int]
    samples_file: str
    samples_sha256: str
    shards: list[ShardInfo]
    rejected: int = 0  # rejected images, listed in rejected.jsonl
    reencoded: int = 0  # re-encoded images, listed in reencoded.jsonl
    formats: dict[str, int] = field(default_factory=dict)  # suffix -> images that are no JPEGs; not written if there are none


@dataclass(frozen=True)
class ShardManifest:
    """The content of ``manifest.json``."""

    classes: list[str]  # in index order; they identify the classes: folder names, wnids
    splits: dict[str, SplitInfo] = field(default_factory=dict)
    version: int = FORMAT_VERSION  # of the file that was read; the one to write depends on the content
    class_names: list[str] | None = (
        None  # what tables and figures call the classes, in index order; None: as they are identified
    )

    def write(self, folder: Path) -> None:
        """Replace the folder's manifest atomically. What version 2 can say is written byte for byte as it always was."""
        tree = asdict(self)
        for split in tree["splits"].values():
            if not split["formats"]:
                del split["formats"]
        if self.class_names is None:
            del tree["class_names"]
        extended = "class_names" in tree or any("formats" in split for split in tree["splits"].values())
        tree["version"] = EXTENDED_VERSION if extended else FORMAT_VERSION
        replace_text(folder / MANIFEST, json.dumps(tree, indent=1))

    @staticmethod
    def read(folder: Path) -> ShardManifest:
        """Read ``folder/manifest.json``.

        Raises:
            UserError: missing, damaged, invalid values, or another format version.
        """
        path = folder / MANIFEST
        if not path.is_file():
            unfinished = ", ".join(name for name in ("train", "val") if in_progress_file(folder, name).exists())
            if unfinished:
                raise UserError(
                    f"{path} is missing because the sharding of {unfinished} into this folder was not finished",
                    "run the same sharding command again, which writes the missing shards",
                )
            raise UserError(f"{path} is missing, one manifest per shard set needed", f"write the shards with {SHARDER}")
        return ShardManifest.parse(path.read_bytes(), path)

    @staticmethod
    def parse(content: bytes, path: Place) -> ShardManifest:
        """The manifest of a file's content.

        Args:
            content: of ``manifest.json``.
            path: what messages call the file.

        Raises:
            UserError: damaged, invalid values, or another format version.
        """
        try:
            tree = json.loads(content)
            version = tree["version"]
            if version in (FORMAT_VERSION, EXTENDED_VERSION):
                for split in tree["splits"].values():
                    split["shards"] = [ShardInfo(**shard) for shard in split["shards"]]
                tree["splits"] = {name: SplitInfo(**split) for name, split in tree["splits"].items()}
                manifest = ShardManifest(**tree)
                manifest._check()
                return manifest
        except _Impossible as error:
            raise UserError(f"{path} is damaged: {error}", _RESTORE) from None
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise UserError(f"{path} is damaged ({error!r}), a whole manifest needed", _RESTORE) from None
        raise UserError(
            f"{path} has format version {version}, version {FORMAT_VERSION} or {EXTENDED_VERSION} needed",
            "use the release that wrote it or shard again",
        )

    def _check(self) -> None:
        """Validate every value, so that no later use of the manifest can fail."""
        _check_values("", self, {"classes": _NAMES})
        if self.class_names is not None:
            _check_values("", self, {"class_names": _NAMES})
            if len(self.class_names) != len(self.classes):
                raise _Impossible(
                    f"class_names has {len(self.class_names)} names, {len(self.classes)} needed, one for each class"
                )
        for name, split in self.splits.items():
            _check_values(f"splits.{name}.", split, _SPLIT_VALUES)
            _check_values(f"splits.{name}.source.", split.source, _SOURCE_VALUES)
            if len(split.samples_per_class) != len(self.classes):
                raise _Impossible(
                    f"splits.{name}.samples_per_class has {len(split.samples_per_class)} counts, {len(self.classes)} needed, "
                    f"one for each class"
                )
            for number, shard in enumerate(split.shards):
                _check_values(f"splits.{name}.shards.{number}.", shard, _SHARD_VALUES)


class _Impossible(ValueError):
    """A value that no writer produces."""


class _Needed(NamedTuple):
    """A constraint on a value: a predicate and its description."""

    fits: Callable[[object], bool]
    words: str


def _is_whole(value: object, least: int = 0) -> bool:
    return type(value) is int and least <= value < 1 << 63


def _is_plain_name(value: object) -> bool:
    return isinstance(value, str) and value.isprintable() and "/" not in value and value not in ("", ".", "..")


_COUNT = _Needed(_is_whole, "a whole number of at least 0")
_POSITIVE = _Needed(partial(_is_whole, least=1), "a whole number of at least 1")
_FILE = _Needed(_is_plain_name, "the plain name of a file in this folder")
_DIGEST = _Needed(
    lambda value: isinstance(value, str) and bool(re.fullmatch("[0-9a-f]{64}", value)), "a SHA-256 of 64 hexadecimal digits"
)
_NAMES = _Needed(
    lambda value: isinstance(value, list) and bool(value) and all(isinstance(name, str) for name in value),
    "a list of at least 1 name",
)
_SHARD_VALUES = {
    "file": _FILE,
    "samples": _COUNT,
    "bytes": _COUNT,
    "sha256": _DIGEST,
    "idx_file": _FILE,
    "idx_bytes": _COUNT,
    "idx_sha256": _DIGEST,
}
_SPLIT_VALUES = {
    "samples": _POSITIVE,
    "bytes": _COUNT,
    "seed": _Needed(lambda value: type(value) is int and value >= 0, _COUNT.words),
    "samples_per_shard": _POSITIVE,
    "source": _Needed(lambda value: isinstance(value, dict), "an object"),
    "samples_per_class": _Needed(lambda value: isinstance(value, list) and all(map(_is_whole, value)), "a list of counts"),
    "samples_file": _FILE,
    "samples_sha256": _DIGEST,
    "shards": _Needed(bool, "at least 1 shard"),
    "rejected": _COUNT,
    "reencoded": _COUNT,
    "formats": _Needed(
        lambda value: isinstance(value, dict) and all(key in FORMATS and _is_whole(count) for key, count in value.items()),
        f"counts of {', '.join(FORMATS)}",
    ),
}
_SOURCE_VALUES = {
    "fingerprint": _Needed(lambda value: isinstance(value, str), "a string"),
    "subset": _Needed(
        lambda value: value is None or isinstance(value, int | float) and not isinstance(value, bool) and 0 < value <= 1,
        "a share above 0 and at most 1",
    ),
    "subset_rule": _Needed(lambda value: value in (None, "random", "first"), "random or first"),
}


def _check_values(where: str, values: object, needed: dict[str, _Needed]) -> None:
    """Check attributes, or the keys of a dict, against their constraints.

    Raises:
        _Impossible: a constraint is violated; the message names the value, prefixed with ``where``.
    """
    for name, (fits, words) in needed.items():
        value = values.get(name) if isinstance(values, dict) else getattr(values, name)
        if not fits(value):
            raise _Impossible(f"{where}{name} is {value!r:.60}, {words} needed")


def in_progress_file(folder: Path, split: str) -> Path:
    """A marker file that exists from a split's first shard until the manifest lists the split."""
    return folder / f".{split}-in-progress"


def shard_name(split: str, number: int, suffix: str) -> str:
    """File name of a shard, such as ``train-000007.tar``."""
    return f"{split}-{number:06d}.{suffix}"


def sample_key(shard: int, place: int) -> str:
    """The WebDataset key of the sample at ``place`` of its shard, counted from 0: ``000007-001234``."""
    return f"{shard:06d}-{place:06d}"


def file_sha256(path: Path) -> str:
    """SHA-256 of a regular file, hexadecimal."""
    digest = hashlib.sha256()
    with open(open_regular(path), "rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()
