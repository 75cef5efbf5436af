"""RandAugment: what is drawn against the papers' definition, and the pixels against Pillow, operation by operation."""

from __future__ import annotations

import math
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from PIL import Image, ImageEnhance, ImageOps

from pipeline.data.randaugment import UNIFORMS_PER_LAYER, Op, Ops, RandAugment, draw_ops
from pipeline.data.randaugment_cpu import apply
from pipeline.philox import Stream, uniforms

SIZE = 224
FILL = (124, 116, 104)

# Every operation at several amounts: both signs, both ends of the range, nothing at all, and what RandAugment draws.
AMOUNTS = {
    Op.AUTO_CONTRAST: [0],
    Op.EQUALIZE: [0],
    Op.INVERT: [0],
    Op.ROTATE: [-30, -27.3, -3, 0, 12.7, 30],
    Op.POSTERIZE: [0, 1, 2, 4],
    Op.SOLARIZE: [0, 1, 26, 128, 255, 256],
    Op.SOLARIZE_ADD: [0, 1, 55, 99, 110],
    Op.COLOR: [0.1, 0.19, 0.73, 1, 1.4, 1.81, 1.9],
    Op.CONTRAST: [0.1, 0.19, 0.73, 1, 1.4, 1.81, 1.9],
    Op.BRIGHTNESS: [0.1, 0.19, 0.73, 1, 1.4, 1.81, 1.9],
    Op.SHARPNESS: [0.1, 0.19, 0.73, 1, 1.4, 1.81, 1.9],
    Op.SHEAR_X: [-0.3, -0.27, -0.125, 0, 0.01, 0.25, 0.2931],
    Op.SHEAR_Y: [-0.3, -0.27, -0.125, 0, 0.01, 0.25, 0.2931],
    Op.TRANSLATE_X: [-100.8, -90.5, -1, 0, 0.3, 37, 88.25, 99.99],
    Op.TRANSLATE_Y: [-100.8, -90.5, -1, 0, 0.3, 37, 88.25, 99.99],
}


def reference(picture: Image.Image, op: Op, amount: float) -> Image.Image:
    """The operation as the papers' library (timm) defines it, in Pillow's own terms."""

    def affine(*matrix: float) -> Image.Image:
        return picture.transform(picture.size, Image.AFFINE, matrix, resample=Image.BICUBIC, fillcolor=FILL)

    def solarize_add() -> Image.Image:
        return picture.point([min(255, i + int(amount)) if i < 128 else i for i in range(256)] * 3)

    return {
        Op.AUTO_CONTRAST: lambda: ImageOps.autocontrast(picture),
        Op.EQUALIZE: lambda: ImageOps.equalize(picture),
        Op.INVERT: lambda: ImageOps.invert(picture),
        Op.ROTATE: lambda: picture.rotate(amount, resample=Image.BICUBIC, fillcolor=FILL),
        Op.POSTERIZE: lambda: ImageOps.posterize(picture, int(amount)),
        Op.SOLARIZE: lambda: ImageOps.solarize(picture, int(amount)),
        Op.SOLARIZE_ADD: solarize_add,
        Op.COLOR: lambda: ImageEnhance.Color(picture).enhance(amount),
        Op.CONTRAST: lambda: ImageEnhance.Contrast(picture).enhance(amount),
        Op.BRIGHTNESS: lambda: ImageEnhance.Brightness(picture).enhance(amount),
        Op.SHARPNESS: lambda: ImageEnhance.Sharpness(picture).enhance(amount),
        Op.SHEAR_X: lambda: affine(1, amount, 0, 0, 1, 0),
        Op.SHEAR_Y: lambda: affine(1, 0, 0, amount, 1, 0),
        Op.TRANSLATE_X: lambda: affine(1, 0, amount, 0, 1, 0),
        Op.TRANSLATE_Y: lambda: affine(1, 0, 0, 0, 1, amount),
    }[op]()


