"""RandAugment (Cubuk et al., 2019, arXiv:1909.13719): choice and strength of the operations.

The pixels are in ``cpu.py`` and ``dali.py``.

The papers' models were trained with timm's ``rand-m9-mstd0.5-inc1`` (DeiT: timm 0.3.2). This reproduces its operations,
probabilities and ranges, on which timm 0.3.2, 0.4.12 and 1.0 agree for a finite ``mstd`` and magnitudes up to 10. It differs
from the paper's RandAugment in three ways: a chosen operation is applied with probability 0.5, the magnitude is noisy, and
"inc1" makes the effect of posterize, solarize and the enhancements increase with the magnitude.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import TYPE_CHECKING

import numpy as np

from pipeline.augment import BatchRequest, PixelAugmentation, Places, register
from pipeline.config import AugmentConfig, DataConfig
from pipeline.stream.philox import Stream

if TYPE_CHECKING:
    from nvidia.dali.data_node import DataNode
    from PIL import Image

APPLY_PROBABILITY = 0.5  # of applying a chosen operation
MAX_MAGNITUDE = 10.0  # magnitudes are clipped to [0, 10]; 10 is the end of every range
UNIFORMS_PER_LAYER = 5  # operation, applied or not, two for the Gaussian noise, sign


class Op(IntEnum):
    """The operations and the units of their amounts. timm's order; never renumber or reuse a number: runs could not resume."""

    NOTHING = 0
    AUTO_CONTRAST = 1  # no amount
    EQUALIZE = 2  # no amount
    INVERT = 3  # no amount
    ROTATE = 4  # degrees, counter-clockwise
    POSTERIZE = 5  # bits that are kept
    SOLARIZE = 6  # threshold: this value and brighter ones are inverted
    SOLARIZE_ADD = 7  # levels added to values below 128
    COLOR = 8  # factor: 0 gray, 1 unchanged
    CONTRAST = 9  # factor: 0 all mean, 1 unchanged
    BRIGHTNESS = 10  # factor: 0 black, 1 unchanged
    SHARPNESS = 11  # factor: 0 smoothed, 1 unchanged
    SHEAR_X = 12  # output (x, y) is input (x + amount * y, y)
    SHEAR_Y = 13  # output (x, y) is input (x, y + amount * x)
    TRANSLATE_X = 14  # pixels: output (x, y) is input (x + amount, y)
    TRANSLATE_Y = 15  # pixels: output (x, y) is input (x, y + amount)


@dataclass(frozen=True)
class Ops:
    """The operations on B images, in order of application."""

    op: np.ndarray  # (B, layers) int32: an Op
    amount: np.ndarray  # (B, layers) float32: in the unit of the Op


