"""The same images in the forms that contestants read: as they are, and re-encoded smaller; as folder, shards and list."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from PIL import Image

from pipeline.data.shards import ShardSet
from pipeline.errors import UserError

QUALITY = 90
SHORT_SIDE, LONG_SIDE = 256, 500  # pixels
SHARDER = Path(__file__).parent.parent / "data_prep" / "shard_imagenet.py"


@dataclass(frozen=True)
class StoredImages:
    """One form of the images."""

    folder: Path  # <class>/*.JPEG
    shards: Path  # a shard set, split train
    listing: Path  # lines "path <tab> offset <tab> bytes <tab> width <tab> height": the JPEGs within the shards


def prepare(images: Path, work: Path, forms: set[str], workers: int) -> dict[str, StoredImages]:
    """Store the images in each of some forms.

    Args:
        images: folder ``<class>/*.JPEG``.
        work: folder for the results.
        forms: some of "originals"; "short_side_256": larger ones reduced to that; "at_most_500": every image
            re-encoded, larger ones reduced, as FFCV's writer does with ``max_resolution=500``.
        workers: shards are made for so many readers at least.

    Raises:
        UserError: no images there.
    """
    count = sum(path.suffix.lower() in (".jpeg", ".jpg") for path in images.glob("*/*"))
    if count == 0:
        raise UserError(f"{images} has 0 images, a folder <class>/*.JPEG needed: pass one with --images.")
    folders = {
        "originals": lambda: images,
        "short_side_256": lambda: reencode(images, work / "short_side_256", reduce_short_side, keep_small=True),
        "at_most_500": lambda: reencode(images, work / "at_most_500", reduce_long_side, keep_small=False),
    }
    return {form: _shard(folders[form](), work / f"{form}_shards", count // (2 * workers) + 1) for form in sorted(forms)}


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
    for path in sorted(images.glob("*/*")):
        if path.suffix.lower() not in (".jpeg", ".jpg"):
            continue
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
