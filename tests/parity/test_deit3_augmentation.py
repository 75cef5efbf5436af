"""DeiT III's 3-Augment and crop beside torchvision and the authors' code, run here: pixels, orders, factors.

Needs torchvision (``pip install timm torchvision``); the authors' code where ``PERVIT_DEIT_CODE`` names a clone of
github.com/facebookresearch/deit, which may be bare.
"""

from __future__ import annotations

import random
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image, ImageFilter

from pipeline.augment import BatchRequest
from pipeline.augment.crop import UNIFORMS_PER_SAMPLE as CROP_UNIFORMS
from pipeline.augment.crop import padded_geometry
from pipeline.augment.randaugment import Op
from pipeline.augment.three_augment import UNIFORMS_PER_SAMPLE, ThreeAugment
from pipeline.loader.cpu_transform import Finisher, resize_and_crop
from pipeline.stream.philox import Stream, uniforms
from support.deit_code import authors_module, needs_code
from support.randaugment_reference import SIZE, flat_and_extreme_images, photographs

timm = pytest.importorskip("timm", reason="timm is not installed")
torchvision = pytest.importorskip("torchvision", reason="torchvision is not installed", exc_type=ImportError)

from torchvision import transforms  # noqa: E402
from torchvision.transforms import functional as TF  # noqa: E402

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
COUNT = 30_000
ADJUST = {Op.BRIGHTNESS: TF.adjust_brightness, Op.CONTRAST: TF.adjust_contrast, Op.COLOR: TF.adjust_saturation}


@pytest.fixture(scope="module")
def pictures(imagenet_samples: Path) -> list[Image.Image]:
    """Twelve photographs, and images of one level, two levels and noise."""
    return [*photographs(imagenet_samples, 12), *(each for each in flat_and_extreme_images() if each.size == (SIZE, SIZE))]


def drawn(count: int) -> object:
    numbers = uniforms(Stream.THREE_AUGMENT, 1, np.zeros(count), np.arange(count), UNIFORMS_PER_SAMPLE)
    return ThreeAugment(True, 0.3).sample(numbers)


def test_three_augment_is_torchvisions(pictures: list[Image.Image]) -> None:
    """Every image with each of the three and a jitter: equal to the last level to torchvision's operations in the same order."""
    count = 6 * len(pictures)
    chosen, finisher = drawn(count), Finisher(count, SIZE, MEAN, STD, 1)
    geometry = padded_geometry(*np.full((2, count), SIZE), np.full((count, CROP_UNIFORMS), 0.9), SIZE, 0.5, "reflect")
    request = BatchRequest(*[np.arange(count)] * 5, geometry, draws={ThreeAugment(True, 0.3): chosen})
    gray = transforms.Grayscale(3)
    for i in range(count):
        picture = expected = pictures[i % len(pictures)]
        first, *jitter = chosen.ops.op[i].tolist()
        if chosen.blur[i]:
            expected = expected.filter(ImageFilter.GaussianBlur(float(chosen.blur[i])))
        if first == Op.COLOR:
            expected = gray(expected)
        if first == Op.SOLARIZE:
            expected = TF.solarize(expected, 128)
        for op, factor in zip(jitter, chosen.ops.amount[i, 1:].tolist()):
            expected = ADJUST[Op(op)](expected, factor)
        ours = finisher.flip_and_augment(np.asarray(picture), request, i)
        np.testing.assert_array_equal(ours, np.asarray(expected))
    finisher.close()


def test_the_simple_crop_is_torchvisions(imagenet_samples: Path) -> None:
    """Sizes and places are ``Resize``'s and ``RandomCrop``'s; PyTorch's resize is up to two levels off Pillow's in few values."""
    files = sorted(imagenet_samples.glob("*/*.JPEG"))[::50]
    rng, crop = np.random.default_rng(0), transforms.RandomCrop(192, padding=4, padding_mode="reflect")
    for picture in (Image.open(file).convert("RGB") for file in files):
        geometry = padded_geometry(
            *(np.full(3, side) for side in picture.size[::-1]), rng.random((3, CROP_UNIFORMS)), 192, 0.5, "reflect"
        )
        resized = TF.resize(picture, 192, transforms.InterpolationMode.BICUBIC)
        assert geometry.resize[0].tolist() == list(resized.size[::-1])
        padded = TF.pad(resized, 4, padding_mode="reflect")
        for i in range(3):
            top, left = np.rint(geometry.crop[i] * (geometry.resize[i] + 8 - 192)).astype(int).tolist()
            expected = np.asarray(TF.crop(padded, top, left, 192, 192)).astype(int)
            ours = resize_and_crop(torch.from_numpy(np.array(picture)), geometry, i, 192).astype(int)
            assert np.abs(ours - expected).max() <= 2 and (ours != expected).mean() < 0.02
        random_corner = crop.get_params(padded, (192, 192))
        assert random_corner[0] <= resized.height + 8 - 192 and random_corner[1] <= resized.width + 8 - 192


