"""Apply RandAugment in a DALI graph, for images that are on the GPU already (the graph runs on the CPU too).

Operations and amounts are inputs of the graph, one row per image; DALI splits the batch by operation. Every operation follows
Pillow's arithmetic. Results differ by one or two levels of 255 in equalize, where DALI has its own formula, and in geometric
operations for values within float32's rounding error of the next level.
"""

from collections.abc import Callable

import numpy as np
import nvidia.dali.fn as fn
import nvidia.dali.math as math
import nvidia.dali.types as types
from nvidia.dali.pipeline import DataNode

from pipeline.augment.randaugment import Op

# Added before truncation: a float32 sum of 4 x 4 pixels can fall this far below the integer that it should be.
_SHORT_OF_WHOLE = 2e-4


def augment(
    images: DataNode,
    op: DataNode,
    amount: DataNode,
    matrix: DataNode,
    layers: int,
    image_size: int,
    fill: tuple[int, int, int],
    bilinear: DataNode | None = None,
) -> DataNode:
    """Augment images, (image_size, image_size, 3) uint8 RGB with layout HWC on the CPU or the GPU, in a graph with conditionals.

    Args, all on the CPU:
        op, amount, matrix: (layers,) int32 of :class:`Op`, (layers,) float32 in its unit, and (layers, 2, 3) float32 of
            :func:`affine_matrices`.
        bilinear: (layers,) float32, 1 where a geometric operation is bilinear and 0 where it is bicubic; None: all bicubic.
    """
    for k in range(layers):
        linear = None if bilinear is None else bilinear[k]
        if op[k] == Op.NOTHING.value:
            result = images
        elif (op[k] == Op.ROTATE.value) | (op[k] >= Op.SHEAR_X.value):
            result = _warp(images, matrix[k], image_size, fill, linear)
        elif op[k] == Op.SHARPNESS.value:
            result = _sharpness(images, amount[k], image_size)
        else:
            result = _one_of(_COLORS, images, op[k], amount[k])
        images = result
    return images


def recolor(images: DataNode, op: DataNode, amount: DataNode, layers: int) -> DataNode:
    """:func:`augment` for the operations of 3-Augment and colour jitter (_RECOLORING) only: a graph of a third of the size."""
    for layer in range(layers):
        images = _one_of(_RECOLORING, images, op[layer], amount[layer])
    return images


def _one_of(ops: tuple[Op, ...], images: DataNode, op: DataNode, amount: DataNode) -> DataNode:
    """The one of the operations ``ops`` that an image got; DALI splits the batch at each condition."""
    if len(ops) == 1 or op == ops[0].value:
        result = _COLOR[ops[0]](images, amount)
    else:
        result = _one_of(ops[1:], images, op, amount)
    return result


# Geometry


def _warp(images: DataNode, matrix: DataNode, image_size: int, fill: tuple[int, int, int], linear: DataNode | None) -> DataNode:
    """Affine warp like Pillow's, bicubic, or bilinear where ``linear`` is 1. DALI's warp is at most linear, so this sums the
    4 x 4 pixels around each source point, fetched by DALI's nearest-neighbour warp with whole-pixel shifts, which replicates the
    border. In a bilinear warp the outer ones have weight 0: a graph of its own would split the batch once more."""
    index = np.arange(image_size, dtype=np.float32)
    x, y = _constant(index[None, :, None] + 0.5, images), _constant(index[:, None, None] + 0.5, images)
    source_x = matrix[0, 0] * x + matrix[0, 1] * y + matrix[0, 2]  # (H, W, 1)
    source_y = matrix[1, 0] * x + matrix[1, 1] * y + matrix[1, 2]
    # Warp a coordinate grid to learn which pixel DALI takes as the second of the four: its rounding differs from ours.
    grid = np.stack(np.meshgrid(index, index), axis=-1)  # (H, W, 2): column, row
    second = _tap(types.Constant(grid, device=images.device, layout="HWC"), matrix, 1, 1)
    weights_x = _weights(source_x, second[:, :, 0:1], linear)  # (H, W, 4, 1)
    weights_y = _weights(source_y, second[:, :, 1:2], linear)
    rows = []
    for row in range(4):
        taps = [_tap(images, matrix, row, column) for column in range(4)]
        rows.append(fn.reductions.sum(weights_x * fn.stack(*taps, axis=2), axes=2))  # (H, W, 3)
    summed = _to_level(fn.reductions.sum(weights_y * fn.stack(*rows, axis=2), axes=2) + _SHORT_OF_WHOLE)
    inside = (source_x >= 0) & (source_x < image_size) & (source_y >= 0) & (source_y < image_size)
    warped = _where(inside, summed, _constant(np.array(fill, dtype=np.uint8), images))
    return fn.reinterpret(warped, layout="HWC")  # arithmetic may drop the layout, and DALI merges branches of equal layout only