@pytest.fixture(scope="module")
def real_images(imagenet_samples: Path) -> list[Image.Image]:
    """Eight photographs, resized to the model's input."""
    files = sorted(imagenet_samples.glob("*/*.JPEG"))
    return [Image.open(file).convert("RGB").resize((SIZE, SIZE), Image.BICUBIC) for file in files[:: len(files) // 8][:8]]


def flat_and_extreme_images() -> list[Image.Image]:
    """What photographs seldom are: of one level, of two levels, of noise, not square and tiny."""
    generator = np.random.default_rng(0)
    arrays = [
        np.full((SIZE, SIZE, 3), 7),
        np.where(np.indices((SIZE, SIZE)).sum(0)[..., None] % 2, [255, 254, 0], [0, 255, 3]),
        generator.integers(0, 256, (SIZE, SIZE, 3)),
        generator.integers(90, 110, (31, 57, 3)),
        generator.integers(0, 256, (2, 3, 3)),
    ]
    return [Image.fromarray(array.astype(np.uint8)) for array in arrays]


def test_cpu_pixels_equal_pillow_on_photographs(real_images: list[Image.Image]) -> None:
    """Guards against an operation that is nearly, but not quite, what the published models were trained with."""
    for picture in real_images:
        check_every_op(picture)


def test_cpu_pixels_equal_pillow_on_extreme_images() -> None:
    """Guards against tables and borders that are right for photographs only."""
    for picture in flat_and_extreme_images():
        check_every_op(picture)


def check_every_op(picture: Image.Image) -> None:
    image = np.asarray(picture)
    for op, amounts in AMOUNTS.items():
        for amount in np.float32(amounts):
            ours = apply(image, np.array([op]), np.array([amount]), FILL)
            np.testing.assert_array_equal(
                ours, np.asarray(reference(picture, op, float(amount))), err_msg=f"{op.name} {amount}"
            )


def test_cpu_layers_follow_each_other(real_images: list[Image.Image]) -> None:
    """Guards against layers applied in the wrong order, skipped, or leaking from one thread's image into another's."""
    ops = np.array([Op.SOLARIZE, Op.NOTHING, Op.ROTATE, Op.EQUALIZE])
    amounts = np.float32([128, 3, 20, 0])
    images = [np.asarray(picture) for picture in real_images]
    before = [image.copy() for image in images]
    with ThreadPoolExecutor(4) as pool:
        ours = list(pool.map(lambda image: apply(image, ops, amounts, FILL), images))
    for picture, image, unchanged, result in zip(real_images, images, before, ours):
        expected = picture
        for op, amount in zip(ops, amounts):
            expected = expected if op == Op.NOTHING else reference(expected, Op(op), float(amount))
        np.testing.assert_array_equal(result, np.asarray(expected))
        np.testing.assert_array_equal(image, unchanged)


def test_nothing_drawn_leaves_the_image() -> None:
    """Guards against a change of images that no operation applies to."""
    image = np.asarray(flat_and_extreme_images()[2])
    assert apply(image, np.zeros(2, np.int32), np.zeros(2, np.float32), FILL) is image


# What is drawn


def drawn(settings: RandAugment, count: int = 200_000, image_size: int = SIZE) -> Ops:
    numbers = uniforms(Stream.RAND_AUGMENT, 3, np.zeros(count), np.arange(count), settings.layers * UNIFORMS_PER_LAYER)
    return draw_ops(numbers, settings, image_size)


def test_ops_are_drawn_as_often_as_the_recipe_says() -> None:
    """Guards against a wrong list, a wrong probability or layers that depend on each other."""
    op = drawn(RandAugment()).op  # (B, 2)
    for layer in op.T:
        frequency = np.bincount(layer, minlength=len(Op)) / len(layer)
        assert frequency[Op.NOTHING] == pytest.approx(0.5, abs=0.006)
        np.testing.assert_allclose(frequency[1:], 0.5 / 15, atol=0.002)  # 5 standard deviations
    both = np.mean((op[:, 0] == Op.ROTATE) & (op[:, 1] == Op.ROTATE))  # with replacement
    assert both == pytest.approx((0.5 / 15) ** 2, abs=4e-4)


@pytest.mark.parametrize("settings", [RandAugment(), RandAugment(layers=3, magnitude=6, magnitude_std=1.0)])
def test_amounts_follow_the_recipes_magnitude(settings: RandAugment) -> None:
    """Guards against a wrong range, noise, clipping, sign or rounding of any operation's amount."""
    ops = drawn(settings)
    ends = {  # the amount's distance from no change, in units of its range: the magnitude / 10
        Op.ROTATE: lambda amount: np.abs(amount) / 30,
        Op.COLOR: lambda amount: np.abs(amount - 1) / 0.9,
        Op.CONTRAST: lambda amount: np.abs(amount - 1) / 0.9,
        Op.BRIGHTNESS: lambda amount: np.abs(amount - 1) / 0.9,
        Op.SHARPNESS: lambda amount: np.abs(amount - 1) / 0.9,
        Op.SHEAR_X: lambda amount: np.abs(amount) / 0.3,
        Op.SHEAR_Y: lambda amount: np.abs(amount) / 0.3,
        Op.TRANSLATE_X: lambda amount: np.abs(amount) / (0.45 * SIZE),
        Op.TRANSLATE_Y: lambda amount: np.abs(amount) / (0.45 * SIZE),
    }
    clipped = 1 - 0.5 * (1 + math.erf((10 - settings.magnitude) / settings.magnitude_std / math.sqrt(2)))
    for op, level in ends.items():
        amount = ops.amount[ops.op == op].astype(np.float64)
        magnitude = 10 * level(amount)
        unchanged = 1 if op in (Op.COLOR, Op.CONTRAST, Op.BRIGHTNESS, Op.SHARPNESS) else 0
        assert np.mean(amount > unchanged) == pytest.approx(0.5, abs=0.03)
        assert np.median(magnitude) == pytest.approx(settings.magnitude, abs=0.06 * settings.magnitude_std)
        low, high = np.quantile(magnitude, [0.1587, 0.0228])  # one and two standard deviations below
        assert [low, high] == pytest.approx(
            [settings.magnitude - settings.magnitude_std, settings.magnitude - 2 * settings.magnitude_std],
            abs=0.15 * settings.magnitude_std,
        )
        assert magnitude.max() < 10 + 1e-5
        assert np.mean(magnitude > 10 - 1e-5) == pytest.approx(clipped, abs=0.006)


def test_whole_number_amounts() -> None:
    """Guards against bits, thresholds and additions rounded another way than the papers' library rounds them."""
    exact = {magnitude: drawn(RandAugment(magnitude=magnitude, magnitude_std=0), 2000) for magnitude in (0, 4.99, 9, 10)}
    expected = {  # 4 - int(4m/10), 256 - int(256m/10), int(110m/10)
        0: (4, 256, 0),
        4.99: (3, 129, 54),
        9: (1, 26, 99),
        10: (0, 0, 110),
    }
    for magnitude, amounts in expected.items():
        ops = exact[magnitude]
        for op, amount in zip((Op.POSTERIZE, Op.SOLARIZE, Op.SOLARIZE_ADD), amounts):
            assert set(ops.amount[ops.op == op]) == {amount}, (op, magnitude)
    noisy = drawn(RandAugment())
    bits, count = np.unique(noisy.amount[noisy.op == Op.POSTERIZE], return_counts=True)
    assert list(bits) == [0, 1, 2]  # 10 clipped; 7.5 to 10; 5 to 7.5
    assert count / count.sum() == pytest.approx([0.0228, 0.9759, 0.0013], abs=0.006)


def test_the_same_sample_gets_the_same_ops() -> None:
    """Guards against numbers that depend on which other samples are drawn in the same call."""
    numbers = uniforms(Stream.RAND_AUGMENT, 3, np.zeros(50), np.arange(50), 2 * UNIFORMS_PER_LAYER)
    together = draw_ops(numbers, RandAugment(), SIZE)
    alone = draw_ops(numbers[17:18], RandAugment(), SIZE)
    np.testing.assert_array_equal(together.op[17:18], alone.op)
    np.testing.assert_array_equal(together.amount[17:18], alone.amount)