def test_the_jitters_draws_are_torchvisions() -> None:
    """Orders and factors beside ``ColorJitter``'s own draws: chi-squared and Kolmogorov-Smirnov distances below 5 sigma."""
    jitter, count = transforms.ColorJitter(0.3, 0.3, 0.3), 6000
    torch.manual_seed(0)
    theirs = [jitter.get_params(jitter.brightness, jitter.contrast, jitter.saturation, jitter.hue) for _ in range(count)]
    names = (Op.BRIGHTNESS, Op.CONTRAST, Op.COLOR)
    orders = [tuple(names[i] for i in each[0].tolist() if i < 3) for each in theirs]
    chosen = drawn(COUNT)
    own = [tuple(each) for each in chosen.ops.op[:, 1:].tolist()]
    for order in set(orders):
        difference = orders.count(order) / count - own.count(order) / COUNT
        assert abs(difference) < 5 * np.sqrt(5 / 36 * (1 / count + 1 / COUNT)), order
    for place, op in enumerate(names, start=1):
        factors = chosen.ops.amount[:, 1:][chosen.ops.op[:, 1:] == op]
        assert distance(factors, np.array([each[place] for each in theirs])) < 2 * np.sqrt(1 / count + 1 / COUNT)


def distance(a: np.ndarray, b: np.ndarray) -> float:
    """Kolmogorov-Smirnov distance of two samples."""
    at = np.sort(np.concatenate([a, b]))
    return float(
        np.abs(np.searchsorted(np.sort(a), at, "right") / len(a) - np.searchsorted(np.sort(b), at, "right") / len(b)).max()
    )


@needs_code
def test_the_authors_choose_among_the_same_three(monkeypatch: pytest.MonkeyPatch) -> None:
    """The authors' own ``augment.py`` run 3000 times: how often each of the three, and the radii that it blurs with."""
    augment = authors_module("augment")
    radii: list[float] = []
    blur = augment.ImageFilter.GaussianBlur
    monkeypatch.setattr(augment.ImageFilter, "GaussianBlur", lambda radius: radii.append(radius) or blur(radius))
    whole = augment.new_data_aug_generator(SimpleNamespace(input_size=32, src=True, color_jitter=0.3))
    kinds = [type(step).__name__ for step in whole.transforms]
    assert kinds == ["Resize", "RandomCrop", "RandomHorizontalFlip", "RandomChoice", "ColorJitter", "ToTensor", "Normalize"]
    resize, crop, _, choice, jitter, *_ = whole.transforms
    assert (crop.padding, crop.padding_mode, resize.size) == (4, "reflect", 32) and resize.interpolation.name == "BICUBIC"
    assert jitter.brightness == jitter.contrast == jitter.saturation == (0.7, 1.3) and jitter.hue is None
    picture = Image.fromarray(np.dstack([np.full((2, 2), level, np.uint8) for level in (200, 150, 30)]))
    random.seed(0)
    count = 3000
    seen = [np.asarray(choice(picture))[0, 0].tolist() for _ in range(count)]
    shares = [seen.count(each) / count for each in ([151] * 3, [55, 105, 30], [200, 150, 30])]  # gray, solarized, blurred
    assert sum(shares) == pytest.approx(1)
    first = drawn(COUNT).ops.op[:, 0]
    ours = [(first == op).mean() for op in (Op.COLOR, Op.SOLARIZE, Op.NOTHING)]
    assert np.abs(np.array(shares) - ours).max() < 5 * np.sqrt(2 / 9 * (1 / count + 1 / COUNT))
    own = drawn(COUNT).blur
    assert distance(own[own > 0], np.array(radii)) < 2 * np.sqrt(1 / len(radii) + 3 / COUNT)