# Weights of the four pixels around a point as polynomials of the distance d from the second: factors of 1, d, d^2 and d^3.
_CUBIC = np.array([[0, 1, 0, 0], [-1, 0, 1, 0], [2, -2, 1, -1], [-1, 1, -1, 1]], dtype=np.float32)
_LINEAR = np.array([[0, 1, 0, 0], [0, -1, 1, 0], [0, 0, 0, 0], [0, 0, 0, 0]], dtype=np.float32)


def _weights(source: DataNode, second: DataNode, linear: DataNode | None) -> DataNode:
    """Weights of the four pixels around each source point along one axis: (H, W, 4, 1).

    Bicubic: Keys' kernel (1981) with a = -1, as in Pillow's transforms (its resize has a = -1/2).

    Args:
        source: (H, W, 1) coordinate of the point; pixel centres at .5.
        second: (H, W, 1) index of the second of the four pixels, 0 where it would be -1.
        linear: 1 for linear weights, 0 for cubic ones; None: cubic.
    """
    position = source - 0.5  # in pixel indices
    d = position - second + fn.cast(position < 0, dtype=types.FLOAT)  # from the second pixel towards the third
    factors = [_constant(each, source) for each in _CUBIC]
    if linear is not None:  # exact: all factors are whole numbers
        factors = [cubic + linear * _constant(change, source) for cubic, change in zip(factors, _LINEAR - _CUBIC)]
    constant, first, square, cube = factors
    return fn.expand_dims(constant + d * (first + d * (square + d * cube)), axes=3)


def _tap(images: DataNode, matrix: DataNode, row: int, column: int) -> DataNode:
    """One of the 4 x 4 pixels around each source point: (H, W, channels)."""
    shift = np.zeros((2, 3), dtype=np.float32)
    shift[:, 2] = column - 1.5, row - 1.5  # the nearest neighbour of a point half a pixel lower is the floor
    return fn.warp_affine(images, matrix=matrix + types.Constant(shift, device="cpu"), interp_type=types.INTERP_NN)


# Colour


def _auto_contrast(images: DataNode, amount: DataNode) -> DataNode:
    """Stretch each channel to the range 0 to 255, in float64 like Pillow: in float32 some levels would be off by one."""
    low = fn.cast(fn.reductions.min(images, axis_names="HW", keep_dims=True), dtype=types.FLOAT64)  # (1, 1, 3)
    high = fn.cast(fn.reductions.max(images, axis_names="HW", keep_dims=True), dtype=types.FLOAT64)
    scale = 255.0 / math.max(high - low, 1.0)
    stretched = fn.cast(images, dtype=types.FLOAT64) * scale + (-low) * scale
    stretched = fn.cast(math.floor(math.clamp(stretched, 0.0, 255.0)), dtype=types.UINT8)
    return _where(high > low, stretched, images)  # a constant channel is unchanged


def _equalize(images: DataNode, amount: DataNode) -> DataNode:
    """Equalize each channel's histogram.

    DALI counts the pixels up to and including a level, Pillow those below it. On the inverted image DALI's counts match
    Pillow's, except that Pillow rounds the step between two levels to an integer number of pixels.
    """
    return _inverse(fn.equalize(_inverse(images)))


