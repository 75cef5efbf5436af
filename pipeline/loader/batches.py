"""Compute the samples and augmentation of every batch of every rank, as a pure function of its number.

A training run is one infinite stream of samples, epoch after epoch without gaps. Step ``s`` takes samples
``s * global_batch_size`` to ``(s + 1) * global_batch_size`` of the stream. They are the slots of its global batch, in the stream's
order or, under repeated augmentation, as :class:`~pipeline.stream.order.Placing` spreads the views of an image. Micro-batch by micro-batch, and
within a micro-batch rank by rank, the slots are given out. Neither a slot's sample nor any random number of it depends on the world
size. The length of an epoch need not be a multiple of the batch size: a step may span two epochs.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass, field, replace
from functools import cached_property
from threading import Lock
from typing import ClassVar

import numpy as np
from typing_extensions import Self

from pipeline.augment import Augmentation, BatchRequest, Places, active, crop
from pipeline.augment.crop import Geometry, eval_geometry, padded_geometry, train_geometry
from pipeline.config import AugmentConfig, Config, DataConfig
from pipeline.stream.order import Blocks, Placing, block_sample_at, blocks_of_window, count_windows, epoch_length, sample_at
from pipeline.stream.philox import Stream
from pipeline.stream.samples import Samples, images_per_epoch

_ORDERED = 2048  # images whose order is computed at a time
_ordering = Lock()


@dataclass(frozen=True, kw_only=True)
class Batches(ABC):
    shards: Samples
    image_size: int  # side of the output in pixels
    batch_size: int  # B, images per batch: per forward pass and rank
    rank: int = 0
    world_size: int = 1

    substitutes_count: ClassVar[bool] = False  # whether a bad sample's substitute counts as a sample, or only fills the batch

    @property
    def pad_mode(self) -> str | None:
        """``Geometry.pad_mode`` of the requests."""
        return None

    @property
    def chosen_filters(self) -> bool:
        """Whether the requests say which filters are bilinear."""
        return False

    @property
    def augmentations(self) -> tuple[Augmentation, ...]:
        """What the requests have draws of, in order of application."""
        return ()

    @abstractmethod
    def request(self, i: int, replacement: dict[int, int] | None = None) -> BatchRequest:
        """Batch ``i``, with the substitutes for bad samples."""

    def coming_blocks(self, i: int) -> list[tuple[int, int]]:
        """Runs, (first sample, number of samples) each, to be announced to the file system at batch ``i``."""
        return []


@dataclass(frozen=True, kw_only=True)
class TrainBatches(Batches):
    """The micro-batches of one rank of a training run."""

    seed: int
    global_batch_size: int  # images per optimizer step over all ranks
    data: DataConfig  # order, crop and flip
    augment: AugmentConfig  # augmentation after the crop
    # Parts of the run, even and odd, with what :meth:`_placed` gives for their batches.
    _ordered: dict[int, tuple[int, list]] = field(default_factory=dict, init=False, repr=False, compare=False)

    substitutes_count: ClassVar[bool] = True

    @classmethod
    def of_run(cls, shards: Samples, config: Config, rank: int = 0, world_size: int = 1) -> Self:
        return cls(
            shards=shards,
            seed=config.seed,
            image_size=config.model.image_size,
            global_batch_size=config.train.global_batch_size,
            batch_size=config.train.micro_batch,
            rank=rank,
            world_size=world_size,
            data=config.data,
            augment=config.augment,
        )

    @classmethod
    def for_one_process(cls, shards: Samples, config: Config, batch_size: int) -> Self:
        """The batches of a run in one process, without accumulation."""
        return replace(cls.of_run(shards, config), global_batch_size=batch_size, batch_size=batch_size)

    @cached_property
    def augmentations(self) -> tuple[Augmentation, ...]:
        return active(self.augment, self.data, self.image_size)

    @property
    def pad_mode(self) -> str | None:
        return crop.PAD_MODES.get(self.data.train_crop)

    @property
    def chosen_filters(self) -> bool:
        return crop.BILINEAR_SHARE[self.data.train_interpolation] > 0

    @property
    def epoch_length(self) -> int:
        return epoch_length(images_per_epoch(self.shards), self.augment.repeats)

    @property
    def batches_per_step(self) -> int:
        """Micro-batches of this rank per optimizer step."""
        return self.global_batch_size // (self.batch_size * self.world_size)

    def side(self, i: int) -> int:
        """Side of the images of batch i by ``data.size_schedule``, if ``image_size`` is the model's: that of the epoch in which its step begins."""
        first = i // self.batches_per_step * self.global_batch_size
        return self.data.side_at(first // self.epoch_length, self.image_size)

    def request(self, i: int, replacement: dict[int, int] | None = None) -> BatchRequest:
        """The i-th micro-batch of this rank, counted from the start of the run. Substitutes get the random numbers of the bad samples."""
        places, valid, index = self._placed(i)
        if replacement:
            index = np.array([replacement.get(sample, sample) for sample in index.tolist()])
        samples = self.shards.samples[index]
        count = 1 + sum(augmentation.filters for augmentation in self.augmentations)
        share = crop.BILINEAR_SHARE[self.data.train_interpolation]
        bilinear = places.uniforms(Stream.INTERPOLATION, count) < share if self.chosen_filters else None
        draws = {augmentation: augmentation.draw(places) for augmentation in self.augmentations}
        geometry, label = self._geometry(samples, places), samples["label"].astype(np.int64)
        return BatchRequest(index, label, places.epoch, places.position, valid, geometry, bilinear, draws)

    def coming_blocks(self, i: int) -> list[tuple[int, int]]:
        """In block order, when batch i is the first to reach into a window: the runs that the next window reads."""
        blocks, size = self._blocks, len(self.shards)
        if blocks is None:
            return []
        last_place = (self.epoch_length - 1) // self.augment.repeats  # an epoch with repeats does not reach every sample
        windows = min(last_place // blocks.window_samples, count_windows(size, blocks) - 1) + 1  # that an epoch reaches

        before, now = self._reached(i - 1), self._reached(i)
        assert now is not None
        if self.shards.mixture:
            return self.shards.mixture.coming_runs(before, now, self.seed, blocks)

        def window(place: tuple[int, int]) -> int:  # its number in the run
            return place[0] * windows + min(place[1] // blocks.window_samples, windows - 1)

        coming = range(window(before) + 2 if before else 1, window(now) + 2)
        return [run for n in coming for run in blocks_of_window(n % windows, n // windows, size, self.seed, blocks)]

    @property
    def _placing(self) -> Placing:
        return Placing(self.global_batch_size, self.augment.repeats, self.epoch_length, self.augment.unit)

    @property
    def _blocks(self) -> Blocks | None:
        return Blocks(self.data.block_size, self.data.window_blocks) if self.data.order == "block" else None

    def _reached(self, i: int) -> tuple[int, int] | None:
        """Epoch and place of the last image that batch i, or its step, reads; None before the first batch."""
        if i < 0:
            return None
        step, slot = self._slots(i)
        last = self.global_batch_size - 1 if self._placing.spreads else int(slot[-1])
        epoch, position = divmod(step * self.global_batch_size + last, self.epoch_length)
        return epoch, position // self.augment.repeats

    def _places(self, i: int) -> tuple[Places, np.ndarray]:
        """The places of the images of batch i, and which of them count: (B,) bool."""
        step, slot = self._slots(i)
        epoch, position = np.divmod(self._placing.positions(step, slot), self.epoch_length)
        number = step * self.global_batch_size + slot
        return Places(self.seed, epoch, position, number, self._placing.mixing_distance), np.ones(len(slot), dtype=bool)

    def _geometry(self, samples: np.ndarray, places: Places) -> Geometry:
        """Crop and flip of images with (B,) rows of the sample table."""
        data, sides = self.data, (samples["height"], samples["width"])
        numbers = places.uniforms(Stream.CROP_AND_FLIP, crop.UNIFORMS_PER_SAMPLE)
        if self.pad_mode:
            return padded_geometry(*sides, numbers, self.image_size, data.flip, self.pad_mode)
        return train_geometry(*sides, numbers, self.image_size, data.crop_scale, data.crop_ratio, data.flip)

    def _slots(self, i: int) -> tuple[int, np.ndarray]:
        """Step of the i-th micro-batch, and its slots in the step's global batch: (B,) int64."""
        step, part = divmod(i, self.batches_per_step)
        return step, (part * self.world_size + self.rank) * self.batch_size + np.arange(self.batch_size, dtype=np.int64)

    def _placed(self, i: int) -> tuple[Places, np.ndarray, np.ndarray]:
        """The places of the images of batch i, which of them count, (B,) bool, and their samples, (B,) int64."""
        # Thousands at a time take as long as a few: nearly all of it is spent on calls of NumPy. Two parts, as threads read ahead.
        at_once = max(1, _ORDERED // self.batch_size)
        part, row = divmod(i, at_once)
        with _ordering:
            known, batches = self._ordered.get(part % 2, (None, []))
            if known != part:
                placed = [self._places(k) for k in range(part * at_once, (part + 1) * at_once)]
                position, epoch = (np.concatenate(values) for values in zip(*((at.position, at.epoch) for at, _ in placed)))
                order = self._sample_at(position, epoch).reshape(at_once, -1)  # (batches, B)
                batches = [(*placing, index) for placing, index in zip(placed, order)]
                self._ordered[part % 2] = part, batches
        return batches[row]

    def _sample_at(self, position: np.ndarray, epoch: np.ndarray) -> np.ndarray:
        place = position // self.augment.repeats
        blocks = self._blocks
        if self.shards.mixture:
            return self.shards.mixture.sample_at(place, epoch, self.seed, blocks)
        keys = place, epoch, len(self.shards), self.seed
        return block_sample_at(*keys, blocks) if blocks else sample_at(*keys)


@dataclass(frozen=True, kw_only=True)
class EvalBatches(Batches):
    """The evaluation batches of one rank; those of all ranks together hold every image exactly once.

    All ranks run the same number of batches of the same size, as ZeRO-3's collectives require; the last ones are padded with
    the last image, marked as not valid.
    """

    eval_crop: float  # output size / short side, in (0, 1]

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
