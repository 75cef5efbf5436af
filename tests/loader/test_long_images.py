"""Valid images of 20,000 pixels on one side: stored as they are, trained on, evaluated and predicted."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from data_prep.sources import ImageFolder
from data_prep.writer import write_shards
from pipeline.inference.image_list import ImageList, find_images
from pipeline.loader.image_loader import ImageLoader

LONG, SHORT, SIDE = 20_000, 300, 64
DARK, LIGHT = 90, 200


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A panorama, a column and 14 small images, all grey; the long ones are light up to 9,000 pixels, so that their centres are dark."""
    folder = tmp_path_factory.mktemp("long") / "photos"
    (folder / "train" / "a").mkdir(parents=True)
    for name, size, light in (("column", (SHORT, LONG), (SHORT, 9_000)), ("panorama", (LONG, SHORT), (9_000, SHORT))):
        image = Image.new("L", size, DARK)
        image.paste(LIGHT, (0, 0, *light))
        image.save(folder / "train" / "a" / f"{name}.jpg", quality=95)
    for number in range(14):
        Image.new("RGB", (80, 70), (number, 0, 0)).save(folder / "train" / "a" / f"small{number:02d}.jpg")
    return folder


def test_long_images_are_read_like_others(photos: Path, tmp_path: Path) -> None:
    """Guards against decoders that refuse them, crops outside of them, and a share of the memory that grows with the long side."""
    info = write_shards(ImageFolder(photos, "train"), tmp_path / "shards", "train")
    assert info and info.samples == 16
    with ImageLoader(
        tmp_path / "shards", batch_size=16, image_size=SIDE, augment="deit", data={"max_bad_samples": 0}
    ) as loader:
        for _ in range(3):
            (images, _), *_ = loader
            assert images.shape == (16, 3, SIDE, SIDE) and torch.isfinite(images).all()
        assert not loader.bad_samples
    with ImageLoader(tmp_path / "shards", batch_size=16, image_size=SIDE, augment=None, shuffle=False) as loader:
        (images, _), *_ = loader
        assert not loader.bad_samples
    mean, std = (torch.tensor(value).view(3, 1, 1) for value in ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)))
    levels = (images * std + mean) * 255  # (16, 3, SIDE, SIDE)
    spread = levels.amax(dim=(1, 2, 3)) - levels.amin(dim=(1, 2, 3))
    dark = [picture for picture, own in zip(levels, spread) if own < 5 and picture.min() > 80]
    assert len(dark) == 2 and all((picture - DARK).abs().max() < 3 for picture in dark)


def test_long_images_are_predicted(photos: Path, tmp_path: Path) -> None:
    """Guards against an error in the row of an image that training has taken."""
    folder = Path(shutil.copytree(photos / "train" / "a", tmp_path / "a"))
    images = ImageList(find_images([str(folder)]), classes=["a"])
    assert len(images) == 16
    for index in range(2):
        assert np.array_equal(images.read(index), np.fromfile(images.key(index), dtype=np.uint8))
    assert not images.errors
