"""RandAugment: what is drawn against the papers' definition, and the pixels against Pillow, operation by operation."""

from __future__ import annotations

import math
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
import nvidia.dali.fn as fn
import nvidia.dali.types as types
import pytest
import torch
from nvidia.dali import pipeline_def
from PIL import Image

from pipeline.augment.randaugment import (
    UNIFORMS_PER_LAYER,
    Op,
    Ops,
    RandAugment,
    affine_matrices,
    cpu,
    fill_color,
)
from pipeline.augment.randaugment.dali import augment
from pipeline.stream.philox import Stream, uniforms
from support.randaugment_reference import AMOUNTS, FILL, GEOMETRIC, SIZE, apply, flat_and_extreme_images, photographs, reference

DEVICES = ["cpu", pytest.param("gpu", marks=pytest.mark.gpu)]


@pytest.fixture(scope="module")
def real_images(imagenet_samples: Path) -> list[Image.Image]:
    """Eight photographs, resized to the model's input."""
    return photographs(imagenet_samples, 8)


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
    for op, amount, filter_ in every_op():
        ours = apply(image, np.array([op]), np.array([amount]), FILL, np.array([filter_ == Image.Resampling.BILINEAR]))
        expected = np.asarray(reference(picture, op, float(amount), filter_))
        np.testing.assert_array_equal(ours, expected, err_msg=f"{op.name} {amount} {filter_}")


def every_op() -> list[tuple[Op, np.float32, Image.Resampling]]:
    """Every operation at several amounts, those with geometry with both filters."""
    return [
        (op, amount, filter_)
        for op, amounts in AMOUNTS.items()
        for amount in np.float32(amounts)
        for filter_ in (Image.Resampling.BICUBIC, Image.Resampling.BILINEAR)[: 2 if op in GEOMETRIC else 1]
    ]


def test_cpu_layers_follow_each_other(real_images: list[Image.Image]) -> None:
    """Guards against layers applied in the wrong order, skipped, or leaking from one thread's image into another's."""
    ops = np.array([Op.SOLARIZE, Op.NOTHING, Op.ROTATE, Op.SHEAR_X, Op.EQUALIZE])
    amounts, bilinear = np.float32([128, 3, 20, 0.2, 0]), np.array([False, True, True, False, True])
    images = [np.asarray(picture) for picture in real_images]
    before = [image.copy() for image in images]
    with ThreadPoolExecutor(4) as pool:
        ours = list(pool.map(lambda image: apply(image, ops, amounts, FILL, bilinear), images))
    for picture, image, unchanged, result in zip(real_images, images, before, ours):
        expected = picture
        for op, amount, linear in zip(ops, amounts, bilinear):
            filter_ = Image.Resampling.BILINEAR if linear else Image.Resampling.BICUBIC
            expected = expected if op == Op.NOTHING else reference(expected, Op(op), float(amount), filter_)
        np.testing.assert_array_equal(result, np.asarray(expected))
        np.testing.assert_array_equal(image, unchanged)


def test_nothing_drawn_leaves_the_image() -> None:
    """Guards against a change of images that no operation applies to."""
    picture = flat_and_extreme_images()[2]
    assert cpu.augment(picture, np.zeros(2, np.int32), np.zeros(2, np.float32), FILL) is picture


# The DALI graph

# Levels of 255 by which a value may differ from Pillow's, and the share of values that may. All else is exact.
LEVELS_AND_SHARE = {
    Op.EQUALIZE: (2, 1.0),  # DALI's formula does not round the step between levels to whole pixels
    **dict.fromkeys(GEOMETRIC, (1, 0.02)),  # float32
}
# Bilinear by whole fifths or tenths of a pixel: more values are whole levels, and Pillow is a rounding error below some of them.
BILINEAR_SHARE = 0.06


def graph_device(device: str) -> int | None:
    if device == "gpu" and not torch.cuda.is_available():
        pytest.skip("needs a CUDA GPU")
    return 0 if device == "gpu" else None


def run_graph(images: list[np.ndarray], ops: Ops, device: str, bilinear: np.ndarray | None = None) -> list[np.ndarray]:
    """``images`` (B of (SIZE, SIZE, 3) uint8) through the graph; ``bilinear`` is (B, layers)."""
    chosen = () if bilinear is None else (bilinear.astype(np.float32),)
    matrices, layers = affine_matrices(ops, SIZE), ops.op.shape[1]

    one_run = {"prefetch_queue_depth": 1}  # else DALI computes two batches more, which nobody takes

    @pipeline_def(batch_size=len(images), num_threads=2, device_id=graph_device(device), enable_conditionals=True, **one_run)
    def graph():
        pixels = fn.external_source(
            source=lambda: np.stack(images), batch=True, layout="HWC", dtype=types.UINT8, ndim=3, device=device
        )
        op, amount, matrix, *linear = fn.external_source(
            source=lambda: (ops.op, ops.amount, matrices, *chosen),
            num_outputs=3 + len(chosen),
            batch=True,
            dtype=[types.INT32, types.FLOAT, types.FLOAT, types.FLOAT][: 3 + len(chosen)],
            ndim=[1, 1, 3, 1][: 3 + len(chosen)],
        )
        return augment(pixels, op, amount, matrix, layers, SIZE, FILL, *linear)

    pipeline = graph()
    pipeline.build()
    (output,) = pipeline.run()
    output = output.as_cpu()
    return [np.array(output[i]) for i in range(len(images))]


