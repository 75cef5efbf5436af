"""Mixup (Zhang et al., ICLR 2018) and CutMix (Yun et al., ICCV 2019) within small groups of the global batch.

The stream of training images is divided into groups of fixed size. Each group draws one method, one mixing weight and one
distance, and mixes each image with the one at that distance in the group, cyclically. A group never spans two ranks, so that
the mixed global batch is the same on any world size.

The reference code (timm) mixes image i with image B-1-i of a rank's batch. A cyclic distance has the same effect. Where the views of
an image stand side by side (:mod:`pipeline.stream.order`), it is large enough that no two of them are paired.
"""

from dataclasses import dataclass

import numpy as np
from torch import Tensor

from pipeline.augment import BatchAugmentation, BatchRequest, Places, register
from pipeline.config import AugmentConfig, DataConfig
from pipeline.stream.philox import Stream, uniforms

# Rejection sampling accepts with probability >= 1/2 for alpha <= 1, 1/6 for alpha = 2: all 64 fail with at most 1e-5.
BETA_ATTEMPTS = 64
UNIFORMS_PER_GROUP = 2 * BETA_ATTEMPTS + 4  # Beta; method, distance, centre row, centre column


@dataclass(frozen=True)
class Mixing:
    """How the G = B / group groups of a batch are mixed."""

    group: int  # images per group
    distance: np.ndarray  # (G,) int64: image i is mixed with image (i + distance) % group
    weight: np.ndarray  # (G,) float32: of an image's own label
    box: np.ndarray  # (G, 4) int64, CutMix: top, left, height, width of the part from the other image; 0 for Mixup
    blend: np.ndarray  # (G,) bool: True for Mixup, False for CutMix, whose box may be empty


