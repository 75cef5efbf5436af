"""3-Augment (Touvron et al., "DeiT III: Revenge of the ViT", ECCV 2022, Sec. 3) and colour jitter.

An image gets one of three with equal probability: grayscale, solarization, a Gaussian blur; then its brightness, contrast and
saturation are multiplied by random factors, in random order. Ranges and probabilities are those of the authors' ``augment.py``.

The blur is Pillow's: on the CPU by Pillow itself, in a DALI graph by the same sums of three box filters along each axis
(Gwosdek et al., "Theoretical Foundations of Gaussian Convolution by Extended Box Filtering", 2011), rounded to 8 bits after
each. DALI's own blur is a sampled Gaussian, up to 9 levels of 255 away.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import permutations
from typing import TYPE_CHECKING

import numpy as np
from PIL import Image, ImageFilter

from pipeline.augment import BatchRequest, PixelAugmentation, Places, register
from pipeline.augment.randaugment import Op, Ops
from pipeline.config import AugmentConfig, DataConfig
from pipeline.stream.philox import Stream

if TYPE_CHECKING:
    from nvidia.dali.data_node import DataNode

GRAYSCALE, SOLARIZATION, BLUR = range(3)
SOLARIZE_FROM = 128  # this level and brighter ones are inverted: Pillow's default
BLUR_RADIUS = (0.1, 2.0)  # standard deviation in pixels
JITTER = np.array([Op.BRIGHTNESS, Op.CONTRAST, Op.COLOR], dtype=np.int32)
LAYERS = 1 + len(JITTER)  # operations per image, besides the blur
UNIFORMS_PER_SAMPLE = 3 + len(JITTER)  # choice, radius, order; a factor for each of JITTER
PASSES = 3  # box filters along each axis
TAPS = 5  # pixels that a box filter sums: enough for standard deviations below 2.8
_WHOLE = 1 << 24  # Pillow's weights are multiples of its reciprocal
_HALF = 1 << 12  # its root: the digits of the weights in this base
_ORDERS = np.array(list(permutations(range(len(JITTER)))))  # (6, 3)


@dataclass(frozen=True)
class Recoloring:
    """What is done to B images: the blur, then the operations."""

    ops: Ops  # (B, LAYERS): grayscale or solarization, then the jitter
    blur: np.ndarray  # (B,) float32: standard deviation in pixels; 0: none


@register
@dataclass(frozen=True)
class ThreeAugment(PixelAugmentation):
    """3-Augment, colour jitter, or both."""

    one_of_three: bool  # whether one of the three is applied; False: the jitter only
    jitter: float  # factors are between 1 - jitter and 1 + jitter; 0: none
    stream = Stream.THREE_AUGMENT
    place = 20
    graph_types = (np.float32, 0), (np.float32, 2), (np.int32, 1), (np.float32, 1)  # blur, its weights, operation, amount

    @classmethod
    def from_config(cls, augment: AugmentConfig, data: DataConfig, image_size: int) -> ThreeAugment | None:
        return cls(augment.three_augment, augment.color_jitter) if augment.three_augment or augment.color_jitter else None

    def draw(self, places: Places) -> Recoloring:
        return self.sample(places.uniforms(self.stream, UNIFORMS_PER_SAMPLE))

    def sample(self, uniforms: np.ndarray) -> Recoloring:
        """The choice, the strength of the blur, and the jitter's order and factors of (B, UNIFORMS_PER_SAMPLE) numbers in [0, 1)."""
        choice_draw, radius_draw, order_draw, *factor_draws = uniforms.T
        choice = (3 * choice_draw).astype(np.int32)  # (B,)
        low, high = BLUR_RADIUS
        blur = np.where(choice == BLUR, low + (high - low) * radius_draw, 0)
        first = np.select([choice == GRAYSCALE, choice == SOLARIZATION], [Op.COLOR, Op.SOLARIZE], Op.NOTHING)
        if not self.one_of_three:
            blur, first = np.zeros_like(blur), np.zeros_like(first)
        order = _ORDERS[(len(_ORDERS) * order_draw).astype(np.int32)]  # (B, 3)
        factors = np.take_along_axis(1 + self.jitter * (2 * np.stack(factor_draws, axis=1) - 1), order, axis=1)
        ops = JITTER[order] if self.jitter else np.full_like(order, Op.NOTHING)
        amounts = np.where(first == Op.SOLARIZE, SOLARIZE_FROM, 0)  # of Op.COLOR, 0 is gray
        factors = factors if self.jitter else np.zeros_like(factors)
        op, amount = np.column_stack([first, ops]), np.column_stack([amounts, factors])  # (B, LAYERS) each
        return Recoloring(Ops(op.astype(np.int32), amount.astype(np.float32)), blur.astype(np.float32))

    def applies(self, request: BatchRequest, i: int) -> bool:
        draw = request.draws[self]
        return bool(draw.blur[i]) or draw.ops.op[i].any()

    def on_picture(self, picture: Image.Image, request: BatchRequest, i: int) -> Image.Image:
        from pipeline.augment.randaugment.cpu import augment

        draw = request.draws[self]
        if draw.blur[i]:
            picture = picture.filter(ImageFilter.GaussianBlur(float(draw.blur[i])))
        return augment(picture, draw.ops.op[i], draw.ops.amount[i], fill=(0, 0, 0))  # no operation shows what lies outside

    def graph_inputs(self, request: BatchRequest) -> tuple[np.ndarray, ...]:
        draw = request.draws[self]
        return draw.blur, box_weights(draw.blur), draw.ops.op, draw.ops.amount

    def in_graph(self, images: DataNode, *inputs: DataNode) -> DataNode:
        from pipeline.augment.randaugment.dali import recolor

        blur, weights, op, amount = inputs
        if blur > 0:
            images = blur_images(images, weights)
        return recolor(images, op, amount, LAYERS)


def box_weights(radius: np.ndarray) -> np.ndarray:
    """Weights of the box filters that Pillow blurs with, of (B,) standard deviations of Gaussians in pixels, 0 to 2. Returns
    (B, 2, TAPS) float32, whole numbers: the weights in 2**-24, as their two digits to base 2**12, the high one first."""
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
    """Blur images (H, W, 3) uint8 with layout HWC in a DALI graph, as Pillow does to the last bit.

    Float32 holds the sums of either digit of the weights, (2, TAPS) of :func:`box_weights` on the CPU, exactly.
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
