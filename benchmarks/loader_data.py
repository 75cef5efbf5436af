"""The same images in the forms that contestants read: as they are, and re-encoded smaller; as folder, shards and list."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Callable
from enum import Enum
from pathlib import Path

from loader_settings import StoredImages, jpegs_of
from PIL import Image

from pipeline.data.shards import ShardSet
from pipeline.errors import UserError

QUALITY = 90
SHORT_SIDE, LONG_SIDE = 256, 500  # pixels
SHARDER = Path(__file__).parent.parent / "data_prep" / "shard_imagenet.py"


class Form(Enum):
    """How the images are stored. Re-encoded ones have quality 90 and 4:2:0."""

    ORIGINALS = "originals"
    SHORT_SIDE_256 = "short_side_256"  # larger ones reduced to that, the others as they are
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
        raise UserError(f"{images} has 0 images, a folder <class>/*.JPEG needed: pass one with --images.")
    folders = {
        Form.ORIGINALS: lambda target: images,
        Form.SHORT_SIDE_256: lambda target: reencode(images, target, reduce_short_side, keep_small=True),
        Form.LONG_SIDE_500: lambda target: reencode(images, target, reduce_long_side, keep_small=False),
    }
    return {
        form: _shard(folders[form](work / form.value), work / f"{form.value}_shards", count // (2 * workers) + 1)
        for form in forms
    }


def all_jpegs(images: Path) -> list[Path]:
    """The JPEGs of a folder ``<class>/*.JPEG``."""
    if not images.is_dir():
        return []
    return [path for folder in sorted(images.iterdir()) if folder.is_dir() for path in jpegs_of(folder)]


def reduce_short_side(image: Image.Image) -> Image.Image:
    """Antialiased bicubic, as ``shard_imagenet.py --resize-short-side`` does."""
    factor = SHORT_SIDE / min(image.size)
    return image if factor >= 1 else image.resize([round(side * factor) for side in image.size], Image.Resampling.BICUBIC)


def reduce_long_side(image: Image.Image) -> Image.Image:
    """Averaged areas and sides rounded down, as FFCV's writer does."""
    factor = LONG_SIDE / max(image.size)
    return image if factor >= 1 else image.resize([int(side * factor) for side in image.size], Image.Resampling.BOX)


def reencode(images: Path, target: Path, reduce: Callable[[Image.Image], Image.Image], keep_small: bool) -> Path:
    """A copy of the folder with its images reduced, as JPEGs of quality 90 and 4:2:0.

    Args:
        keep_small: images that are not reduced stay byte for byte as they are.
    """
    for path in all_jpegs(images):
        copy = target / path.relative_to(images)
        copy.parent.mkdir(parents=True, exist_ok=True)
        with Image.open(path) as image:
            smaller = reduce(image.convert("RGB"))
            if keep_small and smaller.size == image.size:
                shutil.copyfile(path, copy)
            else:
                smaller.save(copy, "JPEG", quality=QUALITY, subsampling="4:2:0")
    return target


def _shard(folder: Path, shards: Path, samples_per_shard: int) -> StoredImages:
    command = [sys.executable, SHARDER, "--source", folder, "--output", shards, "--split", "train"]
    command += ["--samples-per-shard", str(samples_per_shard)]
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