@register
@dataclass(frozen=True)
class MixupCutmix(BatchAugmentation):
    """Mixup, CutMix, or one of the two for each group."""

    mixup: float  # alpha of the Beta distributions; 0: off
    cutmix: float
    switch: float  # probability of CutMix if both are on
    group: int  # images
    image_size: int  # side, pixels
    stream = Stream.MIXING
    place = 20

    @classmethod
    def from_config(cls, augment: AugmentConfig, data: DataConfig, image_size: int) -> "MixupCutmix | None":
        settings = augment.mixup, augment.cutmix, augment.mix_switch, augment.mix_group, image_size
        return cls(*settings) if augment.mixes else None

    def draw(self, places: Places) -> Mixing:
        group = places.number[:: self.group] // self.group  # its number in the run
        numbers = uniforms(self.stream, places.seed, np.zeros_like(group), group, UNIFORMS_PER_GROUP)
        return self.sample(numbers, places.different)

    def sample(self, numbers: np.ndarray, apart: int) -> Mixing:
        """How groups are mixed. ``numbers``: (G, UNIFORMS_PER_GROUP) in [0, 1); ``apart``: least distance, also around the end
        of the group, which has at least twice as many images."""
        method, distance, row, column = numbers[:, 2 * BETA_ATTEMPTS :].T
        cut = method < (self.switch if self.mixup and self.cutmix else float(bool(self.cutmix)))
        alpha = np.where(cut, self.cutmix, self.mixup)
        weight = _beta(numbers[:, : 2 * BETA_ATTEMPTS], alpha)

        side = (self.image_size * np.sqrt(1 - weight)).astype(np.int64)  # CutMix, Eq. 2: side of the box
        row, column = (row * self.image_size).astype(np.int64), (column * self.image_size).astype(np.int64)
        top, left = np.maximum(row - side // 2, 0), np.maximum(column - side // 2, 0)
        bottom, right = np.minimum(row + side // 2, self.image_size), np.minimum(column + side // 2, self.image_size)
        box = np.where(cut[:, None], np.stack([top, left, bottom - top, right - left], axis=1), 0)
        kept = 1 - box[:, 2] * box[:, 3] / self.image_size**2  # the label weight is the area after clipping at the border
        return Mixing(
            group=self.group,
            distance=apart + (distance * (self.group - 2 * apart + 1)).astype(np.int64),
            weight=np.where(cut, kept, weight).astype(np.float32),
            box=box,
            blend=~cut,
        )

    def digested(self, request: BatchRequest) -> list[np.ndarray]:
        mixing = request.draws[self]
        of_groups = (np.repeat(values, mixing.group, axis=0) for values in (mixing.box, mixing.blend))
        return [*mixed_labels(request.index, mixing), *of_groups]  # samples in the place of labels

    def apply_(self, images: Tensor, request: BatchRequest) -> None:
        mixing = request.draws[self]
        for g, members in enumerate(images.split(mixing.group)):  # members: (group, 3, H, W), a view
            shift = -int(mixing.distance[g])
            if mixing.blend[g]:
                members.lerp_(members.roll(shift, 0), 1 - float(mixing.weight[g]))
            elif mixing.box[g, 2:].all():
                top, left, height, width = mixing.box[g].tolist()
                window = members[:, :, top : top + height, left : left + width]
                window.copy_(window.roll(shift, 0))

    def device_arrays(self, request: BatchRequest, shape: tuple[int, ...]) -> tuple[np.ndarray, ...]:
        """Mixup and CutMix as one interpolation, whose weight depends on the pixel.

        The partner's weight at a pixel is the product of that of its row and that of its column: for CutMix 1 inside the box and 0
        outside, for Mixup the same everywhere. Returns each image's partner, (B,) int64, and the partner's weight by row, (B, H),
        and by column, (B, W), float32.
        """
        mixing, y, x = request.draws[self], np.arange(shape[2]), np.arange(shape[3])
        top, left, rows, columns = mixing.box[:, :, None].transpose(1, 0, 2)  # (G, 1) each
        by_row = (y >= top) & (y < top + rows)  # (G, H)
        by_column = ((x >= left) & (x < left + columns)) | mixing.blend[:, None]  # (G, W)
        partner_weight = 1 - mixing.weight.astype(np.float64)[:, None]
        shares = np.where(mixing.blend[:, None], partner_weight, by_row)  # rounded once, as in apply_
        first = mixing.group * np.arange(len(mixing.distance))[:, None]
        by_row, by_column = (np.repeat(each.astype(np.float32), mixing.group, axis=0) for each in (shares, by_column))
        return (first + _partners(mixing)).reshape(-1), by_row, by_column

    def apply_batch_(self, images: Tensor, request: BatchRequest, *arrays: Tensor) -> None:
        partner, by_row, by_column = arrays
        share = by_row[:, None, :, None] * by_column[:, None, None, :]
        images.lerp_(images.index_select(0, partner), share)  # exact at 0 and at 1

    def mixed_labels(self, request: BatchRequest) -> tuple[np.ndarray, np.ndarray]:
        return mixed_labels(request.label, request.draws[self])


def mixed_labels(labels: np.ndarray, mixing: Mixing) -> tuple[np.ndarray, np.ndarray]:
    """The labels of the partners of images with (B,) ``labels``, (B,) int64, and the weights of their own, (B,) float32."""
    other = np.take_along_axis(labels.reshape(-1, mixing.group), _partners(mixing), axis=1)
    return other.reshape(-1), np.repeat(mixing.weight, mixing.group)


def _partners(mixing: Mixing) -> np.ndarray:
    """Each image's partner, as a place in its group: (G, group) int64."""
    return (np.arange(mixing.group) + mixing.distance[:, None]) % mixing.group


def _beta(numbers: np.ndarray, alpha: np.ndarray) -> np.ndarray:
    """Sample Beta(alpha, alpha) by rejection (Jöhnk, Metrika 1964): numbers (G, 2 * BETA_ATTEMPTS), alpha (G,) -> (G,)."""
    log_x, log_y = (np.log1p(-draw) / alpha[:, None] for draw in np.split(numbers, 2, axis=1))  # (G, attempts); 1-u is > 0
    accepted = np.logaddexp(log_x, log_y) <= 0  # x + y <= 1, without underflow for a small alpha
    first = accepted.argmax(axis=1)
    weight = np.exp(log_x - np.logaddexp(log_x, log_y))[np.arange(len(alpha)), first]
    return np.where(accepted.any(axis=1), weight, 0.5)
