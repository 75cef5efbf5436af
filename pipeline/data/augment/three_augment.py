"""3-Augment (Touvron et al., "DeiT III: Revenge of the ViT", ECCV 2022, Sec. 3) and colour jitter: what is drawn.

An image gets one of three with equal probability: grayscale, solarization, a Gaussian blur; then its brightness, contrast and
saturation are multiplied by random factors, in random order, as torchvision's ``ColorJitter`` does. Ranges and probabilities are
those of the authors' ``augment.py``.

Numbers only. All but the blur are operations that RandAugment has too, so that their pixels come from ``randaugment_cpu.py`` and
``randaugment_dali.py``; the blur's are in ``gaussian_blur.py``.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import permutations

import numpy as np

from pipeline.data.augment.randaugment import Op, Ops

GRAYSCALE, SOLARIZATION, BLUR = range(3)
SOLARIZE_FROM = 128  # this level and brighter ones are inverted: Pillow's default
BLUR_RADIUS = (0.1, 2.0)  # standard deviation in pixels
JITTER = np.array([Op.BRIGHTNESS, Op.CONTRAST, Op.COLOR], dtype=np.int32)
LAYERS = 1 + len(JITTER)  # operations per image, besides the blur
UNIFORMS_PER_SAMPLE = 3 + len(JITTER)  # choice, radius, order; a factor for each of JITTER
_ORDERS = np.array(list(permutations(range(len(JITTER)))))  # (6, 3)


@dataclass(frozen=True)
class ThreeAugment:
    """What is done to B images: the blur, then the operations."""

    blur: np.ndarray  # (B,) float32: standard deviation in pixels; 0: none
    ops: Ops  # (B, LAYERS): grayscale or solarization, then the jitter


def draw_three_augment(uniforms: np.ndarray, one_of_three: bool, jitter: float) -> ThreeAugment:
    """Sample the choice, the strength of the blur, and the jitter's order and factors.

    Args:
        uniforms: (B, UNIFORMS_PER_SAMPLE) in [0, 1).
        one_of_three: whether one of the three is applied; False: the jitter only.
        jitter: factors are between 1 - jitter and 1 + jitter; 0: none.
    """
    choice_draw, radius_draw, order_draw, *factor_draws = uniforms.T
    choice = (3 * choice_draw).astype(np.int32)  # (B,)
    low, high = BLUR_RADIUS
    blur = np.where(choice == BLUR, low + (high - low) * radius_draw, 0)
    first = np.select([choice == GRAYSCALE, choice == SOLARIZATION], [Op.COLOR, Op.SOLARIZE], Op.NOTHING)
    if not one_of_three:
        blur, first = np.zeros_like(blur), np.zeros_like(first)
    order = _ORDERS[(len(_ORDERS) * order_draw).astype(np.int32)]  # (B, 3)
    factors = np.take_along_axis(1 + jitter * (2 * np.stack(factor_draws, axis=1) - 1), order, axis=1)
    ops = JITTER[order] if jitter else np.full_like(order, Op.NOTHING)
    amounts = np.where(first == Op.SOLARIZE, SOLARIZE_FROM, 0)  # of Op.COLOR, 0 is gray
    return ThreeAugment(
        blur=blur.astype(np.float32),
        ops=Ops(
            op=np.column_stack([first, ops]).astype(np.int32),
            amount=np.column_stack([amounts, factors if jitter else np.zeros_like(factors)]).astype(np.float32),
        ),
    )
