"""3-Augment, colour jitter and the simple random crop in Pillow's and NumPy's own terms, as ``torchvision.transforms`` calls them."""

from __future__ import annotations

import numpy as np
from PIL import Image, ImageEnhance, ImageFilter, ImageOps

from pipeline.augment.randaugment import Op

ENHANCE = {Op.BRIGHTNESS: ImageEnhance.Brightness, Op.CONTRAST: ImageEnhance.Contrast, Op.COLOR: ImageEnhance.Color}


def gray(picture: Image.Image) -> Image.Image:
    return Image.merge("RGB", [picture.convert("L")] * 3)


def reference(picture: Image.Image, blur: float, ops: np.ndarray, amounts: np.ndarray) -> Image.Image:
    """One image: blur (0: none), then ``ops`` and ``amounts`` (LAYERS,), the first of which is one of the three."""
    if blur:
        picture = picture.filter(ImageFilter.GaussianBlur(radius=blur))
    if ops[0] == Op.COLOR:
        picture = gray(picture)
    if ops[0] == Op.SOLARIZE:
        picture = ImageOps.solarize(picture)
    for op, factor in zip(ops[1:], amounts[1:].tolist()):
        if op != Op.NOTHING:
            picture = ENHANCE[Op(op)](picture).enhance(factor)
    return picture


def simple_crop(picture: Image.Image, size: int, top: int, left: int) -> Image.Image:
    """``Resize(size)`` and the crop at (top, left) of the image padded by 4 pixels, ``padding_mode="reflect"``."""
    width, height = picture.size
    short, long = min(width, height), max(width, height)
    sides = (size, int(size * long / short))
    resized = picture.resize(sides if width <= height else sides[::-1], Image.Resampling.BICUBIC)
    padded = np.pad(np.asarray(resized), ((4, 4), (4, 4), (0, 0)), mode="reflect")
    return Image.fromarray(padded[top : top + size, left : left + size])
