"""Which samples, with which augmentation, make up each batch of each process: arithmetic, without state.

A training run is one endless stream of samples, epoch after epoch without a gap. Step ``s`` takes the samples
``s * global_batch_size`` to ``(s + 1) * global_batch_size`` of the stream, micro-batch by micro-batch, and within each
pass process by process. The stream does not depend on the number of processes, nor does anything that is drawn
for a sample. An epoch's length need not divide by anything: its remainder and the next epoch's beginning share a step.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from pipeline.config import AugmentConfig, DataConfig
from pipeline.data.augment import crop, erasing, mixing, randaugment
from pipeline.data.augment.crop import Geometry, eval_geometry, train_geometry
from pipeline.data.order import Blocks, block_sample_at, blocks_of_window, count_windows, sample_at
from pipeline.data.shards import DamagedSample
from pipeline.philox import Stream, uniforms

_EPOCH_UNIT = 256  # repeated augmentation rounds an epoch down to a multiple of this, as its reference does


@dataclass(frozen=True)
class BatchRequest:
    """What one batch of one process consists of; all arrays have B entries."""

    index: np.ndarray  # (B,) int64: sample numbers of the shard set
    label: np.ndarray  # (B,) int64
    epoch: np.ndarray  # (B,) int64
    position: np.ndarray  # (B,) int64: place in the epoch
    valid: np.ndarray  # (B,) bool: False marks padding
    geometry: Geometry
    ops: randaugment.Ops | None = None  # None: no RandAugment; and so on
    erasing: erasing.Erasing | None = None
    mixing: mixing.Mixing | None = None


class Samples(Protocol):
    """One split, as plans and the reader use it: a :class:`~pipeline.data.shards.ShardSet` or an
    :class:`~pipeline.data.image_folder.ImageFolder`.

    Attributes:
        folder: where it lies.
        samples: indexed with an array of B sample numbers it gives (B,) of ``SAMPLE_DTYPE``.
        classes: names in index order.
    """

    folder: Path
    classes: list[str]

    @property
    def samples(self) -> Any: ...

    def __len__(self) -> int: ...

    def key(self, index: int) -> str:
        """The name of a sample, for messages."""

    def damaged(self, index: int, reason: str) -> DamagedSample:
        """The error that says what is wrong with a sample."""

    def read(self, index: int) -> np.ndarray:
        """The encoded image, (bytes,) uint8; threads may call this at the same time.

        Raises:
            DamagedSample: it cannot be read.
        """

    def will_need(self, runs: list[tuple[int, int]]) -> None:
        """Tell the file system which (first sample, samples) will be read soon."""


class Plan(Protocol):
    """What the loader needs to know of the batches of one rank.

    Attributes:
        shards: the split they are read from.
        image_size: side of the output in pixels.
        batch_size: B, images of one batch.
    """

    shards: Samples
    image_size: int
    batch_size: int

    @property
    def rand_augment_ops(self) -> int:
        """RandAugment operations per image; 0 leaves RandAugment out of the graph."""
        return 0

    @property
    def substitutes_count(self) -> bool:
        """Whether the neighbour that replaces a bad sample is used like any other; if not, it only fills the batch."""

    def request(self, i: int, replacement: dict[int, int] | None = None) -> BatchRequest:
        """Batch ``i``.

        Args:
            i: its number.
            replacement: bad sample -> the one to take instead.
        """

    def coming_blocks(self, i: int) -> list[tuple[int, int]]:
        """The (first sample, samples) that are read soon after batch ``i``, where the file system cannot foresee them."""
        return []


@dataclass(frozen=True, kw_only=True)
class TrainPlan(Plan):
    """Batches of one process of a training run.

    Args:
        shards: the training split.
        seed: the run's seed.
        image_size: side of the output in pixels.
        global_batch_size: images per optimizer step over all processes.
        batch_size: of a micro-batch: images per forward pass of one process.
        rank, world_size: this process among all.
        data: order, crop and flip.
        augment: everything that follows.
    """

    shards: Samples
    seed: int
    image_size: int
    global_batch_size: int
    batch_size: int
    rank: int
    world_size: int
    data: DataConfig
    augment: AugmentConfig

    substitutes_count = True

    @property
    def rand_augment_ops(self) -> int:
        return self.augment.rand_augment_ops

    @property
    def epoch_length(self) -> int:
        """Images that an epoch shows; see :func:`epoch_length`."""
        return epoch_length(len(self.shards), self.augment.repeats)

    @property
    def batches_per_step(self) -> int:
        """Micro-batches of this process in one optimizer step."""
        return self.global_batch_size // (self.batch_size * self.world_size)

    def request(self, i: int, replacement: dict[int, int] | None = None) -> BatchRequest:
        """The i-th micro-batch of this process since the beginning of the run.

        Args:
            i: its number.
            replacement: bad sample -> the one to take instead. The draws stay those of the place.
        """
        stream = self._first(i) + np.arange(self.batch_size, dtype=np.int64)
        epoch, position = np.divmod(stream, self.epoch_length)
        index = self._sample_at(position, epoch)
        if replacement:
            index = np.array([replacement.get(sample, sample) for sample in index.tolist()])
        samples = self.shards.samples[index]

        def draw(use: Stream, count: int) -> np.ndarray:
            return uniforms(use, self.seed, epoch, position, count)  # (B, count)

        data, chosen = self.data, self.augment
        geometry = train_geometry(
            samples["height"],
            samples["width"],
            draw(Stream.CROP_AND_FLIP, crop.UNIFORMS_PER_SAMPLE),
            self.image_size,
            data.crop_scale,
            data.crop_ratio,
            data.flip,
        )
        ops = boxes = None
        if chosen.rand_augment_ops:
            settings = randaugment.RandAugment(chosen.rand_augment_ops, chosen.rand_augment_magnitude, chosen.rand_augment_std)
            numbers = draw(Stream.RAND_AUGMENT, settings.layers * randaugment.UNIFORMS_PER_LAYER)
            ops = randaugment.draw_ops(numbers, settings, self.image_size)
        if chosen.erasing:
            numbers = draw(Stream.ERASING, erasing.UNIFORMS_PER_SAMPLE)
            boxes = erasing.draw_erasing(numbers, self.image_size, chosen.erasing)
        valid = np.ones(len(index), dtype=bool)
        label = samples["label"].astype(np.int64)
        return BatchRequest(index, label, epoch, position, valid, geometry, ops, boxes, self._mixing(stream))

    def coming_blocks(self, i: int) -> list[tuple[int, int]]:
        """Block order: when batch i enters a window, the (first sample, samples) of what the next window will read."""
        if self.data.order != "block":
            return []
        blocks, size = Blocks(self.data.block_size, self.data.window_blocks), len(self.shards)
        windows = count_windows(size, blocks)

        def where(batch: int) -> tuple[int, int]:  # (epoch, window) of its first sample
            epoch, position = divmod(self._first(batch), self.epoch_length)
            return epoch, min(position // self.augment.repeats // blocks.window_samples, windows - 1)

        epoch, window = where(i)
        if i > 0 and where(i - 1) == (epoch, window):
            return []
        last_place = (self.epoch_length - 1) // self.augment.repeats  # repeated augmentation ends its epochs early
        if window == min(last_place // blocks.window_samples, windows - 1):
            epoch, window = epoch + 1, -1
        return blocks_of_window(window + 1, epoch, size, self.seed, blocks)

    def _first(self, i: int) -> int:
        """Place in the stream of the i-th micro-batch's first sample."""
        step, part = divmod(i, self.batches_per_step)
        return step * self.global_batch_size + (part * self.world_size + self.rank) * self.batch_size

    def _sample_at(self, position: np.ndarray, epoch: np.ndarray) -> np.ndarray:
        place = position // self.augment.repeats
        if self.data.order == "full":
            return sample_at(place, epoch, len(self.shards), self.seed)
        blocks = Blocks(self.data.block_size, self.data.window_blocks)
        return block_sample_at(place, epoch, len(self.shards), self.seed, blocks)

    def _mixing(self, stream: np.ndarray) -> mixing.Mixing | None:
        chosen = self.augment
        if not chosen.mixes:
            return None
        group = stream[:: chosen.mix_group] // chosen.mix_group  # its number in the run
        draws = uniforms(Stream.MIXING, self.seed, np.zeros_like(group), group, mixing.UNIFORMS_PER_GROUP)
        return mixing.draw_mixing(
            draws, chosen.mix_group, self.image_size, chosen.mixup, chosen.cutmix, chosen.mix_switch, chosen.repeats
        )


