"""All that is drawn for erasing, Mixup, CutMix and RandAugment against the references' formulae, drawn anew with other generators.

Two samples are compared by the largest difference of their cumulative distributions (Kolmogorov-Smirnov), with fixed seeds. Equal
distributions exceed the limit once in 100,000 comparisons (here are about 90); a range that is off by a few percent exceeds it.
"""

from __future__ import annotations

import math
from functools import cache

import numpy as np
import pytest
from scipy.stats import ks_2samp

from pipeline.augment import erasing, mixing
from pipeline.augment.randaugment import UNIFORMS_PER_LAYER, Op, RandAugment
from pipeline.stream.philox import Stream, uniforms

COUNT, SIZE = 40_000, 224
CRITICAL = math.sqrt(math.log(2 / 1e-5) / 2)  # 2.47: of the distance, in units of sqrt(1 / n + 1 / m)
LIMIT = CRITICAL * math.sqrt(2 / COUNT)  # 0.017


@cache
def drawn(stream: Stream, count: int, per_sample: int) -> np.ndarray:
    """Numbers as a run draws them, (count, per_sample)."""
    return uniforms(stream, 5, np.zeros(count), np.arange(count), per_sample)


def agree(ours: dict[str, np.ndarray], reference: dict[str, np.ndarray], limit: float = LIMIT) -> None:
    """Check that equally named samples have one distribution."""
    assert ours.keys() == reference.keys()
    distance = {name: ks_2samp(ours[name], reference[name]).statistic for name in ours}
    assert max(distance.values()) < limit, distance


def of_boxes(boxes: np.ndarray) -> dict[str, np.ndarray]:
    """What describes rectangles, (n, 4): top, left, height, width."""
    top, left, height, width = boxes.T
    shares = {"area": height * width, "height": height, "width": width, "top": top, "left": left}
    return {**shares, "below": SIZE - top - height, "right": SIZE - left - width}


def reference_erasing(areas: list[float], ratios: list[float], row: float, column: float) -> tuple[int, int, int, int]:
    """timm's RandomErasing, once that it has decided to erase, from numbers in [0, 1): 0 where all attempts fail."""
    for a, r in zip(areas, ratios):
        area = (0.02 + a * (1 / 3 - 0.02)) * SIZE * SIZE
        aspect = math.exp(math.log(0.3) + r * (math.log(1 / 0.3) - math.log(0.3)))
        height, width = int(round(math.sqrt(area * aspect))), int(round(math.sqrt(area / aspect)))
        if width < SIZE and height < SIZE:
            return int(row * (SIZE - height + 1)), int(column * (SIZE - width + 1)), height, width
    return 0, 0, 0, 0


@pytest.mark.parametrize("probability", [0.25, 1.0])
def test_erased_boxes(probability: float) -> None:
    """Guards against other areas, ratios, places or frequencies."""
    ours = erasing.RandomErasing(probability, SIZE).sample(drawn(Stream.ERASING, COUNT, erasing.UNIFORMS_PER_SAMPLE)).box
    erased = ours[:, 2] > 0
    assert abs(erased.mean() - probability) <= 5 * math.sqrt(probability * (1 - probability) / COUNT)
    assert (ours[~erased] == 0).all()
    anew = np.random.default_rng(1).random((COUNT, 22)).tolist()
    reference = np.array([reference_erasing(row[:10], row[10:20], *row[20:]) for row in anew])
    agree(of_boxes(ours[erased]), of_boxes(reference), LIMIT / math.sqrt(probability))
    ratios = [np.log(boxes[:, 2] / boxes[:, 3]) for boxes in (ours[erased], reference)]
    agree({"ratio": ratios[0]}, {"ratio": ratios[1]}, LIMIT / math.sqrt(probability))


def test_a_box_follows_from_its_numbers() -> None:
    """Guards against what no distribution shows: another rounding, and an attempt that does not fit and is not repeated."""
    numbers = drawn(Stream.ERASING, COUNT, erasing.UNIFORMS_PER_SAMPLE)
    ours = erasing.RandomErasing(1.0, SIZE).sample(numbers).box.tolist()
    for box, row in zip(ours, numbers.tolist()):
        assert tuple(box) == reference_erasing(row[:10], row[10:20], row[21], row[22])
    assert erasing.ATTEMPTS == 10, "more would hardly ever show"


