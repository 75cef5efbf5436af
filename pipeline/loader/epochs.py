"""Compute the batches of a training loop that counts in epochs: each epoch begins with a batch of its own and may end with a shorter one.

They read the same stream as a run (:mod:`pipeline.loader.batches`): the sample at each position of an epoch and all that is drawn for it
are the same. What differs is where batches begin and end, and that mixing groups begin anew with each epoch.
"""

from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from pipeline.augment import Places
from pipeline.augment.crop import Geometry, eval_geometry
from pipeline.errors import UserError
from pipeline.loader.batches import TrainBatches
from pipeline.stream.order import Blocks, Weights
from pipeline.stream.samples import Samples


@dataclass(frozen=True, kw_only=True)
class EpochBatches(TrainBatches):
    """The batches of one rank from a position on, epoch by epoch. All ranks have the same number of them.

    The images that are left for an epoch's last step are divided evenly over the ranks, the rest of each batch is marked as not valid.
    If they are fewer than the ranks, the step before gives some up. Only where it has none to give, because batches hold a single
    image or a resumed epoch ends here, do the last ranks have a batch without valid images.
    """

    epoch: int = 0  # at which batch 0 begins
    begin: int = 0  # position in this epoch
    drop_last: bool = False  # leave out the last step of an epoch if it is incomplete
    shuffle: bool = True  # False: samples in the set's own order
    centred: bool = False  # True: the centre crop of an evaluation; for data of the default crop and filter
    weights: Weights | None = None  # None: each sample once

    def steps(self, begin: int) -> list[int]:
        """Images of each step of an epoch from a position on."""
        size, left = self.global_batch_size, self.epoch_length - begin
        whole, rest = divmod(left, size)
        least = self.world_size * self.augment.unit  # so that every rank has images, and whole mixing groups
        if self.drop_last or not rest:
            return [size] * whole
        if rest < least and whole and size >= 2 * least:
            return [size] * (whole - 1) + [size - least, rest + least]
        return [size] * whole + [rest]

    def place(self, i: int) -> tuple[int, int, int]:
        """Epoch of batch i, the position in it at which its step begins, and the images of the step on all ranks."""
        epoch, begin, steps = self.epoch, self.begin, self.steps(self.begin)
        if i >= len(steps):
            whole = self.steps(0)
            after, i = divmod(i - len(steps), len(whole))
            epoch, begin, steps = epoch + 1 + after, 0, whole
        return epoch, begin + sum(steps[:i]), steps[i]

    def share(self, size: int) -> tuple[int, int]:
        """First slot of this rank's images in a step of ``size`` images, and the one after its last; whole mixing groups."""
        unit, ranks = self.augment.unit, self.world_size
        first, end = (-(-size // unit) * rank // ranks * unit for rank in (self.rank, self.rank + 1))
        return min(first, size), min(end, size)

    @property
    def _blocks(self) -> Blocks | None:
        return super()._blocks if self.shuffle else None

    def _reached(self, i: int) -> tuple[int, int] | None:
        if i >= 0:
            epoch, begin, size = self.place(i)
            last = begin + size - 1
        else:
            epoch, last = (self.epoch, self.begin - 1) if self.begin else (self.epoch - 1, self.epoch_length - 1)
        return None if epoch < 0 else (epoch, last // self.augment.repeats)

    def _places(self, i: int) -> tuple[Places, np.ndarray]:
        (epoch, begin, size), length, unit = self.place(i), self.epoch_length, self.augment.unit
        first, end = self.share(size)
        own = first + np.arange(self.batch_size, dtype=np.int64)  # (B,)
        slot = np.minimum(own, max(end - 1, 0))
        placing = replace(self._placing, global_batch_size=size, begin=epoch * length + begin)
        position = placing.positions(0, slot) - epoch * length
        number = epoch * (-(-length // unit) * unit) + begin + slot  # as in a run whose epochs are whole mixing groups
        return Places(self.seed, np.full_like(slot, epoch), position, number, placing.mixing_distance), own < end

    def _geometry(self, samples: np.ndarray, places: Places) -> Geometry:
        if self.centred:
            return eval_geometry(samples["height"], samples["width"], self.image_size, self.data.eval_crop)
        return super()._geometry(samples, places)

    def _sample_at(self, position: np.ndarray, epoch: np.ndarray) -> np.ndarray:
        place = position // self.augment.repeats
        if not self.shuffle:
            return place
        return self.weights.sample_at(place, epoch, self.seed) if self.weights else super()._sample_at(position, epoch)


def sample_weights(sampling: Any, shards: Samples, labels: np.ndarray | None) -> Weights:
    """The weight of each sample, as :class:`~pipeline.loader.image_loader.ImageLoader` takes them. Raises UserError: others."""
    if isinstance(sampling, str) and sampling == "balanced":
        classes = shards.samples[np.arange(len(shards))]["label"] if labels is None else labels
        if classes.ndim > 1 or classes.dtype.kind == "f":
            raise UserError("sampling='balanced' requires labels that are one integer for each sample", "pass weights instead")
        _, number, counts = np.unique(classes, return_inverse=True, return_counts=True)
        return Weights.of(1 / counts[number], np.argsort(classes, kind="stable"))
    weights = per_sample("sampling", sampling, len(shards), (1,)).astype(np.float64)
    if not np.isfinite(weights).all() or weights.min() < 0 or not weights.any():
        raise UserError("sampling must be weights of at least 0, not all 0, got others", "pass finite ones")
    return Weights.of(weights)


def per_sample(name: str, values: Any, samples: int, ndims: tuple[int, ...]) -> np.ndarray:
    """Numbers for all samples, (samples, ...) int64 or float32. Raises UserError: they are no such."""
    given = np.empty(0)
    with suppress(ValueError):  # lists of several lengths
        given = np.asarray(values)
    if given.ndim not in ndims or len(given) != samples or given.dtype.kind not in "biuf" or not given.size:
        problem = f"{name} must have numbers for each of {samples} samples, got {given.dtype} of shape {given.shape}"
        raise UserError(problem, "order them as the samples of the set")
    return given.astype(np.float32 if given.dtype.kind == "f" else np.int64)
