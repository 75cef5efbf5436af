"""Apply RandAugment on the CPU, bit for bit equal to Pillow's operations as timm calls them.

Pillow's C core releases the GIL in the expensive operations, so that images are augmented in parallel threads. Its Python
loops, which build lookup tables from histograms, are replaced by NumPy.
"""

import math
from collections.abc import Callable

import numpy as np
from PIL import Image

from pipeline.augment.randaugment import Op

Color = tuple[int, int, int]
_ROWS_AT_A_TIME = 56  # keeps the float64 sums (56 x 224 x 3 values, 300 kB) in a core's cache
_LEVELS = np.arange(256)
_RAMP = Image.fromarray(_LEVELS.astype(np.uint8)[None])  # (1, 256): every level once


def augment(
    picture: Image.Image, ops: np.ndarray, amounts: np.ndarray, fill: Color, bilinear: np.ndarray | None = None
) -> Image.Image:
    """Augment one RGB image, which is not changed, by operations (layers,) in their order and amounts (layers,) in their units.

    Outside the image, rotations, shears and translations show ``fill``; they are bilinear where ``bilinear`` (layers,) says so.
    """
    for layer, (op, amount) in enumerate(zip(ops, amounts)):
        if op in _COLORS:
            picture = _COLORS[op](picture, float(amount))
        elif op != Op.NOTHING:
            picture = _warp(picture, op, float(amount), fill, bilinear is not None and bool(bilinear[layer]))
    return picture


# Colour, per channel: lookup tables of 256 levels. Pillow's point() takes a list of 3 * 256.


def _stretched(histogram: np.ndarray) -> np.ndarray:
    low, high = histogram.nonzero()[0][[0, -1]]
    if high <= low:
        return _LEVELS
    scale = 255.0 / (high - low)
    return np.clip((_LEVELS * scale - low * scale).astype(np.int64), 0, 255)


def _equalized(histogram: np.ndarray) -> np.ndarray:
    step = (histogram.sum() - histogram[histogram.nonzero()[0][-1]]) // 255
    darker = np.cumsum(histogram) - histogram  # pixels darker than each level
    # Entries may exceed 255; point() clips them, as for Pillow's own equalize().
    return (step // 2 + darker) // step if step else _LEVELS


def _by_histogram(picture: Image.Image, table: Callable[[np.ndarray], np.ndarray]) -> Image.Image:
    return picture.point(np.concatenate([table(each) for each in np.reshape(picture.histogram(), (3, 256))]).tolist())


def _contrast(picture: Image.Image, amount: float) -> Image.Image:
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


_COLORS: dict[int, Callable[[Image.Image, float], Image.Image]] = {
    Op.AUTO_CONTRAST: lambda picture, amount: _by_histogram(picture, _stretched),
    Op.EQUALIZE: lambda picture, amount: _by_histogram(picture, _equalized),
    Op.INVERT: lambda picture, amount: _same_table(picture, 255 - _LEVELS),
    Op.POSTERIZE: lambda picture, amount: _same_table(picture, _LEVELS & (0xFF00 >> int(amount))),
    Op.SOLARIZE: lambda picture, amount: _same_table(picture, np.where(_LEVELS < amount, _LEVELS, 255 - _LEVELS)),
    Op.SOLARIZE_ADD: lambda picture, amount: _same_table(
        picture, np.where(_LEVELS < 128, np.minimum(_LEVELS + int(amount), 255), _LEVELS)
    ),
    Op.COLOR: lambda picture, amount: Image.blend(picture.convert("L").convert("RGB"), picture, amount),
    Op.CONTRAST: _contrast,
    Op.BRIGHTNESS: lambda picture, amount: _blend_with_level(picture, 0, amount),
    Op.SHARPNESS: lambda picture, amount: Image.blend(_smooth(picture), picture, amount),
}


# Geometry: Pillow's, except for a bicubic translation, for which Pillow sums 4 x 4 pixels per point as for any transform.

_MATRICES: dict[int, Callable[[float], tuple[float, ...]]] = {
    Op.SHEAR_X: lambda amount: (1, amount, 0, 0, 1, 0),
    Op.SHEAR_Y: lambda amount: (1, 0, 0, amount, 1, 0),
    Op.TRANSLATE_X: lambda amount: (1, 0, amount, 0, 1, 0),
    Op.TRANSLATE_Y: lambda amount: (1, 0, 0, 0, 1, amount),
}


def _warp(picture: Image.Image, op: int, amount: float, fill: Color, bilinear: bool) -> Image.Image:
    resample = Image.Resampling.BILINEAR if bilinear else Image.Resampling.BICUBIC
    if op == Op.ROTATE:
        return picture.rotate(amount, resample, fillcolor=fill)
    if op in (Op.TRANSLATE_X, Op.TRANSLATE_Y) and not bilinear:
        return Image.fromarray(_translate(np.asarray(picture), amount, int(op == Op.TRANSLATE_X), fill))
    return picture.transform(picture.size, Image.Transform.AFFINE, _MATRICES[op](amount), resample, fillcolor=fill)


def _translate(pixels: np.ndarray, shift: float, axis: int, fill: Color) -> np.ndarray:
    """Shift (H, W, 3) uint8 along an axis, bit for bit as Pillow's bicubic transform and in a third of its time.

    Output position x is input position x + ``shift``.
    """
    height, width, channels = pixels.shape
    size = pixels.shape[axis]
    source = np.arange(size) + 0.5 + shift
    result = np.empty_like(pixels)
    result.reshape(height, -1)[:] = np.tile(np.array(fill, dtype=np.uint8), width)
    inside = ((source >= 0) & (source < size)).nonzero()[0]
    if inside.size == 0:
        return result
    first, after = int(inside[0]), int(inside[-1]) + 1
    whole = math.floor(shift)
    # One pixel before, itself, two after; border pixels are replicated.
    taps = pixels.take(np.arange(first - 1 + whole, after + 2 + whole).clip(0, size - 1), axis=axis)
    taps = taps.reshape(len(taps), -1)  # columns: (n + 3, W * 3); rows: (H, (n + 3) * 3)
    down, right = (1, 0) if axis == 0 else (0, channels)  # from a pixel to the next along the axis
    target = result[first:after] if axis == 0 else result[:, first:after]
    length = taps.shape[1] - 3 * right
    for top in range(0, len(target), _ROWS_AT_A_TIME):
        rows = target[top : top + _ROWS_AT_A_TIME]
        level = taps[top : top + len(rows) + 3 * down].astype(np.int16)
        v1, v2, v3, v4 = (level[k * down : k * down + len(rows), k * right : k * right + length] for k in range(4))
        rows[:] = _between(v1, v2, v3, v4, shift - whole).reshape(rows.shape)
    return result


def _between(v1: np.ndarray, v2: np.ndarray, v3: np.ndarray, v4: np.ndarray, d: float) -> np.ndarray:
    """Interpolate between neighbours, four of (H, n) int16, at the fraction ``d``: (H, n) uint8.

    Keys' cubic kernel (1981) with a = -1 in Pillow's Horner form and float64; another order of operations would round
    differently. The result is truncated to an integer, as in Pillow.
    """
    left, right = v1 - v2, v4 - v3
    level = np.multiply(right - left, d, dtype=np.float64)
    level += 2 * left - right
    level *= d
    level += v3 - v1
    level *= d
    level += v2
    return level.astype(np.int16).clip(0, 255).astype(np.uint8)