def _inverse(images: DataNode) -> DataNode:
    return _level(255) - images


def _solarize_add(images: DataNode, amount: DataNode) -> DataNode:
    brighter = images + fn.cast(amount, dtype=types.UINT8)  # at most 127 + 110: no overflow
    return _where(images < _level(128), brighter, images)


def _posterize(images: DataNode, bits: DataNode) -> DataNode:
    """Keep the ``bits`` highest bits."""
    step = fn.cast(math.pow(2.0, 8 - bits), dtype=types.INT32)  # 256 for no bits: everything is black
    return fn.cast(images // step * step, dtype=types.UINT8)


def _gray(images: DataNode) -> DataNode:
    """ITU-R 601 luma in Pillow's 16-bit fixed point, (H, W, 1) int32; DALI's own conversion rounds some values differently."""
    weighted = images * _constant(np.array([19595, 38470, 7471], dtype=np.int32), images)
    return (fn.reductions.sum(weighted, axes=2, keep_dims=True, dtype=types.INT32) + 32768) // 65536


def _sharpness(images: DataNode, factor: DataNode, image_size: int) -> DataNode:
    """Extrapolate from, or interpolate towards, a smoothed copy. As in Pillow, border pixels are unchanged."""
    kernel = np.array([[1, 1, 1], [1, 5, 1], [1, 1, 1]], dtype=np.float32) / 13
    smooth = math.floor(fn.filter(images, _constant(kernel, images), dtype=types.FLOAT) + 0.5)
    border = np.ones((image_size, image_size, 1), dtype=np.uint8)
    border[1:-1, 1:-1] = 0
    return _where(_constant(border, images) > 0, images, _blend(smooth, images, factor))


_COLOR: dict[Op, Callable[[DataNode, DataNode], DataNode]] = {
    Op.NOTHING: lambda images, amount: images,
    Op.AUTO_CONTRAST: _auto_contrast,
    Op.EQUALIZE: _equalize,
    Op.INVERT: lambda images, amount: _inverse(images),
    Op.POSTERIZE: _posterize,
    Op.SOLARIZE: lambda images, amount: _where(images < amount, images, _inverse(images)),
    Op.SOLARIZE_ADD: _solarize_add,
    Op.COLOR: lambda images, amount: _blend(_gray(images), images, amount),
    Op.CONTRAST: lambda images, amount: _blend(math.floor(fn.reductions.mean(_gray(images)) + 0.5), images, amount),
    Op.BRIGHTNESS: lambda images, amount: _to_level(images * amount),
}
_COLORS = tuple(_COLOR)[1:]
_RECOLORING = (Op.NOTHING, Op.SOLARIZE, Op.COLOR, Op.CONTRAST, Op.BRIGHTNESS)  # of 3-Augment and colour jitter


# Helpers


def _blend(from_: DataNode, to: DataNode, factor: DataNode) -> DataNode:
    """Pillow's ImageEnhance: ``from_`` at factor 0, ``to`` at 1, extrapolation above 1."""
    base = fn.cast(from_, dtype=types.FLOAT)
    return _to_level(base + factor * (to - base))


def _to_level(values: DataNode) -> DataNode:
    """Float to uint8 by clamping and truncation, as in Pillow."""
    return fn.cast(math.floor(math.clamp(values, 0.0, 255.0)), dtype=types.UINT8)


def _where(condition: DataNode, yes: DataNode, no: DataNode) -> DataNode:
    """Elementwise selection between uint8 images, for which DALI has no operator."""
    chosen = fn.cast(condition, dtype=types.UINT8)
    return chosen * yes + (_level(1) - chosen) * no


def _level(value: int) -> types.ScalarConstant:
    return types.Constant(value, dtype=types.UINT8)


def _constant(values: np.ndarray, like: DataNode) -> DataNode:
    return types.Constant(values, device=like.device)