def epoch_length(images: int, repeats: int) -> int:
    """Images that an epoch shows.

    Without repeated augmentation every image once. With it (Hoffer et al., CVPR 2020; DeiT's ``RASampler``) the first
    ``length / repeats`` images of the epoch's order, each ``repeats`` times in a row, the length being that of the set
    rounded down to a multiple of 256.
    """
    return images if repeats == 1 else images // _EPOCH_UNIT * _EPOCH_UNIT or images


@dataclass(frozen=True, kw_only=True)
class EvalPlan(Plan):
    """Batches of one process that together with the others' hold every image exactly once.

    All processes run the same number of batches of the same size (ZeRO-3 needs that); what is missing at the end is
    filled up with the last image and marked as not valid.

    Args:
        shards: the split to evaluate on: of a shard set, or a folder of images.
        image_size: side of the output in pixels.
        batch_size: images per forward pass of one process.
        rank, world_size: this process among all.
        eval_crop: see :func:`eval_geometry`.
    """

    shards: Samples
    image_size: int
    batch_size: int
    rank: int
    world_size: int
    eval_crop: float

    substitutes_count = False

    def __len__(self) -> int:
        """Batches of each process."""
        return -(-len(self.shards) // (self.batch_size * self.world_size))

    def request(self, i: int, replacement: dict[int, int] | None = None) -> BatchRequest:
        """Batch ``i % len(self)``: one pass follows the other. A bad sample's place is filled and marked as not valid."""
        first = (i % len(self) * self.world_size + self.rank) * self.batch_size
        position = np.arange(first, first + self.batch_size, dtype=np.int64)
        valid = position < len(self.shards)
        index = np.minimum(position, len(self.shards) - 1)
        if replacement:
            valid &= ~np.isin(index, list(replacement))
            index = np.array([replacement.get(sample, sample) for sample in index.tolist()])
        samples = self.shards.samples[index]
        geometry = eval_geometry(samples["height"], samples["width"], self.image_size, self.eval_crop)
        return BatchRequest(index, samples["label"].astype(np.int64), np.zeros_like(index), position, valid, geometry)
