"""Which samples a process reads in its i-th batch, and how they are augmented: arithmetic, no state.

The training stream is endless: epochs follow each other without a gap, each a new permutation of the whole set.
Number the stream's images 0, 1, 2, ...: image s belongs to epoch s // n at position s % n. Optimizer step t takes
images [t * global_batch, (t + 1) * global_batch); a process takes its slice of them. So every image is seen once
per epoch whatever the batch size, nothing is dropped at an epoch's end, and the only state is the step.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from pipeline.data.augment import UNIFORMS_PER_SAMPLE, Geometry, eval_geometry, train_geometry
from pipeline.data.order import sample_at
from pipeline.data.shards import ShardSet
from pipeline.philox import Stream, uniforms


@dataclass(frozen=True)
class BatchRequest:
    """What one batch of one process consists of; all arrays have B entries."""

    index: np.ndarray  # (B,) int64: sample numbers of the shard set
    label: np.ndarray  # (B,) int64
    epoch: np.ndarray  # (B,) int64
    position: np.ndarray  # (B,) int64: place in the epoch
    valid: np.ndarray  # (B,) bool: False marks padding
    geometry: Geometry


@dataclass(frozen=True)
class TrainPlan:
    """Batches of one process of a training run.

    Args:
        shards: the training split.
        seed: the run's seed.
        image_size: side of the output in pixels.
        global_batch_size: images per optimizer step over all processes.
        micro_batch_size: images per forward pass of one process.
        rank, world_size: this process among all.
        crop_scale, crop_ratio, flip: see :func:`train_geometry`.
    """

    shards: ShardSet
    seed: int
    image_size: int
    global_batch_size: int
    micro_batch_size: int
    rank: int
    world_size: int
    crop_scale: tuple[float, float]
    crop_ratio: tuple[float, float]
    flip: float

    @property
    def batch_size(self) -> int:
        return self.micro_batch_size

    @property
    def batches_per_step(self) -> int:
        """Micro-batches of this process in one optimizer step."""
        return self.global_batch_size // (self.micro_batch_size * self.world_size)

    def request(self, i: int) -> BatchRequest:
        """The i-th micro-batch of this process since the beginning of the run."""
        step, part = divmod(i, self.batches_per_step)
        first = step * self.global_batch_size + (part * self.world_size + self.rank) * self.micro_batch_size
        epoch, position = np.divmod(np.arange(first, first + self.micro_batch_size, dtype=np.int64), len(self.shards))
        index = sample_at(position, epoch, len(self.shards), self.seed)
        samples = self.shards.samples[index]
        draws = uniforms(Stream.CROP_AND_FLIP, self.seed, epoch, position, UNIFORMS_PER_SAMPLE)
        geometry = train_geometry(
            samples["height"], samples["width"], draws, self.image_size, self.crop_scale, self.crop_ratio, self.flip
        )
        valid = np.ones(len(index), dtype=bool)
        return BatchRequest(index, samples["label"].astype(np.int64), epoch, position, valid, geometry)


@dataclass(frozen=True)
class EvalPlan:
    """Batches of one process that together with the others' hold every image exactly once.

    All processes run the same number of batches of the same size (ZeRO-3 needs that); what is missing at the end is
    filled up with the last image and marked as not valid.

    Args:
        shards: the split to evaluate on.
        image_size: side of the output in pixels.
        batch_size: images per forward pass of one process.
        rank, world_size: this process among all.
        eval_crop: see :func:`eval_geometry`.
    """

    shards: ShardSet
    image_size: int
    batch_size: int
    rank: int
    world_size: int
    eval_crop: float

    def __len__(self) -> int:
        """Batches of each process."""
        return -(-len(self.shards) // (self.batch_size * self.world_size))

    def request(self, i: int) -> BatchRequest:
        """Batch ``i % len(self)``: one pass follows the other."""
        first = (i % len(self) * self.world_size + self.rank) * self.batch_size
        position = np.arange(first, first + self.batch_size, dtype=np.int64)
        valid = position < len(self.shards)
        index = np.minimum(position, len(self.shards) - 1)
        samples = self.shards.samples[index]
        geometry = eval_geometry(samples["height"], samples["width"], self.image_size, self.eval_crop)
        return BatchRequest(index, samples["label"].astype(np.int64), np.zeros_like(index), position, valid, geometry)
