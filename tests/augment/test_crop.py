"""Sizes of the evaluation's resize and crop against the references' own rules; the weights at an image's borders against sums."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from PIL import Image, ImageOps

from pipeline.augment.crop import (
    UNIFORMS_PER_SAMPLE,
    border_weights,
    eval_geometry,
    eval_short_side,
    padded_geometry,
    train_geometry,
)
from pipeline.config import load_config
from pipeline.config.loading import shipped_names, shipped_recipe
from pipeline.loader.cpu_transform import resize_and_crop

# timm 0.3.2 and 0.4.12, transforms_imagenet_eval, made by `create_transform((3, size, size), crop_pct=crop).transforms[0].size`.
TIMM = [(224, 0.9, 248), (224, 0.875, 256), (224, 0.96, 233), (224, 1.0, 224), (384, 0.9, 426)]
TIMM += [(size, 0.875, short) for size, short in ((96, 109), (160, 182), (192, 219), (256, 292), (320, 365), (384, 438))]
TIMM += [(101, 0.808, 124), (234, 0.936, 249), (404, 0.808, 499)]  # 125, 250 and 500 in decimals


def short_side(size: int, crop: float) -> int:
    """The short side of a photograph that evaluation resizes."""
    geometry = eval_geometry(np.array([375, 500]), np.array([500, 333]), size, crop)
    rows, columns = geometry.resize.astype(int).T
    assert rows[0] == columns[1], "the short side is the first image's height, the second one's width"
    return int(rows[0])


@pytest.mark.parametrize(("size", "crop", "expected"), TIMM)
def test_the_short_side_is_timms(size: int, crop: float, expected: int) -> None:
    """Guards against accuracy measured on an image that is a pixel larger than the published one's."""
    assert short_side(size, crop) == expected


def test_every_size_is_the_references() -> None:
    """Guards against a size or crop at which the quotient is rounded, or corrected for floating point, which no reference does."""
    for size in range(32, 513):
        for crop in (number / 1000 for number in range(800, 1001)):
            assert eval_short_side(size, crop) == int(math.floor(size / crop))  # timm's formula
        assert eval_short_side(size, 0.875) == int((256 / 224) * size)  # ConViT's and PerViT's own formula


def test_the_long_side_and_the_corner_are_torchvisions() -> None:
    """Guards against a centre crop that is shifted by a pixel, for images of every shape."""
    rng = np.random.default_rng(0)
    height, width = rng.integers(30, 900, (2, 3000))
    for size, crop in ((224, 0.9), (96, 0.875), (224, 0.875)):
        geometry = eval_geometry(height, width, size, crop)
        short = math.floor(size / crop)
        corner = np.rint(geometry.crop * (geometry.resize - size)).astype(int)
        for i in range(0, 3000, 7):
            h, w = int(height[i]), int(width[i])
            long = int(short * max(h, w) / min(h, w))  # torchvision's Resize(short)
            rows, columns = (short, long) if h <= w else (long, short)
            if max(h, w) <= 16 * min(h, w):
                assert geometry.resize[i].tolist() == [rows, columns], (h, w)
                assert corner[i].tolist() == [round((rows - size) / 2), round((columns - size) / 2)]  # CenterCrop(size)


def triangle(x: float) -> float:
    """Linear interpolation."""
    return max(0.0, 1 - abs(x))


def keys(x: float) -> float:
    """The cubic kernel as Keys (1981) writes it, a = -1/2."""
    x, a = abs(x), -0.5
    if x < 1:
        return (a + 2) * x**3 - (a + 3) * x**2 + 1
    return a * x**3 - 5 * a * x**2 + 8 * a * x - 4 * a if x < 2 else 0.0


