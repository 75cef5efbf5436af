"""The papers' whole training transform, one image at a time, with Pillow and NumPy's own random numbers."""

from __future__ import annotations

import math

import numpy as np
from PIL import Image

from pipeline.augment.randaugment import Op
from support.randaugment_reference import reference

MEAN, STD = np.array([0.485, 0.456, 0.406]), np.array([0.229, 0.224, 0.225])


def training_image(picture: Image.Image, size: int, rng: np.random.Generator) -> np.ndarray:
    """Random resized crop, flip, rand-m9-mstd0.5-inc1, normalization, random erasing: (size, size, 3) float64."""
    left, top, right, bottom = _crop(*picture.size, rng)
    picture = picture.crop((left, top, right, bottom)).resize((size, size), Image.Resampling.BICUBIC)
    if rng.random() < 0.5:
        picture = picture.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
    for op in rng.choice([op for op in Op if op != Op.NOTHING], 2):  # with replacement
        if rng.random() < 0.5:
            picture = reference(picture, Op(op), _amount(Op(op), size, rng))
    image = (np.asarray(picture) / 255 - MEAN) / STD
    if rng.random() < 0.25:
        _erase(image, rng)
    return image


def _crop(width: int, height: int, rng: np.random.Generator) -> tuple[int, int, int, int]:
    for _ in range(10):
        area = width * height * rng.uniform(0.08, 1)
        ratio = math.exp(rng.uniform(math.log(3 / 4), math.log(4 / 3)))
        w, h = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
        if 0 < w <= width and 0 < h <= height:
            left, top = rng.integers(width - w + 1), rng.integers(height - h + 1)
            return left, top, left + w, top + h
    side = min(width, height)
    return (width - side) // 2, (height - side) // 2, (width + side) // 2, (height + side) // 2


def _amount(op: Op, size: int, rng: np.random.Generator) -> float:
    level = min(max(rng.normal(9, 0.5), 0), 10) / 10
    sign = rng.choice([-1, 1])
    if op == Op.ROTATE:
        return sign * 30 * level
    if op == Op.POSTERIZE:
        return 4 - int(4 * level)
    if op == Op.SOLARIZE:
        return 256 - int(256 * level)
    if op == Op.SOLARIZE_ADD:
        return int(110 * level)
    if op in (Op.COLOR, Op.CONTRAST, Op.BRIGHTNESS, Op.SHARPNESS):
        return 1 + sign * 0.9 * level
    if op in (Op.SHEAR_X, Op.SHEAR_Y):
        return sign * 0.3 * level
    return sign * 0.45 * level * size


def _erase(image: np.ndarray, rng: np.random.Generator) -> None:
    size = len(image)
    for _ in range(10):
        area = rng.uniform(0.02, 1 / 3) * size * size
        aspect = math.exp(rng.uniform(math.log(0.3), math.log(1 / 0.3)))
        height, width = round(math.sqrt(area * aspect)), round(math.sqrt(area / aspect))
        if height < size and width < size:
            top, left = rng.integers(size - height + 1), rng.integers(size - width + 1)
            image[top : top + height, left : left + width] = rng.standard_normal((height, width, 3))
            return
