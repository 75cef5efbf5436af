"""Settings shared by all contestants of ``benchmarks/loader.py``."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

IMAGE_SIZE = 224
CROP_SCALE, CROP_RATIO, FLIP = (0.08, 1.0), (3 / 4, 4 / 3), 0.5
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)  # of pixels in [0, 1]


class Unavailable(Exception):
    """This contestant cannot start here; the message says why."""


@dataclass(frozen=True)
class StoredImages:
    """The same images in the three ways that contestants read them.

    Attributes:
        folder: ``<class>/*.JPEG``.
        shards: a shard set, split train.
        listing: a file with a line ``path <tab> offset <tab> bytes <tab> width <tab> height`` per JPEG within the shards.
    """

    folder: Path
    shards: Path
    listing: Path


def jpegs_of(folder: Path) -> list[Path]:
    """The JPEG files of a class folder, by name."""
    return sorted(path for path in folder.iterdir() if path.suffix.lower() in (".jpeg", ".jpg"))


@dataclass(frozen=True)
class Settings:
    """The settings passed to every contestant.

    Attributes:
        images: what to read.
        workers: threads or processes that decode.
        batch_size: B.
        timm: folder that holds the package ``timm``; None: it is looked for among the installed packages.
    """

    images: StoredImages
    workers: int
    batch_size: int
    timm: Path | None
