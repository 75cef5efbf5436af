"""Pillow's own operations as RandAugment's reference, and the images and amounts they are compared on."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from PIL import Image, ImageEnhance, ImageOps

from pipeline.augment.randaugment import Op
from pipeline.augment.randaugment.cpu import augment

SIZE = 224
FILL = (124, 116, 104)

GEOMETRIC = (Op.ROTATE, Op.SHEAR_X, Op.SHEAR_Y, Op.TRANSLATE_X, Op.TRANSLATE_Y)

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


def reference(picture: Image.Image, op: Op, amount: float, filter_: Image.Resampling = Image.Resampling.BICUBIC) -> Image.Image:
    """The operation as the papers' library (timm) defines it, in Pillow's own terms."""

    def affine(*matrix: float) -> Image.Image:
        return picture.transform(picture.size, Image.AFFINE, matrix, resample=filter_, fillcolor=FILL)

    def solarize_add() -> Image.Image:
        return picture.point([min(255, i + int(amount)) if i < 128 else i for i in range(256)] * 3)

    return {
        Op.AUTO_CONTRAST: lambda: ImageOps.autocontrast(picture),
        Op.EQUALIZE: lambda: ImageOps.equalize(picture),
        Op.INVERT: lambda: ImageOps.invert(picture),
        Op.ROTATE: lambda: picture.rotate(amount, resample=filter_, fillcolor=FILL),
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


def photographs(folder: Path, count: int) -> list[Image.Image]:
    """Images of a folder <wnid>/*.JPEG, resized to the model's input."""
    files = sorted(folder.glob("*/*.JPEG"))
    files = files[:: max(1, len(files) // count)][:count]
    return [Image.open(file).convert("RGB").resize((SIZE, SIZE), Image.BICUBIC) for file in files]


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


def apply(
    image: np.ndarray, ops: np.ndarray, amounts: np.ndarray, fill: tuple, bilinear: np.ndarray | None = None
) -> np.ndarray:
    """Ours on an array, (H, W, 3) uint8."""
    return np.asarray(augment(Image.fromarray(image), ops, amounts, fill, bilinear))
