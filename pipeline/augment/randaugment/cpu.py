"""Apply RandAugment on the CPU, bit for bit equal to Pillow's operations as timm calls them.

Pillow's C core releases the GIL in the expensive operations, so that images are augmented in parallel threads. Its Python
loops, which build lookup tables from histograms, are replaced by NumPy.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from PIL import Image

from pipeline.augment.randaugment import Op
from pipeline.augment.randaugment.cubic_shift import shift_rows, translate

Color = tuple[int, int, int]
_LEVELS = np.arange(256)
_RAMP = Image.fromarray(_LEVELS.astype(np.uint8)[None])  # (1, 256): every level once


def augment(
    picture: Image.Image, ops: np.ndarray, amounts: np.ndarray, fill: Color, bilinear: np.ndarray | None = None
) -> Image.Image:
    """Augment one image.

    Args:
        picture: RGB; not changed.
        ops: (layers,) of :class:`~pipeline.augment.randaugment.Op`, in order of application.
        amounts: (layers,) in the unit of the Op.
        fill: RGB colour outside the image after rotations, shears and translations.
        bilinear: (layers,) bool, where these are bilinear; None: all bicubic.

    Returns:
        An image of the same size; ``picture`` itself if no operation is applied.
    """
    for layer, (op, amount) in enumerate(zip(ops, amounts)):
        if op != Op.NOTHING:
            operations = _PICTURE_OPS if bilinear is None or not bilinear[layer] else _BILINEAR_OPS
            picture = operations[Op(op)](picture, float(amount), fill)
    return picture


# Colour, per channel: lookup tables of 256 levels. Pillow's point() takes a list of 3 * 256.


def _auto_contrast(picture: Image.Image, amount: float, fill: Color) -> Image.Image:
    """Stretch each channel to the range 0 to 255."""
    tables = []
    for histogram in np.reshape(picture.histogram(), (3, 256)):
        present = histogram.nonzero()[0]
        low, high = present[0], present[-1]
        if high <= low:
            tables.append(_LEVELS)
            continue
        scale = 255.0 / (high - low)
        tables.append(np.clip((_LEVELS * scale - low * scale).astype(np.int64), 0, 255))
    return picture.point(np.concatenate(tables).tolist())


def _equalize(picture: Image.Image, amount: float, fill: Color) -> Image.Image:
    """Equalize each channel's histogram."""
    tables = []
    for histogram in np.reshape(picture.histogram(), (3, 256)):
        step = (histogram.sum() - histogram[histogram.nonzero()[0][-1]]) // 255
        darker = np.cumsum(histogram) - histogram  # pixels darker than each level
        # Entries may exceed 255; point() clips them, as for Pillow's own equalize().
        tables.append((step // 2 + darker) // step if step else _LEVELS)
    return picture.point(np.concatenate(tables).tolist())


def _contrast(picture: Image.Image, amount: float, fill: Color) -> Image.Image:
    """Extrapolate from, or interpolate towards, the mean brightness."""
    histogram = np.array(picture.convert("L").histogram())
    mean = int((histogram * _LEVELS).sum() / histogram.sum() + 0.5)
    return _blend_with_level(picture, mean, amount)


def _blend_with_level(picture: Image.Image, level: int, factor: float) -> Image.Image:
    """``level + factor * (pixel - level)``, as a table made by Pillow's own blend, which gives Pillow's rounding."""
    table = Image.blend(Image.new("L", _RAMP.size, level), _RAMP, factor)
    return _same_table(picture, np.asarray(table)[0])


def _same_table(picture: Image.Image, table: np.ndarray) -> Image.Image:
    return picture.point(table.tolist() * 3)


# Colour, across channels or neighbours.


def _smooth(picture: Image.Image) -> Image.Image:
    """Pillow's ImageFilter.SMOOTH in integers: weights 5 for the pixel, 1 for its neighbours; border pixels are unchanged."""
    pixels = np.asarray(picture).astype(np.uint16)  # (H, W, 3); 13 * 255 fits
    if min(pixels.shape[:2]) < 3:
        return picture
    columns = pixels[:-2] + pixels[1:-1] + pixels[2:]
    total = columns[:, :-2] + columns[:, 1:-1] + columns[:, 2:] + 4 * pixels[1:-1, 1:-1]
    smooth = np.array(picture)
    smooth[1:-1, 1:-1] = (total + 6) // 13  # rounds to nearest; 13 is odd, so that there are no ties
    return Image.fromarray(smooth)


# Geometry: bicubic shifts of rows and columns, and bilinear transforms. Of the latter, Pillow sums four pixels per point, which takes
# about the time of the shifts.


def _shift_rows(picture: Image.Image, shift: np.ndarray, fill: Color) -> Image.Image:
    return _from_words(shift_rows(_to_words(picture), shift, _word(fill)))


def _shift_columns(picture: Image.Image, shift: np.ndarray, fill: Color) -> Image.Image:
    return _from_words(shift_rows(np.ascontiguousarray(_to_words(picture).T), shift, _word(fill)).T)


def _affine_bilinear(picture: Image.Image, matrix: tuple[float, ...], fill: Color) -> Image.Image:
    return picture.transform(picture.size, Image.Transform.AFFINE, matrix, Image.Resampling.BILINEAR, fillcolor=fill)


def _to_words(picture: Image.Image) -> np.ndarray:
    """(H, W) uint32 of red, green, blue and an unused byte, Pillow's memory layout: the conversion is a plain copy."""
    return np.frombuffer(picture.tobytes("raw", "RGBX"), dtype=np.uint32).reshape(picture.height, picture.width)


def _from_words(words: np.ndarray) -> Image.Image:
    return Image.frombytes("RGB", words.shape[::-1], words.tobytes(), "raw", "RGBX")


def _word(color: Color) -> np.uint32:
    return np.array([*color, 0], dtype=np.uint8).view(np.uint32)[0]


_PICTURE_OPS: dict[Op, Callable[[Image.Image, float, Color], Image.Image]] = {
    Op.AUTO_CONTRAST: _auto_contrast,
    Op.EQUALIZE: _equalize,
    Op.INVERT: lambda picture, amount, fill: _same_table(picture, 255 - _LEVELS),
    Op.ROTATE: lambda picture, amount, fill: picture.rotate(amount, Image.Resampling.BICUBIC, fillcolor=fill),
    Op.POSTERIZE: lambda picture, amount, fill: _same_table(picture, _LEVELS & (0xFF00 >> int(amount))),
    Op.SOLARIZE: lambda picture, amount, fill: _same_table(picture, np.where(_LEVELS < amount, _LEVELS, 255 - _LEVELS)),
    Op.SOLARIZE_ADD: lambda picture, amount, fill: _same_table(
        picture, np.where(_LEVELS < 128, np.minimum(_LEVELS + int(amount), 255), _LEVELS)
    ),
    Op.COLOR: lambda picture, amount, fill: Image.blend(picture.convert("L").convert("RGB"), picture, amount),
    Op.CONTRAST: _contrast,
    Op.BRIGHTNESS: lambda picture, amount, fill: _blend_with_level(picture, 0, amount),
    Op.SHARPNESS: lambda picture, amount, fill: Image.blend(_smooth(picture), picture, amount),
    Op.SHEAR_X: lambda picture, amount, fill: _shift_rows(picture, amount * (np.arange(picture.height) + 0.5), fill),
    Op.SHEAR_Y: lambda picture, amount, fill: _shift_columns(picture, amount * (np.arange(picture.width) + 0.5), fill),
    Op.TRANSLATE_X: lambda picture, amount, fill: Image.fromarray(translate(np.asarray(picture), amount, 1, fill)),
    Op.TRANSLATE_Y: lambda picture, amount, fill: Image.fromarray(translate(np.asarray(picture), amount, 0, fill)),
}
_BILINEAR_OPS = {
    **_PICTURE_OPS,
    Op.ROTATE: lambda picture, amount, fill: picture.rotate(amount, Image.Resampling.BILINEAR, fillcolor=fill),
    Op.SHEAR_X: lambda picture, amount, fill: _affine_bilinear(picture, (1, amount, 0, 0, 1, 0), fill),
    Op.SHEAR_Y: lambda picture, amount, fill: _affine_bilinear(picture, (1, 0, 0, amount, 1, 0), fill),
    Op.TRANSLATE_X: lambda picture, amount, fill: _affine_bilinear(picture, (1, 0, amount, 0, 1, 0), fill),
    Op.TRANSLATE_Y: lambda picture, amount, fill: _affine_bilinear(picture, (1, 0, 0, 0, 1, amount), fill),
}
