"""What timm and the authors' transforms draw and compute: RandAugment's amounts, boxes, sizes at evaluation."""

from __future__ import annotations

import importlib
import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import torch
from PIL import Image

from support.histograms import SIDE, crop_histograms, erasing_histograms, histogram, mixing_histograms

DRAWS = 20_000  # of boxes
MANY = 100_000  # of what costs little
MAGNITUDES = [m / 4 for m in range(41)]
CROPPED = {"landscape": (375, 500), "portrait": (500, 375), "strip": (120, 640)}  # rows, columns; of a strip no crop may fit
CROP_RATIOS = {"deit": (3 / 4, 4 / 3), "posmlp": (0.67, 1.5)}
EVAL_SIZES = (64, 96, 112, 128, 160, 176, 192, 208, 224, 240, 256, 288, 320, 384, 448, 512)
IMAGES = [(375, 500), (500, 375), (333, 500), (500, 334), (224, 224), (1, 9), (97, 61), (2048, 1365), (480, 641), (257, 256)]


def seed() -> None:
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)


def rand_augment(policy: str, interpolation: str) -> dict[str, Any]:
    """RandAugment of timm's training transform.

    Returns:
        ``amounts``: operation -> its amount at each of MAGNITUDES, with the positive sign; translations in shares of the side;
        ``signed``: the operations with two directions; ``magnitude`` and ``layers``: the policy's; ``applied``: of MANY images
        the number with 0, 1, ... operations applied; ``chosen``: operation -> how often applied; ``strength``: operation ->
        histogram of the amounts drawn, between those of magnitudes 0 and 10 and, for signed ones, their negatives; ``levels``: of
        the magnitudes of all signed operations, from 0 to 1.
    """
    auto_augment = importlib.import_module("timm.data.auto_augment")
    factory = importlib.import_module("timm.data.transforms_factory")
    transform = factory.create_transform(SIDE, is_training=True, auto_augment=policy, interpolation=interpolation)
    (augment,) = [each for each in transform.transforms if isinstance(each, auto_augment.RandAugment)]
    with mock.patch.object(random, "random", lambda: 0.0):
        amounts = {_name(op): [_amount(op, magnitude) for magnitude in MAGNITUDES] for op in augment.ops}
    with mock.patch.object(random, "random", lambda: 1.0):
        signed = [_name(op) for op in augment.ops if _amount(op, 10) != amounts[_name(op)][-1]]
    drawn: dict[str, list[float]] = {name: [] for name in amounts}
    for op in augment.ops:
        op.aug_fn = lambda image, *amount, op=op, **_: drawn[_name(op)].append(amount[0] if amount else 0.0) or image
    seed()
    applied, before = [0] * (augment.num_layers + 1), 0
    for _ in range(MANY):
        augment(None)
        after = sum(map(len, drawn.values()))
        applied[after - before] += 1
        before = after
    ends = {name: sorted((each[0], each[-1])) for name, each in amounts.items()}
    for name in signed:
        middle, reach = amounts[name][0], amounts[name][-1] - amounts[name][0]
        ends[name] = [middle - abs(reach), middle + abs(reach)]
    levels = [np.abs(np.array(drawn[name]) - amounts[name][0]) / (ends[name][1] - amounts[name][0]) for name in signed]
    return {
        "policy": policy,
        "magnitudes": MAGNITUDES,
        "magnitude": augment.ops[0].magnitude,
        "magnitude_std": augment.ops[0].magnitude_std,
        "layers": augment.num_layers,
        "fill": list(augment.ops[0].kwargs["fillcolor"]),
        "interpolations": sorted(int(each) for each in np.atleast_1d(augment.ops[0].kwargs["resample"])),
        "amounts": amounts,
        "signed": signed,
        "images": MANY,
        "applied": applied,
        "chosen": {name: len(each) for name, each in drawn.items()},
        "ends": ends,
        "levels": histogram(np.concatenate(levels), 0, 1, bins=50),
        "strength": {name: histogram(drawn[name], *ends[name]) for name in drawn if ends[name][0] < ends[name][1]},
    }


def _name(op: Any) -> str:
    names = importlib.import_module("timm.data.auto_augment").NAME_TO_OP
    (name,) = [each for each, function in names.items() if function is op.aug_fn][:1] if op.aug_fn in names.values() else [""]
    op.name = getattr(op, "name", name)
    return op.name


def _amount(op: Any, magnitude: float) -> float:
    return float(op.level_fn(magnitude, op.hparams)[0]) if op.level_fn else 0.0


def crops(timm_ratio: tuple[float, float]) -> dict[str, Any]:
    """Histograms of timm's random resized crop, by the shape of the image: share of the area, logarithm of the aspect ratio,
    and place of the corner between the first and the last possible one."""
    transform = importlib.import_module("timm.data.transforms").RandomResizedCropAndInterpolation
    found = {}
    for name, (rows, columns) in CROPPED.items():
        seed()
        image = SimpleNamespace(size=(columns, rows))
        boxes = np.array([transform.get_params(image, (0.08, 1.0), timm_ratio) for _ in range(DRAWS)])
        found[name] = crop_histograms(boxes, rows, columns, timm_ratio)
    return {"ratio": timm_ratio, "images": CROPPED, "of": found}


