"""What the augmentations draw beside timm: RandAugment's amounts exactly, everything random as histograms.

Both sides have fixed seeds. A histogram of boxes has 20,000 of theirs, of which a twelfth that is off by 15 % shows, and others have 100,000 draws.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from scipy.stats import chi2_contingency

from pipeline.augment import crop, erasing, mixing
from pipeline.augment.randaugment import UNIFORMS_PER_LAYER, Op, RandAugment, fill_color
from pipeline.config import load_config
from support import parity
from support.histograms import SIDE, crop_histograms, erasing_histograms, histogram, mixing_histograms

CONFIGS = Path(__file__).parents[2] / "configs"
RECIPES = {"deit": "deit_t", "posmlp": "posmlp_t"}  # fixture -> config
DRAWS = 100_000
P_VALUE = 1e-4  # of some 90 histograms
PILLOW = {"bilinear": [2], "bicubic": [3], "random": [2, 3]}  # Pillow's numbers of the filters

fixtures = pytest.mark.parametrize("name", RECIPES)


def uniforms(columns: int, rows: int = DRAWS) -> np.ndarray:
    """Multiples of 2**-32, as our streams have."""
    return np.random.RandomState(1).randint(0, 2**32, (rows, columns), dtype=np.uint64) * 2.0**-32


def assert_alike(ours: dict[str, list[int]], theirs: dict[str, list[int]]) -> None:
    """Pearson's test of homogeneity of two samples, for each histogram."""
    assert ours.keys() == theirs.keys()
    for key in ours:
        table = np.array([ours[key], theirs[key]])
        table = table[:, table.sum(axis=0) > 0]
        p = chi2_contingency(table).pvalue if table.shape[1] > 1 else 1.0
        assert p > P_VALUE, f"{key}: p = {p:.1e}, ours {ours[key]}, theirs {theirs[key]}"


def settings_of(name: str) -> RandAugment:
    augment = load_config(CONFIGS / f"{RECIPES[name]}.yaml").augment
    return RandAugment(augment.rand_augment_ops, augment.rand_augment_magnitude, augment.rand_augment_std)


@fixtures
def test_rand_augments_settings(name: str) -> None:
    """Guards against another policy, another colour outside the image, other filters."""
    theirs, config = parity.load(name)["rand_augment"], load_config(CONFIGS / f"{RECIPES[name]}.yaml")
    assert settings_of(name) == RandAugment(theirs["layers"], theirs["magnitude"], theirs["magnitude_std"])
    assert list(fill_color(config.data.mean)) == theirs["fill"]
    assert PILLOW[config.data.train_interpolation] == theirs["interpolations"]
    crop_scale, crop_ratio = config.data.crop_scale, config.data.crop_ratio
    assert crop_scale == (0.08, 1.0) and crop_ratio == pytest.approx(tuple(parity.load(name)["crop"]["ratio"]))


@fixtures
def test_rand_augments_amounts(name: str) -> None:
    """Guards against another range, rounding or direction of an operation, at magnitudes from 0 to 10."""
    theirs = parity.load(name)["rand_augment"]
    for op, (operation, amounts) in zip(list(Op)[1:], theirs["amounts"].items(), strict=True):
        chosen = (op - 0.5) / (len(Op) - 1)  # of the draws; then applied, no noise, and one sign each
        draws = np.array([[chosen, 0, 0, 0, 0.25], [chosen, 0, 0, 0, 0.75]])
        unit = SIDE if operation.startswith("Translate") else 1
        unchanged = 1 if op in (Op.COLOR, Op.CONTRAST, Op.BRIGHTNESS, Op.SHARPNESS) else 0
        for magnitude, amount in zip(theirs["magnitudes"], amounts, strict=True):
            found = RandAugment(1, magnitude, 0, SIDE).sample(draws)
            other = 2 * unchanged - amount if operation in theirs["signed"] else amount
            assert found.op.tolist() == [[op], [op]]
            assert found.amount[:, 0] == pytest.approx([unit * amount, unit * other], rel=1e-6, abs=1e-6), (
                operation,
                magnitude,
            )


@fixtures
def test_rand_augments_draws(name: str) -> None:
    """Guards against another number of operations, choice among them, or noise on the magnitude."""
    theirs, settings = parity.load(name)["rand_augment"], settings_of(name)
    ops = replace(settings, image_size=SIDE).sample(uniforms(settings.layers * UNIFORMS_PER_LAYER))
    order = dict(zip(theirs["amounts"], list(Op)[1:]))
    counts = {"applied": np.bincount((ops.op > 0).sum(axis=1), minlength=settings.layers + 1).tolist()}
    counts["chosen"] = [int((ops.op == op).sum()) for op in order.values()]
    assert_alike(counts, {"applied": theirs["applied"], "chosen": list(theirs["chosen"].values())})
    strengths: dict[str, list[int]] = {}
    levels = []
    for operation in theirs["strength"]:
        unit = SIDE if operation.startswith("Translate") else 1
        amounts = ops.amount[ops.op == order[operation]].astype(np.float64) / unit
        low, high = theirs["ends"][operation]
        strengths[operation] = histogram(amounts, low, high)
        if operation in theirs["signed"]:
            levels.append(np.abs(2 * amounts - (low + high)) / (high - low))
    strengths["levels"] = histogram(np.concatenate(levels), 0, 1, bins=50)
    assert_alike(strengths, theirs["strength"] | {"levels": theirs["levels"]})


@fixtures
def test_random_resized_crops(name: str) -> None:
    """Guards against other crops: area, aspect ratio, place, and the fallback where none fits."""
    theirs, draws = parity.load(name)["crop"], uniforms(crop.UNIFORMS_PER_SAMPLE)
    for shape, (rows, columns) in theirs["images"].items():
        sides = np.full(DRAWS, rows), np.full(DRAWS, columns)
        geometry = crop.train_geometry(*sides, draws, SIDE, (0.08, 1.0), tuple(theirs["ratio"]), 0.5)
        boxes = np.concatenate([geometry.start, geometry.shape], axis=1)
        assert_alike(crop_histograms(boxes, rows, columns, theirs["ratio"]), theirs["of"][shape])


@fixtures
def test_mixup_and_cutmix(name: str) -> None:
    """Guards against another Beta distribution, switch, box or weight of the label."""
    config, theirs = load_config(CONFIGS / f"{RECIPES[name]}.yaml").augment, dict(parity.load(name)["mixing"])
    assert (config.mixup, config.cutmix, config.mix_switch) == (theirs.pop("mixup"), theirs.pop("cutmix"), 0.5)
    drawn = mixing.MixupCutmix(config.mixup, config.cutmix, 0.5, 8, SIDE).sample(
        uniforms(mixing.UNIFORMS_PER_GROUP, DRAWS // 2), 1
    )
    cut = ~drawn.blend
    assert_alike(mixing_histograms(drawn.weight[drawn.blend], drawn.box[cut], drawn.weight[cut]), theirs)


def test_random_erasing() -> None:
    """Guards against another probability, area, aspect ratio or place of the rectangle."""
    theirs = dict(parity.load("deit")["erasing"])
    assert load_config(CONFIGS / "deit_t.yaml").augment.erasing == (probability := theirs.pop("probability"))
    boxes = erasing.RandomErasing(probability, SIDE).sample(uniforms(erasing.UNIFORMS_PER_SAMPLE)).box
    erased = boxes[:, 2] > 0
    assert_alike(erasing_histograms(boxes[erased], int((~erased).sum())), theirs)
