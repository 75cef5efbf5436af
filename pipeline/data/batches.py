"""The samples and augmentation of every batch of every rank, as a pure function of its number.

A training run is one infinite stream of samples, epoch after epoch without gaps. Step ``s`` takes samples
``s * global_batch_size`` to ``(s + 1) * global_batch_size`` of the stream. They are the slots of its global batch, in the stream's
order or, under repeated augmentation, as :mod:`pipeline.data.views` spreads the views of an image. Micro-batch by micro-batch, and
within a micro-batch rank by rank, the slots are given out. Neither a slot's sample nor any random number of it depends on the world
size. The length of an epoch need not be a multiple of the batch size: a step may span two epochs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np

from pipeline.config import AugmentConfig, Config, DataConfig
from pipeline.data.augment import crop, erasing, interpolation, mixing, randaugment, three_augment
from pipeline.data.augment.crop import Geometry, eval_geometry, simple_geometry, train_geometry
from pipeline.data.order import Blocks, block_sample_at, blocks_of_window, count_windows, sample_at
from pipeline.data.samples import Samples, images_per_epoch
from pipeline.data.views import Placing, epoch_length
from pipeline.philox import Stream, uniforms


@dataclass(frozen=True)
class BatchRequest:
    """Samples and augmentation of one batch of one rank."""

    index: np.ndarray  # (B,) int64: sample numbers of the shard set
    label: np.ndarray  # (B,) int64
    epoch: np.ndarray  # (B,) int64
    position: np.ndarray  # (B,) int64: position in the epoch
    valid: np.ndarray  # (B,) bool: False marks padding
    geometry: Geometry
    ops: randaugment.Ops | None = None  # here and below, None: not applied
    erasing: erasing.Erasing | None = None
    mixing: mixing.Mixing | None = None
    interpolation: interpolation.Interpolation | None = None  # None: bicubic
    blur: np.ndarray | None = (
        None  # (B,) float32, 3-Augment: standard deviation in pixels, 0: none; then ``ops`` are 3-Augment's
    )


class Batches(Protocol):
    """The batches of one rank, as the loader sees them.

    Attributes:
        shards: the split.
        image_size: side of the output in pixels.
        batch_size: B, images per batch.
    """

    shards: Samples
    image_size: int
    batch_size: int

    @property
    def rand_augment_ops(self) -> int:
        """RandAugment operations per image; 0: none."""
        return 0

    @property
    def three_augment(self) -> bool:
        """Whether the requests have 3-Augment or colour jitter."""
        return False

    @property
    def crop_pad(self) -> int:
        """``Geometry.pad`` of the requests, pixels."""
        return 0

    @property
    def bilinear_share(self) -> float:
        """Probability of bilinear interpolation in place of bicubic."""
        return 0.0

    @property
    def substitutes_count(self) -> bool:
        """Whether the substitute for a bad sample counts as a sample (training) or only fills the batch (evaluation)."""

    def request(self, i: int, replacement: dict[int, int] | None = None) -> BatchRequest:
        """Batch ``i``.

        Args:
            i: number of the batch.
            replacement: bad sample -> its substitute.
        """

    def coming_blocks(self, i: int) -> list[tuple[int, int]]:
        """Runs, (first sample, number of samples) each, to be announced to the file system at batch ``i``."""
        return []


@dataclass(frozen=True, kw_only=True)
class TrainBatches(Batches):
    """The micro-batches of one rank of a training run.

    Args:
        shards: the training split.
        seed: the run's seed.
        image_size: side of the output in pixels.
        global_batch_size: images per optimizer step over all ranks.
        batch_size: images per micro-batch: per forward pass and rank.
        rank, world_size: of this process.
        data: order, crop and flip.
        augment: augmentation after the crop.
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

    @classmethod
    def for_one_process(cls, shards: Samples, config: Config, batch_size: int) -> TrainBatches:
        """The batches of a run in one process, without accumulation."""
        size, data, augment = config.model.image_size, config.data, config.augment
        sizes = {"image_size": size, "global_batch_size": batch_size, "batch_size": batch_size}
        return cls(shards=shards, seed=config.seed, **sizes, rank=0, world_size=1, data=data, augment=augment)

    @property
    def rand_augment_ops(self) -> int:
        return self.augment.rand_augment_ops

    @property
    def three_augment(self) -> bool:
        return self.augment.three_augment or self.augment.color_jitter > 0

    @property
    def crop_pad(self) -> int:
        return crop.SIMPLE_CROP_PAD if self.data.train_crop == "simple" else 0

    @property
    def bilinear_share(self) -> float:
        return interpolation.BILINEAR_SHARE[self.data.train_interpolation]

    @property
    def epoch_length(self) -> int:
        """Images per epoch; see :func:`~pipeline.data.views.epoch_length`."""
        return epoch_length(images_per_epoch(self.shards), self.augment.repeats)

    @property
    def batches_per_step(self) -> int:
        """Micro-batches of this rank per optimizer step."""
        return self.global_batch_size // (self.batch_size * self.world_size)

    def request(self, i: int, replacement: dict[int, int] | None = None) -> BatchRequest:
        """The i-th micro-batch of this rank, counted from the start of the run.

        Args:
            i: number of the micro-batch.
            replacement: bad sample -> its substitute, which gets the random numbers of the original position.
        """
        epoch, position = np.divmod(self._placing.positions(*self._slots(i)), self.epoch_length)
        index = self._sample_at(position, epoch)
        if replacement:
            index = np.array([replacement.get(sample, sample) for sample in index.tolist()])
        samples = self.shards.samples[index]

        def draw(use: Stream, count: int) -> np.ndarray:
            return uniforms(use, self.seed, epoch, position, count)  # (B, count)

        data, chosen = self.data, self.augment
        sides, numbers = (samples["height"], samples["width"]), draw(Stream.CROP_AND_FLIP, crop.UNIFORMS_PER_SAMPLE)
        if data.train_crop == "simple":
            geometry = simple_geometry(*sides, numbers, self.image_size, data.flip)
        else:
            geometry = train_geometry(*sides, numbers, self.image_size, data.crop_scale, data.crop_ratio, data.flip)
        ops = boxes = filters = blur = None
        if self.bilinear_share:
            numbers = draw(Stream.INTERPOLATION, interpolation.uniforms_per_sample(self.rand_augment_ops))
            filters = interpolation.draw_interpolation(numbers, self.bilinear_share)
        if chosen.rand_augment_ops:
            settings = randaugment.RandAugment(chosen.rand_augment_ops, chosen.rand_augment_magnitude, chosen.rand_augment_std)
            numbers = draw(Stream.RAND_AUGMENT, settings.layers * randaugment.UNIFORMS_PER_LAYER)
            ops = randaugment.draw_ops(numbers, settings, self.image_size)
        if self.three_augment:
            numbers = draw(Stream.THREE_AUGMENT, three_augment.UNIFORMS_PER_SAMPLE)
            drawn = three_augment.draw_three_augment(numbers, chosen.three_augment, chosen.color_jitter)
            ops, blur = drawn.ops, drawn.blur
        if chosen.erasing:
            numbers = draw(Stream.ERASING, erasing.UNIFORMS_PER_SAMPLE)
            boxes = erasing.draw_erasing(numbers, self.image_size, chosen.erasing)
        valid = np.ones(len(index), dtype=bool)
        label = samples["label"].astype(np.int64)
        return BatchRequest(index, label, epoch, position, valid, geometry, ops, boxes, self._mixing(i), filters, blur)

    def coming_blocks(self, i: int) -> list[tuple[int, int]]:
        """In block order, when batch i is the first to reach into a window: the runs that the next window reads."""
        if self.data.order != "block":
            return []
        blocks, size = Blocks(self.data.block_size, self.data.window_blocks), len(self.shards)
        last_place = (self.epoch_length - 1) // self.augment.repeats  # an epoch with repeats does not reach every sample
        windows = min(last_place // blocks.window_samples, count_windows(size, blocks) - 1) + 1  # that an epoch reaches

        def reached(batch: int) -> tuple[int, int]:  # epoch and place of the last image that it, or its step, reads
            step, slot = self._slots(batch)
            last = self.global_batch_size - 1 if self._placing.spreads else int(slot[-1])
            epoch, position = divmod(step * self.global_batch_size + last, self.epoch_length)
            return epoch, position // self.augment.repeats

        if self.shards.mixture:
            before = reached(i - 1) if i else None
            return self.shards.mixture.coming_runs(before, reached(i), self.seed, blocks)

        def window(place: tuple[int, int]) -> int:  # its number in the run
            return place[0] * windows + min(place[1] // blocks.window_samples, windows - 1)

        coming = range(window(reached(i - 1)) + 2 if i else 1, window(reached(i)) + 2)
        return [
            run for number in coming for run in blocks_of_window(number % windows, number // windows, size, self.seed, blocks)
        ]

    @property
    def _placing(self) -> Placing:
        return Placing(self.global_batch_size, self.augment.repeats, self.epoch_length, self.augment.unit)

    def _slots(self, i: int) -> tuple[int, np.ndarray]:
        """Step of the i-th micro-batch, and its slots in the step's global batch: (B,) int64."""
        step, part = divmod(i, self.batches_per_step)
        return step, (part * self.world_size + self.rank) * self.batch_size + np.arange(self.batch_size, dtype=np.int64)

    def _sample_at(self, position: np.ndarray, epoch: np.ndarray) -> np.ndarray:
        place = position // self.augment.repeats
        blocks = Blocks(self.data.block_size, self.data.window_blocks) if self.data.order == "block" else None
        if self.shards.mixture:
            return self.shards.mixture.sample_at(place, epoch, self.seed, blocks)
        if blocks is None:
            return sample_at(place, epoch, len(self.shards), self.seed)
        return block_sample_at(place, epoch, len(self.shards), self.seed, blocks)

    def _mixing(self, i: int) -> mixing.Mixing | None:
        chosen = self.augment
        if not chosen.mixes:
            return None
        step, slot = self._slots(i)
        group = (step * self.global_batch_size + slot[:: chosen.mix_group]) // chosen.mix_group  # its number in the run
        draws = uniforms(Stream.MIXING, self.seed, np.zeros_like(group), group, mixing.UNIFORMS_PER_GROUP)
        sizes, apart = (chosen.mix_group, self.image_size), self._placing.mixing_distance
        return mixing.draw_mixing(draws, *sizes, chosen.mixup, chosen.cutmix, chosen.mix_switch, apart)


@dataclass(frozen=True, kw_only=True)
class EvalBatches(Batches):
    """The evaluation batches of one rank; those of all ranks together hold every image exactly once.

    All ranks run the same number of batches of the same size, as ZeRO-3's collectives require; the last ones are padded with
    the last image, marked as not valid.

    Args:
        shards: the split to evaluate on.
        image_size: side of the output in pixels.
        batch_size: images per forward pass and rank.
        rank, world_size: of this process.
        eval_crop: see :func:`~pipeline.data.augment.crop.eval_geometry`.
    """

    shards: Samples
    image_size: int
    batch_size: int
    rank: int
    world_size: int
    eval_crop: float

    substitutes_count = False

    def __len__(self) -> int:
        """Batches per rank."""
        return -(-len(self.shards) // (self.batch_size * self.world_size))

    def request(self, i: int, replacement: dict[int, int] | None = None) -> BatchRequest:
        """Batch ``i % len(self)``: passes repeat. Substitutes for bad samples are marked as not valid."""
        first = (i % len(self) * self.world_size + self.rank) * self.batch_size
        position = np.arange(first, first + self.batch_size, dtype=np.int64)
        valid = position < len(self.shards)
        index = np.minimum(position, len(self.shards) - 1)
        if replacement:
            asked_for, index = index, np.array([replacement.get(sample, sample) for sample in index.tolist()])
            valid &= index == asked_for
        samples = self.shards.samples[index]
        geometry = eval_geometry(samples["height"], samples["width"], self.image_size, self.eval_crop)
        return BatchRequest(index, samples["label"].astype(np.int64), np.zeros_like(index), position, valid, geometry)
