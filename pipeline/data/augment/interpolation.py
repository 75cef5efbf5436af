"""The filter of training's crops and of RandAugment's geometric operations: bicubic or bilinear.

timm's ``train_interpolation: random`` chooses one of the two with equal probability for each crop, and once more for each
geometric operation of each image (``RandomResizedCropAndInterpolation`` and ``AugmentOp`` of timm 0.4.12, which PosMLP uses).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

BILINEAR_SHARE = {"bicubic": 0.0, "bilinear": 1.0, "random": 0.5}  # by value of data.train_interpolation


@dataclass(frozen=True)
class Interpolation:
    """The filters for B images; True: bilinear, False: bicubic."""

    crop: np.ndarray  # (B,) bool
    ops: np.ndarray  # (B, layers) bool: of RandAugment's operations; no meaning for those without geometry


def uniforms_per_sample(layers: int) -> int:
    """Numbers that :func:`draw_interpolation` takes for an image with ``layers`` RandAugment operations."""
    return 1 + layers


def draw_interpolation(uniforms: np.ndarray, bilinear_share: float) -> Interpolation:
    """Choose the filters, independently of each other.

    Args:
        uniforms: (B, uniforms_per_sample) in [0, 1).
        bilinear_share: probability of bilinear.
    """
    bilinear = uniforms < bilinear_share  # (B, 1 + layers)
    return Interpolation(crop=bilinear[:, 0], ops=bilinear[:, 1:])
