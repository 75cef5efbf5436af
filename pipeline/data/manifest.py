"""``manifest.json`` of a shard set: the contract between whoever writes the shards and whoever reads them."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass, field
from pathlib import Path

import numpy as np

from pipeline.errors import UserError
from pipeline.files import replace_text

FORMAT_VERSION = 2
MANIFEST = "manifest.json"
REJECTED, REENCODED = "rejected.jsonl", "reencoded.jsonl"
SHARDER = "python data_prep/shard_imagenet.py --source IMAGES --output DIR"

SAMPLE_DTYPE = np.dtype(
    [
        ("offset", "<u8"),  # of the JPEG in its tar, bytes
        ("checksum", "<u8"),  # XXH3-64 of the JPEG: each read is checked, at 10 us per image
        ("bytes", "<u4"),
        ("shard", "<u4"),
        ("label", "<u4"),
        ("width", "<u2"),  # pixels, as stored (EXIF orientation is not applied)
        ("height", "<u2"),
    ]
)


@dataclass(frozen=True)
class ShardInfo:
    """One tar and its index, as the manifest lists them."""

    file: str
    samples: int
    bytes: int
    sha256: str
    idx_file: str
    idx_bytes: int
    idx_sha256: str


@dataclass(frozen=True)
class SplitInfo:
    """One split (train or val) of a shard set."""

    samples: int
    bytes: int
    seed: int
    samples_per_shard: int
    source: dict  # kind, path, fingerprint, subset, how images were stored: which bytes went in
    samples_per_class: list[int]
    samples_file: str
    samples_sha256: str
    shards: list[ShardInfo]
    rejected: int = 0  # images that were left out, listed in rejected.jsonl
    reencoded: int = 0  # images that were encoded anew, listed in reencoded.jsonl


@dataclass(frozen=True)
class Manifest:
    """``manifest.json``: the contract between whoever wrote the shards and whoever reads them."""

    classes: list[str]
    splits: dict[str, SplitInfo] = field(default_factory=dict)
    version: int = FORMAT_VERSION

    def write(self, folder: Path) -> None:
        """Replace the folder's manifest in one step: readers see the old one or the new one."""
        replace_text(folder / MANIFEST, json.dumps(asdict(self), indent=1))

    @staticmethod
    def read(folder: Path) -> Manifest:
        """Read ``folder/manifest.json``.

        Raises:
            UserError: missing, damaged, or of another format version.
        """
        path = folder / MANIFEST
        if not path.is_file():
            raise UserError(f"{path} is missing, one manifest per shard set needed: write the shards with {SHARDER}.")
        try:
            tree = json.loads(path.read_text())
            version = tree["version"]
            if version == FORMAT_VERSION:
                for split in tree["splits"].values():
                    split["shards"] = [ShardInfo(**shard) for shard in split["shards"]]
                tree["splits"] = {name: SplitInfo(**split) for name, split in tree["splits"].items()}
                return Manifest(**tree)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise UserError(
                f"{path} is damaged ({error!r}), a whole manifest needed: write the shards again with {SHARDER}."
            ) from None
        raise UserError(
            f"{path} has format version {version}, version {FORMAT_VERSION} needed: use the release that wrote it or shard again."
        )


def shard_name(split: str, number: int, suffix: str) -> str:
    """``train-000007.tar`` and the like."""
    return f"{split}-{number:06d}.{suffix}"


def sample_key(shard: int, place: int) -> str:
    """The WebDataset key of the sample at ``place`` of its shard, counted from 0: ``000007-001234``."""
    return f"{shard:06d}-{place:06d}"


def file_sha256(path: Path) -> str:
    """SHA-256 of a file's content, hexadecimal."""
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()