def reference_cutmix(rng: np.random.Generator, alpha: float) -> np.ndarray:
    """timm's rand_bbox of a Beta draw: (COUNT, 4)."""
    side = (SIZE * np.sqrt(1 - rng.beta(alpha, alpha, COUNT))).astype(int)
    row, column = rng.integers(0, SIZE, (2, COUNT))
    top, left, bottom, right = (
        np.clip(at, 0, SIZE) for at in (row - side // 2, column - side // 2, row + side // 2, column + side // 2)
    )
    return np.stack([top, left, bottom - top, right - left], axis=1)


@pytest.mark.parametrize(("mixup", "cutmix", "switch"), [(0.8, 1.0, 0.5), (0.5, 1.0, 0.5), (0.8, 0.0, 0.5), (0.0, 1.0, 0.5)])
def test_mixing_weights_boxes_and_the_switch(mixup: float, cutmix: float, switch: float) -> None:
    """Guards against another Beta, a box whose area is not the weight's, its place, and a weight that ignores the border."""
    numbers = drawn(Stream.MIXING, COUNT, mixing.UNIFORMS_PER_GROUP)
    ours = mixing.MixupCutmix(mixup, cutmix, switch, 8, SIZE).sample(numbers, 1)
    share = switch if mixup and cutmix else float(cutmix > 0)
    assert abs((~ours.blend).mean() - share) <= 5 * math.sqrt(share * (1 - share) / COUNT)
    rng = np.random.default_rng(2)
    if mixup:
        weight = {"weight": ours.weight[ours.blend]}
        agree(weight, {"weight": rng.beta(mixup, mixup, COUNT)}, LIMIT / math.sqrt(1 - share))
        assert not ours.box[ours.blend].any()
    if cutmix:
        box = ours.box[~ours.blend]
        agree(of_boxes(box), of_boxes(reference_cutmix(rng, cutmix)), LIMIT / math.sqrt(share))
        np.testing.assert_allclose(ours.weight[~ours.blend], 1 - box[:, 2] * box[:, 3] / SIZE**2, rtol=1e-6)


def test_a_partner_is_each_other_image_equally_often() -> None:
    """Guards against images that are mixed with themselves, or always with the same neighbour."""
    numbers = drawn(Stream.MIXING, COUNT, mixing.UNIFORMS_PER_GROUP)
    for group, apart in ((8, 1), (8, 3), (16, 1)):
        distance, count = np.unique(
            mixing.MixupCutmix(0.8, 1.0, 0.5, group, SIZE).sample(numbers, apart).distance, return_counts=True
        )
        assert distance.tolist() == list(range(apart, group - apart + 1))
        assert np.abs(count / COUNT - 1 / len(distance)).max() < 5 / math.sqrt(COUNT * len(distance))


ENHANCING = (Op.COLOR, Op.CONTRAST, Op.BRIGHTNESS, Op.SHARPNESS)
ENDS = {
    Op.ROTATE: 30.0,
    **dict.fromkeys((Op.SHEAR_X, Op.SHEAR_Y), 0.3),
    **dict.fromkeys((Op.TRANSLATE_X, Op.TRANSLATE_Y), 0.45 * SIZE),
}


def reference_amount(op: Op, level: np.ndarray, sign: np.ndarray) -> np.ndarray:
    """timm's level functions of its increasing transforms; ``level`` is the magnitude / 10."""
    if op in (Op.AUTO_CONTRAST, Op.EQUALIZE, Op.INVERT):
        return np.zeros_like(level)
    whole = {
        Op.POSTERIZE: lambda: 4 - (level * 4).astype(int),
        Op.SOLARIZE: lambda: 256 - (level * 256).astype(int),
        Op.SOLARIZE_ADD: lambda: (level * 110).astype(int),
    }
    if op in whole:
        return whole[op]().astype(float)
    return 1.0 + sign * level * 0.9 if op in ENHANCING else sign * level * ENDS[op]


@pytest.mark.parametrize(("magnitude", "std", "layers"), [(9.0, 0.5, 2), (6.0, 1.0, 3)])
def test_randaugments_amounts(magnitude: float, std: float, layers: int) -> None:
    """Guards against another range, spread, rounding, clipping or sign of any operation, in both recipes."""
    numbers = drawn(Stream.RAND_AUGMENT, 240_000 // layers, layers * UNIFORMS_PER_LAYER)
    ops = RandAugment(layers, magnitude, std, SIZE).sample(numbers)
    rng = np.random.default_rng(3)
    levels = []
    for op in Op:
        ours = ops.amount[ops.op == op].astype(float)
        share = 0.5 if op == Op.NOTHING else 0.5 / 15
        assert abs(len(ours) / ops.op.size - share) < 5 * math.sqrt(share * (1 - share) / ops.op.size), op.name
        if op != Op.NOTHING:
            level = np.clip(rng.normal(magnitude, std, COUNT), 0, 10) / 10
            expected = reference_amount(op, level, rng.choice([-1.0, 1.0], COUNT)).astype(np.float32)
            agree({op.name: ours}, {op.name: expected}, CRITICAL * math.sqrt(1 / len(ours) + 1 / COUNT))
        if op in ENHANCING or op in ENDS:
            unchanged, end = (1.0, 0.9) if op in ENHANCING else (0.0, ENDS[op])
            levels.append(np.abs(ours - unchanged) / end)
    together = np.concatenate(levels)  # of nine operations: enough to tell a spread of 1.08 times as much
    level = np.clip(rng.normal(magnitude, std, COUNT), 0, 10) / 10
    agree({"level": together.round(6)}, {"level": level.round(6)}, CRITICAL * math.sqrt(1 / len(together) + 1 / COUNT))