@register
@dataclass(frozen=True)
class RandAugment(PixelAugmentation):
    """Settings of a recipe. The defaults are ``rand-m9-mstd0.5-inc1``; PosMLP's ``rand-m6-n3-mstd1.0-inc1`` is (3, 6, 1.0)."""

    layers: int = 2  # operations per image, chosen with replacement
    magnitude: float = 9.0  # 0 to 10
    magnitude_std: float = 0.5  # standard deviation of the magnitude's Gaussian noise
    image_size: int = 224  # side of the square images, pixels; translations are proportional to it
    fill: tuple[int, int, int] = (0, 0, 0)  # colour outside the image after geometric operations
    chosen_filters: bool = False  # requests say which geometric operations are bilinear; else all are bicubic
    stream = Stream.RAND_AUGMENT
    place = 10

    @classmethod
    def from_config(cls, augment: AugmentConfig, data: DataConfig, image_size: int) -> RandAugment | None:
        settings = augment.rand_augment_ops, augment.rand_augment_magnitude, augment.rand_augment_std
        colors = fill_color(data.mean), data.train_interpolation != "bicubic"
        return cls(*settings, image_size, *colors) if augment.rand_augment_ops else None

    @property
    def filters(self) -> int:
        return self.layers

    @property
    def graph_types(self) -> tuple[tuple[type, int], ...]:
        """Operation, amount, matrix, and with chosen filters the layers that are bilinear."""
        types = (np.int32, 1), (np.float32, 1), (np.float32, 3)
        return (*types, (np.float32, 1)) if self.chosen_filters else types

    def draw(self, places: Places) -> Ops:
        return self.sample(places.uniforms(self.stream, self.layers * UNIFORMS_PER_LAYER))

    def sample(self, uniforms: np.ndarray) -> Ops:
        """The operations and amounts that (B, layers * UNIFORMS_PER_LAYER) numbers in [0, 1) make."""
        draws = uniforms.reshape(len(uniforms), self.layers, UNIFORMS_PER_LAYER)
        op_draw, apply_draw, radius_draw, angle_draw, sign_draw = np.moveaxis(draws, -1, 0)  # (B, layers) each
        op = 1 + (op_draw * (len(Op) - 1)).astype(np.int32)
        # Box-Muller transform; 1 - u is in (0, 1], so that the logarithm is finite.
        noise = np.sqrt(-2 * np.log(1 - radius_draw)) * np.cos(2 * np.pi * angle_draw)
        magnitude = np.clip(self.magnitude + self.magnitude_std * noise, 0, MAX_MAGNITUDE)
        amounts = _amount_of_each_op(magnitude / MAX_MAGNITUDE, np.where(sign_draw < 0.5, 1, -1), self.image_size)
        applied = apply_draw < APPLY_PROBABILITY
        op, amount = np.where(applied, op, Op.NOTHING), np.where(applied, np.choose(op, amounts), 0)
        return Ops(op.astype(np.int32), amount.astype(np.float32))

    def applies(self, request: BatchRequest, i: int) -> bool:
        return request.draws[self].op[i].any()

    def on_picture(self, picture: Image.Image, request: BatchRequest, i: int) -> Image.Image:
        from pipeline.augment.randaugment.cpu import augment

        ops, bilinear = request.draws[self], None if request.bilinear is None else request.bilinear[i, 1:]
        return augment(picture, ops.op[i], ops.amount[i], self.fill, bilinear)

    def graph_inputs(self, request: BatchRequest) -> tuple[np.ndarray, ...]:
        ops = request.draws[self]
        inputs = ops.op, ops.amount, affine_matrices(ops, self.image_size)
        return inputs if request.bilinear is None else (*inputs, request.bilinear[:, 1:].astype(np.float32))

    def in_graph(self, images: DataNode, *inputs: DataNode) -> DataNode:
        from pipeline.augment.randaugment.dali import augment

        return augment(images, inputs[0], inputs[1], inputs[2], self.layers, self.image_size, self.fill, *inputs[3:])


def fill_color(mean: tuple[float, float, float]) -> tuple[int, int, int]:
    """Colour outside the image after geometric operations: the data's mean per RGB channel, scaled from [0, 1] to 255."""
    red, green, blue = (min(255, max(0, round(255 * value))) for value in mean)
    return red, green, blue


def _amount_of_each_op(level: np.ndarray, sign: np.ndarray, image_size: int) -> list[np.ndarray]:
    """The amount for every Op, (B, layers) each, of magnitudes scaled to [0, 1] and signs 1 or -1, (B, layers) both.

    The constants are the ends of timm's ranges.
    """
    amounts = dict.fromkeys(Op, np.zeros_like(level))
    amounts |= dict.fromkeys((Op.COLOR, Op.CONTRAST, Op.BRIGHTNESS, Op.SHARPNESS), 1 + sign * 0.9 * level)
    amounts |= dict.fromkeys((Op.SHEAR_X, Op.SHEAR_Y), sign * 0.3 * level)
    amounts |= dict.fromkeys((Op.TRANSLATE_X, Op.TRANSLATE_Y), sign * 0.45 * level * image_size)
    amounts[Op.ROTATE] = sign * 30 * level
    amounts[Op.POSTERIZE] = 4 - np.floor(4 * level)
    amounts[Op.SOLARIZE] = 256 - np.floor(256 * level)
    amounts[Op.SOLARIZE_ADD] = np.floor(110 * level)
    return [amounts[op] for op in Op]


def affine_matrices(ops: Ops, image_size: int) -> np.ndarray:
    """(B, layers, 2, 3) float32 for a DALI graph: output (x, y) is input matrix @ (x, y, 1), with pixel centres at .5."""
    matrix = np.zeros((*ops.op.shape, 2, 3))
    matrix[..., 0, 0] = matrix[..., 1, 1] = 1
    for op, row, column in ((Op.SHEAR_X, 0, 1), (Op.SHEAR_Y, 1, 0), (Op.TRANSLATE_X, 0, 2), (Op.TRANSLATE_Y, 1, 2)):
        matrix[..., row, column] += np.where(ops.op == op, ops.amount, 0)
    angle = np.deg2rad(np.where(ops.op == Op.ROTATE, ops.amount, 0))
    turn = np.stack([np.cos(angle), -np.sin(angle), np.sin(angle), np.cos(angle)], -1).reshape(*angle.shape, 2, 2)
    centre = np.full((2, 1), image_size / 2)
    turn_about_centre = np.concatenate([turn, centre - turn @ centre], axis=-1)
    return np.where((ops.op == Op.ROTATE)[..., None, None], turn_about_centre, matrix).astype(np.float32)