@pytest.mark.parametrize("bilinear", [False, True])
@pytest.mark.parametrize(
    ("before", "after"), [(500, 224), (230, 224), (224, 224), (86, 224), (10, 224), (1, 8), (3, 2), (4001, 17)]
)
def test_factors_are_the_weights_beyond_the_border(before: int, after: int, bilinear: bool) -> None:
    """Guards against factors at the wrong pixels, without antialiasing's wider filter, or for one border only."""
    stretch = max(before / after, 1)
    reach = int(2 * stretch) + 2
    factors, kernel = border_weights(before, after, bilinear), triangle if bilinear else keys
    assert factors.shape == (2, after) and factors.dtype == np.float32
    for i in sorted({*range(min(after, 40)), *range(max(0, after - 40), after)}):
        centre = (i + 0.5) * before / after
        taps = range(int(centre) - reach, int(centre) + reach + 1)
        weight = {tap: kernel((tap + 0.5 - centre) / stretch) for tap in taps}
        inside = sum(weight[tap] for tap in taps if 0 <= tap < before)
        beyond = [sum(weight[tap] for tap in taps if tap < 0), sum(weight[tap] for tap in taps if tap >= before)]
        np.testing.assert_allclose(factors[:, i], np.divide(beyond, inside), rtol=1e-5, atol=1e-6, err_msg=f"pixel {i}")
    assert after < 100 or not factors[:, 95:129].any()


def test_the_padded_crop_is_cifars() -> None:
    """Guards against CIFAR images that are resampled, or padded with anything but zeros: ``RandomCrop(32, padding=4)`` by Pillow. Of
    81 corners all are as likely (the seed is fixed), so 80 of 81 crops have a border, 98.8 %; the authors' code gave 98.7 %."""
    count = 16_200
    numbers = np.random.default_rng(0).random((count, UNIFORMS_PER_SAMPLE))
    geometry = padded_geometry(*np.full((2, count), 32), numbers, 32, 0.5, "constant")
    assert (geometry.shape == 32).all() and (geometry.resize == 32).all() and not geometry.start.any()
    corners = np.rint(geometry.crop * 8).astype(int)  # (count, 2)
    drawn = np.histogram2d(*corners.T, bins=np.arange(-0.5, 9))[0]
    assert drawn.shape == (9, 9) and ((drawn - 200) ** 2 / 200).sum() < 80 + 4 * math.sqrt(160)  # chi-squared of 80 degrees
    assert np.mean((corners != 4).any(axis=1)) == pytest.approx(0.987, abs=0.004)
    picture = np.random.default_rng(1).integers(1, 256, (32, 32, 3), dtype=np.uint8)
    padded = ImageOps.expand(Image.fromarray(picture), 4, fill=0)
    for i, (top, left) in enumerate(corners[:200].tolist()):
        expected = np.asarray(padded.crop((left, top, left + 32, top + 32)))
        np.testing.assert_array_equal(resize_and_crop(torch.from_numpy(picture), geometry, i, 32), expected)


@pytest.mark.parametrize("probability", [0.0, 0.3, 0.5, 1.0])
def test_flips_come_as_often_as_asked_wherever_the_crop_lies(probability: float) -> None:
    """Guards against another probability, and against a flip that takes a number of the crop."""
    count = 40_000
    numbers = np.random.default_rng(0).random((count, UNIFORMS_PER_SAMPLE))
    sides = np.full((2, count), 96)
    resized = train_geometry(*sides, numbers, 64, (0.08, 1.0), (3 / 4, 4 / 3), probability)
    padded = padded_geometry(*sides, numbers, 96, probability, "constant")
    limit = 5 * math.sqrt(probability * (1 - probability) / count)
    for geometry, places in ((resized, (resized.start, resized.shape)), (padded, (padded.crop,))):
        assert abs(geometry.flip.mean() - probability) <= limit
        for each in np.concatenate(places, axis=1).T if 0 < probability < 1 else ():
            assert abs(np.corrcoef(each, geometry.flip)[0, 1]) < 5 / math.sqrt(count)


def test_every_lsat_config_of_cifar_crops_so() -> None:
    configs = {name: load_config(shipped_recipe(name)) for name in shipped_names() if "lsat" in name and "base/" not in name}
    crops = {name: config.data.train_crop for name, config in configs.items() if "cifar" in config.data.path}
    assert len(crops) > 15 and set(crops.values()) == {"padded"}