def mixing(mixup: float, cutmix: float) -> dict[str, Any]:
    """Histograms of timm's Mixup: weight of an image's own label, CutMix's boxes."""
    module = importlib.import_module("timm.data.mixup")
    mix = module.Mixup(mixup_alpha=mixup, cutmix_alpha=cutmix, switch_prob=0.5)
    seed()
    blended, boxes, shares = [], [], []
    for _ in range(MANY):
        share, cut = mix._params_per_batch()
        if not cut:
            blended.append(share)
            continue
        box, share = module.cutmix_bbox_and_lam((1, 3, SIDE, SIDE), share, correct_lam=mix.correct_lam)
        boxes.append(box)
        shares.append(share)
    top, bottom, left, right = np.array(boxes).T
    box = np.stack([top, left, bottom - top, right - left], axis=1)
    return {"mixup": mixup, "cutmix": cutmix} | mixing_histograms(np.array(blended), box, np.array(shares))


class _Canvas:
    """In place of an image: remembers the rectangle that is written to."""

    box: tuple[int, int, int, int] | None = None

    def __setitem__(self, place: tuple[slice, slice, slice], _: Any) -> None:
        _, rows, columns = place
        self.box = (rows.start, columns.start, rows.stop - rows.start, columns.stop - columns.start)


def erasing() -> dict[str, Any]:
    """Histograms of timm's random erasing with the papers' settings."""
    module = importlib.import_module("timm.data.random_erasing")
    eraser = module.RandomErasing(0.25, mode="pixel", max_count=1, device="cpu")
    seed()
    boxes, untouched = [], 0
    while len(boxes) < DRAWS:
        canvas = _Canvas()
        eraser._erase(canvas, 1, SIDE, SIDE, torch.float32)
        if canvas.box:
            boxes.append(canvas.box)
        else:
            untouched += 1
    return {"probability": 0.25} | erasing_histograms(np.array(boxes), untouched)


def evaluation(transform_of: Any) -> dict[str, Any]:
    """Sizes and places at evaluation.

    Args:
        transform_of: image size -> the authors' transform for evaluation, which resizes, then crops.

    Returns:
        ``short``: image size -> the short side that an image is resized to; ``images``: at 224 pixels, for images of (rows,
        columns), the (rows, columns) after resizing and the (top, left) of the crop.
    """
    found: dict[str, Any] = {"short": {}, "images": []}
    for size in EVAL_SIZES:
        found["short"][str(size)] = min(transform_of(size).transforms[0](Image.new("L", (900, 700))).size)
    resize, crop = transform_of(SIDE).transforms[:2]
    for rows, columns in IMAGES:
        width, height = resize(Image.new("L", (columns, rows))).size
        places = torch.arange(height * width).view(1, height, width)
        top, left = divmod(int(crop(places)[0, 0, 0]), width)
        found["images"].append({"stored": [rows, columns], "resized": [height, width], "corner": [top, left]})
    return found


def authors_evaluation(module: str, **settings: Any) -> dict[str, Any]:
    """:func:`evaluation` by a repository's ``datasets.py``."""
    build = importlib.import_module(module).build_transform
    return evaluation(lambda size: build(False, SimpleNamespace(input_size=size, **settings)))


def timm_evaluation(crop: float) -> dict[str, Any]:
    """:func:`evaluation` by timm's own transform, which PosMLP uses."""
    create = importlib.import_module("timm.data.transforms_factory").create_transform
    return {"crop": crop} | evaluation(lambda size: create(size, interpolation="bicubic", crop_pct=crop))


def all_draws(name: str) -> dict[str, Any]:
    """The fixture of one version of timm: ``deit`` (0.3.2) or ``posmlp`` (0.4.12), with the recipe that it served."""
    policy, interpolation = {"deit": ("rand-m9-mstd0.5-inc1", "bicubic"), "posmlp": ("rand-m6-n3-mstd1.0-inc1", "random")}[name]
    return {
        "rand_augment": rand_augment(policy, interpolation),
        "crop": crops(CROP_RATIOS[name]),
        "mixing": mixing({"deit": 0.8, "posmlp": 0.5}[name], 1.0),
    } | ({"erasing": erasing()} if name == "deit" else {})


def sizes(family: str, checkout: Path) -> dict[str, Any]:
    """The fixture of a repository's evaluation."""
    if family == "posmlp":
        return timm_evaluation(0.9)
    module = "data.datasets" if family == "pervit" else "datasets"
    return {"crop": 0.875} | authors_evaluation(module, eval_crop_ratio=0.875, data_set="IMNET")
