"""What DALI's resize lacks at the borders of an image, to give Pillow's pixels.

A pixel near the border depends on source pixels beyond it. Pillow and PyTorch leave these out and divide by the sum of the
weights that remain; DALI repeats the border's pixel. With ``out`` the weight of what lies beyond the border, DALI's value ``d``
and the border's pixel ``e``, Pillow's value is ``(d - out * e) / (1 - out) = d + out / (1 - out) * (d - e)``.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from pipeline.data.augment.crop import Geometry

_SUPPORT = {False: 2.0, True: 1.0}  # of the cubic and the linear filter, in pixels of the smaller image


@lru_cache(maxsize=4096)  # a training set has a few hundred window sides; 2 KB each
def border_weights(before: int, after: int, bilinear: bool = False) -> np.ndarray:
    """The factors ``out / (1 - out)`` along an axis that is resized by an antialiased filter.

    Args:
        before, after: pixels along the axis.
        bilinear: the triangle filter in place of the cubic one (Keys, 1981, a = -1/2).

    Returns:
        (2, after) float32: for the border at the start and for that at the end; 0 away from it.
    """
    step = before / after
    stretch = max(step, 1.0)  # antialiasing widens the filter
    support = stretch * _SUPPORT[bilinear]
    centre = step * (np.arange(min(after, int(support / step) + 1)) + 0.5)  # of the (k,) pixels near the start
    taps = np.arange(-int(support + 0.5), int(centre[-1] + support) + 1) + 0.5  # pixel centres
    weight = (_triangle if bilinear else _cubic)((taps - centre[:, None]) / stretch)  # (k, taps)
    beyond_start, beyond_end = weight[:, taps < 0].sum(axis=1), weight[:, taps > before].sum(axis=1)
    factor = beyond_start / (weight.sum(axis=1) - beyond_start - beyond_end)
    factors = np.zeros((2, after), dtype=np.float32)
    factors[0, : len(centre)], factors[1, after - len(centre) :] = factor, factor[::-1]
    factors.flags.writeable = False  # shared by all who ask
    return factors


def resize_borders(geometry: Geometry, bilinear: np.ndarray | None = None) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """:func:`border_weights` of B images: of their rows, B of (2, height), and of their columns, B of (2, width).

    Args:
        geometry: of the images.
        bilinear: (B,) bool, their filters; None: all cubic.
    """
    filters = [False] * len(geometry.shape) if bilinear is None else bilinear.tolist()
    rows, columns = (
        [border_weights(*sides) for sides in zip(shape.tolist(), size.astype(int).tolist(), filters)]
        for shape, size in zip(geometry.shape.T, geometry.resize.T)
    )
    return rows, columns


def _triangle(x: np.ndarray) -> np.ndarray:
    """Linear interpolation."""
    return np.maximum(1 - np.abs(x), 0.0)


def _cubic(x: np.ndarray) -> np.ndarray:
    """Keys' kernel with a = -1/2."""
    x = np.abs(x)
    near = (1.5 * x - 2.5) * x * x + 1
    far = ((-0.5 * x + 2.5) * x - 4) * x + 2
    return np.where(x < 1, near, np.where(x < 2, far, 0.0))
