"""Pillow's Gaussian blur: on the CPU by Pillow itself, in a DALI graph by the same sums.

Pillow approximates the Gaussian by three box filters along each axis (Gwosdek et al., "Theoretical Foundations of Gaussian
Convolution by Extended Box Filtering", 2011), rounds to 8 bits after each, and repeats the border's pixels. DALI's own blur is
a sampled Gaussian, up to 9 levels of 255 away.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from PIL import Image, ImageFilter

if TYPE_CHECKING:
    from nvidia.dali.pipeline import DataNode

PASSES = 3  # box filters along each axis
TAPS = 5  # pixels that a box filter sums: enough for standard deviations below 2.8
_WHOLE = 1 << 24  # Pillow's weights are multiples of its reciprocal
_HALF = 1 << 12  # its root: the digits of the weights in this base


def blur_picture(picture: Image.Image, radius: float) -> Image.Image:
    """Blur an image with a Gaussian of standard deviation ``radius``, in pixels, by Pillow."""
    return picture.filter(ImageFilter.GaussianBlur(radius))


def box_weights(radius: np.ndarray) -> np.ndarray:
    """Weights of the box filters that Pillow blurs with.

    Args:
        radius: (B,) standard deviations of the Gaussians in pixels, 0 to 2.

    Returns:
        (B, 2, TAPS) float32, whole numbers: the weights in 2**-24, as their two digits to base 2**12, the high one first.
    """
    # In float32, as in Pillow's C code: weights of a sixth decide by their last bit where a sum is halfway between two levels.
    radius = np.asarray(radius, dtype=np.float32)
    variance = radius * radius / np.float32(PASSES)
    length = np.sqrt(12 * variance.astype(np.float64) + 1).astype(np.float32)
    whole = np.floor((length - 1) / 2)  # whole pixels on each side of the centre
    part = (2 * whole + 1) * (whole * (whole + 1) - 3 * variance)
    part = part / (6 * (variance - (whole + 1) * (whole + 1)))
    inner = np.trunc(np.float32(_WHOLE) / ((whole + part) * 2 + 1)).astype(np.int64)
    outer = (_WHOLE - (2 * whole.astype(np.int64) + 1) * inner) // 2
    distance = np.abs(np.arange(TAPS) - TAPS // 2)
    weights = np.where(distance <= whole[:, None], inner[:, None], np.where(distance == whole[:, None] + 1, outer[:, None], 0))
    return np.stack(np.divmod(weights, _HALF), axis=1).astype(np.float32)


def blur_images(images: DataNode, weights: DataNode) -> DataNode:
    """Blur images in a DALI graph, as Pillow does to the last bit: float32 holds the sums of either digit exactly.

    Args:
        images: (H, W, 3) uint8 with layout HWC, on the CPU or the GPU.
        weights: (2, TAPS) float32 on the CPU, of :func:`box_weights`.

    Returns:
        uint8, same shape and layout.
    """
    import nvidia.dali.fn as fn
    import nvidia.dali.math as math
    import nvidia.dali.types as types

    if images.device == "gpu":
        weights = weights.gpu()
    for shape in ([1, TAPS], [TAPS, 1]):  # along the rows, then along the columns
        kernels = [fn.reshape(weights[digit], shape=shape) for digit in (0, 1)]
        for _ in range(PASSES):
            high, low = (fn.filter(images, kernel, border="clamp", dtype=types.FLOAT) for kernel in kernels)
            levels = math.floor((high + math.floor((low + _WHOLE / 2) / _HALF)) / _HALF)  # the sum in 2**-24, rounded
            images = fn.reinterpret(fn.cast(levels, dtype=types.UINT8), layout="HWC")
    return images
