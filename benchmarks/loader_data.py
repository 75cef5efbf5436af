"""The same images in the formats that contestants read: original and reduced size; as folder, shards and list."""

from __future__ import annotations

import subprocess
import sys
from enum import Enum
from pathlib import Path

from loader_settings import StoredImages, jpegs_of
from PIL import Image

from pipeline.errors import UserError
from pipeline.shards.shard_set import ShardSet

QUALITY = 90
LONG_SIDE = 500  # pixels
SHARDER = Path(__file__).parent.parent / "data_prep" / "shard_imagenet.py"


class Form(Enum):
    """How the images are stored. Re-encoded ones have quality 90 and 4:2:0."""

    ORIGINALS = "originals"
    SHORT_SIDE_256 = "short_side_256"  # shard_imagenet.py --resize-short-side: larger ones reduced, the others as they are
    LONG_SIDE_500 = "long_side_500"  # all re-encoded, larger ones reduced: FFCV's writer with max_resolution=500


def prepare(images: Path, work: Path, forms: set[Form], workers: int) -> dict[Form, StoredImages]:
    """Store the images in each of some forms.

    Args:
        images: folder ``<class>/*.JPEG``.
        work: folder for the results.
        forms: the forms to make.
        workers: shards are made for so many readers at least.

    Raises:
        UserError: no images there.
    """
    count = len(all_jpegs(images))
    if count == 0:
        raise UserError(f"{images} must be a folder <class>/*.JPEG, got 0 images", "pass one with --images")
    samples_per_shard = count // (2 * workers) + 1
    stored = {}
    for form in forms:
        folder, options = images, []
        if form is Form.SHORT_SIDE_256:
            options = ["--resize-short-side", "256", "--quality", str(QUALITY)]
        elif form is Form.LONG_SIDE_500:
            folder = reduce_long_sides(images, work / form.value)
        stored[form] = _shard(folder, work / f"{form.value}_shards", samples_per_shard, options)
    return stored


def all_jpegs(images: Path) -> list[Path]:
    """The JPEGs of a folder ``<class>/*.JPEG``."""
    if not images.is_dir():
        return []
    return [path for folder in sorted(images.iterdir()) if folder.is_dir() for path in jpegs_of(folder)]


def reduce_long_sides(images: Path, target: Path) -> Path:
    """A copy of the folder, re-encoded as FFCV's writer does: averaged areas, sides rounded down, 4:2:0."""
    for path in all_jpegs(images):
        copy = target / path.relative_to(images)
        copy.parent.mkdir(parents=True, exist_ok=True)
        with Image.open(path) as image:
            pixels = image.convert("RGB")
        factor = LONG_SIDE / max(pixels.size)
        if factor < 1:
            pixels = pixels.resize([int(side * factor) for side in pixels.size], Image.Resampling.BOX)
        pixels.save(copy, "JPEG", quality=QUALITY, subsampling="4:2:0")
    return target


def _shard(folder: Path, shards: Path, samples_per_shard: int, options: list[str]) -> StoredImages:
    command = [sys.executable, SHARDER, "--source", folder, "--output", shards, "--split", "train"]
    command += ["--samples-per-shard", str(samples_per_shard), *options]
    result = subprocess.run(command, capture_output=True, text=True)
    if result.returncode:
        raise UserError(f"{folder} cannot be sharded: {result.stderr.strip().splitlines()[-1].removeprefix('error: ')}")
    listing = shards.with_suffix(".tsv")
    listing.write_text("".join(f"{line}\n" for line in _lines(ShardSet(shards, "train"))))
    return StoredImages(folder, shards, listing)


def _lines(shards: ShardSet) -> list[str]:
    fields = ("offset", "bytes", "width", "height")
    files = [str(shards.folder / shard.file) for shard in shards.info.shards]
    return ["\t".join([files[sample["shard"]], *(str(sample[field]) for field in fields)]) for sample in shards.samples]
