"""Stage ``data``: shards of JPEGs of ImageNet's size, from generated pictures or from real images."""

from __future__ import annotations

import os
import time
from pathlib import Path

import numpy as np
from PIL import Image

from benchmarks.gpu.common import Context, Rows
from data_prep.sources import ImageFolder
from data_prep.writer import write_shards

SIZE = (500, 375)  # pixels, ImageNet's most frequent size
QUALITY = 90  # with `_CONTRAST`, about the 110 KB of ImageNet's average
_PICTURES = 48  # different ones; the same file may lie in several classes, and decodes as slowly in each
_OCTAVES = (4, 9, 19, 40, 90, 200)  # cells across the picture
_CONTRAST = 30.0  # levels of the finest octave, falling as 1/f, as in photographs


def measure(context: Context) -> Rows:
    began = time.perf_counter()
    files = real_images() or generated(context.work / "pictures", 6 if context.miniature else _PICTURES)
    for split in ("train", "val"):
        copies = 8 if context.miniature and split == "train" else 1
        for number in range(context.classes * copies):
            folder = context.work / "images" / split / f"class{number % context.classes:04d}"
            folder.mkdir(parents=True, exist_ok=True)
            target = folder / f"{number}.JPEG"
            if not target.exists():
                target.symlink_to(files[number % len(files)])
        write_shards(ImageFolder(context.work / "images", split), context.shards, split)
    yield {
        "images": "PERVIT_IMAGENET_SAMPLES" if real_images() else "generated",
        "different_ones": len(files),
        "kb_each": sum(path.stat().st_size for path in files) / len(files) / 1e3,
        "seconds": time.perf_counter() - began,
    }


def real_images() -> list[Path]:
    """The images that the tests use, <class>/*.JPEG; none where they are not at hand."""
    folder = os.environ.get("PERVIT_IMAGENET_SAMPLES")
    return sorted(path.absolute() for path in Path(folder).glob("*/*.JPEG")) if folder else []


def generated(folder: Path, count: int) -> list[Path]:
    """JPEGs with the spectrum and the colour subsampling of photographs, always the same ones."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = [folder / f"{number}.JPEG" for number in range(count)]
    for number, path in enumerate(paths):
        if not path.exists():
            picture(number).save(path, quality=QUALITY, subsampling="4:2:0")
    return paths


def picture(number: int) -> Image.Image:
    """Smooth noise of several scales in three correlated channels, and an edge."""
    generator = np.random.default_rng(number)
    width, height = SIZE
    total = np.full((height, width, 3), 128.0)
    for cells in _OCTAVES:
        coarse = generator.standard_normal((cells * height // width + 2, cells + 2, 1))
        coarse = coarse + 0.4 * generator.standard_normal((*coarse.shape[:2], 3))
        planes = [
            Image.fromarray(plane.astype(np.float32)).resize(SIZE, Image.Resampling.BICUBIC)
            for plane in coarse.transpose(2, 0, 1)
        ]
        total += _CONTRAST * (_OCTAVES[-1] / cells) ** 0.3 * np.stack([np.asarray(plane) for plane in planes], axis=-1)
    total[:, : int(generator.integers(50, width - 50))] += generator.uniform(-60, 60, 3)
    return Image.fromarray(total.clip(0, 255).astype(np.uint8))
