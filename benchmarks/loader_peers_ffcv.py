"""The contestant FFCV, in its JPEG mode, on the given JPEGs without re-encoding.

Runs in a virtual environment of its own (NumPy 1) and imports none of this repository's packages. FFCV's random resized crop
uses area interpolation, which is less work than bicubic for the crops that it enlarges, about half of them.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from ffcv.fields import RGBImageField
from ffcv.fields.rgb_image import IMAGE_MODES, RandomResizedCropRGBImageDecoder
from ffcv.loader import Loader, OrderOption
from ffcv.transforms import NormalizeImage, RandomHorizontalFlip, ToTensor, ToTorchImage
from ffcv.writer import DatasetWriter
from loader_settings import CROP_RATIO, CROP_SCALE, FLIP, IMAGE_SIZE, MEAN, STD, Settings
from torch import Tensor

EPOCH = 200_000  # images: one epoch outlasts the benchmark, because FFCV drains its queue at the end of an epoch


class StoredJpegs:
    """The JPEGs of a listing (:class:`~loader_settings.StoredImages`)."""

    def __init__(self, listing: Path) -> None:
        self.rows = [line.split("\t") for line in listing.read_text().splitlines()]

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> tuple[tuple[np.ndarray, int, int]]:
        path, *numbers = self.rows[index]
        offset, size, width, height = map(int, numbers)
        return ((np.fromfile(path, dtype=np.uint8, count=size, offset=offset), width, height),)


class StoredJpegField(RGBImageField):
    """FFCV's image field, filled with JPEGs as they are: its own would encode them once more."""

    def encode(self, destination, sample, malloc) -> None:
        data, destination["width"], destination["height"] = sample
        destination["mode"] = IMAGE_MODES["jpg"]
        destination["data_ptr"], storage = malloc(data.nbytes)
        storage[:] = data


def ffcv_batches(settings: Settings) -> Iterator[Tensor]:
    """Batches (B, 3, 224, 224) of FFCV's loader."""
    with tempfile.TemporaryDirectory() as folder:
        file = str(Path(folder) / "images.beton")
        jpegs = StoredJpegs(settings.images.listing)
        DatasetWriter(file, {"image": StoredJpegField()}, num_workers=1).from_indexed_dataset(jpegs)
        scale255 = 255 * np.array(MEAN), 255 * np.array(STD)
        loader = Loader(
            file,
            batch_size=settings.batch_size,
            num_workers=settings.workers,
            order=OrderOption.RANDOM,
            os_cache=True,  # all images fit into the page cache
            custom_fields={"image": StoredJpegField},
            indices=np.tile(np.arange(len(jpegs)), EPOCH // len(jpegs)),
            pipelines={
                "image": [
                    RandomResizedCropRGBImageDecoder((IMAGE_SIZE, IMAGE_SIZE), CROP_SCALE, CROP_RATIO),
                    RandomHorizontalFlip(FLIP),
                    NormalizeImage(*scale255, np.float32),  # before ToTensor: compiled, a table look-up per value
                    ToTensor(),
                    ToTorchImage(),
                ]
            },
        )
        while True:
            for (images,) in loader:
                yield images
