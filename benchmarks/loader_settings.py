"""What all contestants of ``benchmarks/loader.py`` have in common."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

IMAGE_SIZE = 224
CROP_SCALE, CROP_RATIO, FLIP = (0.08, 1.0), (3 / 4, 4 / 3), 0.5
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)  # of pixels on [0, 1]


class Unavailable(Exception):
    """This contestant cannot start here; the message says why."""


@dataclass(frozen=True)
class Settings:
    """What every contestant is given.

    Attributes:
        data: the images: a shard set, a folder ``<class>/*.JPEG`` (Pillow), or a list of JPEGs (FFCV).
        workers: threads or processes that decode.
        batch_size: B.
        timm: folder that holds the package ``timm``; None: it is looked for among the installed packages.
    """

    data: Path
    workers: int
    batch_size: int
    timm: Path | None