def compare_graph_to_pillow(pictures: list[Image.Image], device: str) -> None:
    cases = [(picture, *case) for picture in pictures for case in every_op()]
    op, amount = np.array([[case[1]] for case in cases], np.int32), np.array([[case[2]] for case in cases], np.float32)
    bilinear = np.array([[case[3] == Image.Resampling.BILINEAR] for case in cases])
    images = [np.asarray(picture) for picture, *_ in cases]
    results = run_graph(images, Ops(op, amount), device, bilinear)
    for (picture, op, amount, filter_), result in zip(cases, results):
        difference = np.abs(result.astype(int) - np.asarray(reference(picture, op, float(amount), filter_)))
        levels, share = LEVELS_AND_SHARE.get(op, (0, 0))
        if filter_ == Image.Resampling.BILINEAR:
            share = BILINEAR_SHARE
        if device == "gpu":
            share *= 1.25  # its sums differ in the last place: 2.1 % of a bicubic translation on an H200
        assert difference.max() <= levels, (op.name, amount, filter_)
        assert (difference > 0).mean() <= share, (op.name, amount, filter_)


@pytest.mark.parametrize("device", DEVICES)
def test_graph_agrees_with_pillow_on_photographs(device: str, real_images: list[Image.Image]) -> None:
    """Guards against an operation in DALI that is another than the one the published models were trained with."""
    compare_graph_to_pillow(real_images[:2], device)


@pytest.mark.parametrize("device", DEVICES)
def test_graph_agrees_with_pillow_on_extreme_images(device: str) -> None:
    """Guards against wrong borders, clipping, and channels of one level or two."""
    compare_graph_to_pillow([image for image in flat_and_extreme_images() if image.size == (SIZE, SIZE)], device)


@pytest.mark.parametrize("device", DEVICES)
def test_graph_layers_follow_each_other(device: str, real_images: list[Image.Image]) -> None:
    """Guards against layers in the wrong order, results given to another image, and change where nothing applies."""
    op = np.array([[Op.SOLARIZE, Op.ROTATE], [Op.ROTATE, Op.SOLARIZE], [0, 0], [0, Op.INVERT], [Op.POSTERIZE, 0]], np.int32)
    amount = np.float32([[100, 20], [20, 100], [5, 5], [0, 0], [2, 0]])
    images = [np.asarray(picture) for picture in real_images[:5]]
    results = run_graph(images, Ops(op, amount), device)
    for image, image_ops, image_amounts, result in zip(images, op, amount, results):
        expected = apply(image, image_ops, image_amounts, FILL)
        rotated = Op.ROTATE in image_ops  # one level off can be either side of solarize's threshold
        assert np.mean(result != expected) <= (0.02 if rotated else 0)
    np.testing.assert_array_equal(results[2], images[2])


# What is drawn


def drawn(settings: RandAugment, count: int = 200_000, image_size: int = SIZE) -> Ops:
    numbers = uniforms(Stream.RAND_AUGMENT, 3, np.zeros(count), np.arange(count), settings.layers * UNIFORMS_PER_LAYER)
    return replace(settings, image_size=image_size).sample(numbers)


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


def test_fill_is_imagenets_mean_color() -> None:
    """Guards against borders of another colour than the published models were trained with."""
    assert fill_color((0.485, 0.456, 0.406)) == FILL


def test_the_same_sample_gets_the_same_ops() -> None:
    """Guards against numbers that depend on which other samples are drawn in the same call."""
    numbers = uniforms(Stream.RAND_AUGMENT, 3, np.zeros(50), np.arange(50), 2 * UNIFORMS_PER_LAYER)
    together = RandAugment(image_size=SIZE).sample(numbers)
    alone = RandAugment(image_size=SIZE).sample(numbers[17:18])
    np.testing.assert_array_equal(together.op[17:18], alone.op)
    np.testing.assert_array_equal(together.amount[17:18], alone.amount)


def test_shifts_beyond_the_image() -> None:
    """Guards against runs of pixels that are taken from another row, where a shift is larger than those that are drawn."""
    picture = Image.fromarray(np.random.default_rng(0).integers(0, 256, (31, 57, 3), dtype=np.uint8))
    for op in (Op.SHEAR_X, Op.SHEAR_Y, Op.TRANSLATE_X, Op.TRANSLATE_Y):
        for amount in (-500.25, -56.875, -29.75, -2.0, 1.25, 30.25, 56.5, 400.0):
            ours = apply(np.asarray(picture), np.array([op]), np.array([amount]), FILL)
            np.testing.assert_array_equal(ours, np.asarray(reference(picture, op, amount)), err_msg=f"{op.name} {amount}")
