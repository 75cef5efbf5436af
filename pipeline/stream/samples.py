"""Describe what the stream knows of a split, and order the samples of a training run on several sets of images.

A set of n images with weight w shows m = w n images in an epoch of the run. Its own order goes on where the epoch before has stopped:
with weight 0.5 an image comes in every other epoch, with weight 2 twice in each, and none comes again before all others of its set
have come. The epoch is the sets' parts, shuffled together. As for one set (:mod:`pipeline.stream.order`), all of this is computed from
the position and nothing is stored.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from pipeline.stream.order import Blocks, block_sample_at, blocks_of_window, count_windows, sample_at
from pipeline.stream.philox import Stream, random_words


@dataclass(frozen=True)
class Mixture:
    """Sets of images and their weights; samples are numbered through all sets, one set after another."""

    sizes: tuple[int, ...]  # images of each set
    weights: tuple[float, ...]  # how often each image of a set is shown in an epoch, on average

    @cached_property
    def shown(self) -> np.ndarray:
        """(sets,) int64: images of each set in an epoch, at least one."""
        return np.array([max(1, round(weight * size)) for weight, size in zip(self.weights, self.sizes)], dtype=np.int64)

    @cached_property
    def images(self) -> int:
        return int(self.shown.sum())

    @property
    def shares(self) -> list[float]:
        """Each set's fraction of an epoch."""
        return (self.shown / self.images).tolist()

    @cached_property
    def first_sample(self) -> np.ndarray:
        """(sets + 1,) int64: number of each set's first sample, and of all samples."""
        return np.concatenate([[0], np.cumsum(self.sizes)]).astype(np.int64)

    def sample_at(self, position: np.ndarray, epoch: np.ndarray, seed: int, blocks: Blocks | None = None) -> np.ndarray:
        """The sample, (n,) int64, at each position of an epoch, (n,) integers in [0, images); ``blocks``: within each set."""
        position = np.asarray(position, dtype=np.int64)
        epoch = np.broadcast_to(np.asarray(epoch, dtype=np.int64), position.shape)
        part = self._part_of(position, blocks)
        sample = np.empty_like(position)
        for number in np.unique(part).tolist():  # one or two in a batch
            members = np.flatnonzero(part == number)
            begin, end = self._bounds(number, blocks), self._bounds(number + 1, blocks)  # (sets,)
            place = position[members] - begin.sum()
            keys = epoch[members], int((end - begin).sum()), seed, Stream.MIX_ORDER, number
            ends = np.cumsum(end - begin)
            shuffled = sample_at(place, *keys)
            owner = np.searchsorted(ends, shuffled, side="right")  # the set
            shown = begin[owner] + shuffled - (ends - (end - begin))[owner]  # its number among the set's images of this epoch
            for which in np.unique(owner).tolist():
                own = owner == which
                sample[members[own]] = self._of_set(which, shown[own], epoch[members[own]], seed, blocks)
        return sample

    def coming_runs(
        self, before: tuple[int, int] | None, now: tuple[int, int], seed: int, blocks: Blocks
    ) -> list[tuple[int, int]]:
        """The runs of adjacent samples that come up in block order while a run moves from one (epoch, position) to another.

        These are (first sample, number of samples) of the windows after the ones that are being read, which have not been returned
        before; ``before`` is None when the run begins.
        """
        runs = []
        for which, size in enumerate(self.sizes):
            windows = count_windows(size, blocks)
            first = self._window(which, *before, blocks) + 2 if before else 1
            for number in range(first, self._window(which, *now, blocks) + 2):
                in_set = blocks_of_window(number % windows, number // windows, size, self.seed_of(which, seed), blocks)
                runs += [(int(self.first_sample[which]) + start, count) for start, count in in_set]
        return runs

    def _parts(self, blocks: Blocks | None) -> int:
        """Parts of an epoch that are shuffled by themselves: one, or in block order about a window's length each."""
        return max(1, self.images // blocks.window_samples) if blocks else 1

    def _bounds(self, part: int, blocks: Blocks | None) -> np.ndarray:
        """(sets,) int64: images of each set that come before a part."""
        parts = self._parts(blocks)
        return np.array([int(shown) * part // parts for shown in self.shown], dtype=np.int64)  # Python's integers: no overflow

    def _part_of(self, position: np.ndarray, blocks: Blocks | None) -> np.ndarray:
        """(n,) int64: the part in which each position lies. Parts differ in length by less than the number of sets."""
        parts = self._parts(blocks)
        if parts == 1:
            return np.zeros(len(position), dtype=np.int64)
        part = np.array([int(place) * parts // self.images for place in position], dtype=np.int64)  # this one or a later one
        while True:
            ends = {number: int(self._bounds(number + 1, blocks).sum()) for number in np.unique(part).tolist()}
            late = position >= np.array([ends[number] for number in part.tolist()], dtype=np.int64)
            if not late.any():
                return part
            part[late] += 1

    def _of_set(self, which: int, shown: np.ndarray, epoch: np.ndarray, seed: int, blocks: Blocks | None) -> np.ndarray:
        """The sample that is the ``shown``-th of a set in an epoch of the run: (n,) int64."""
        size = self.sizes[which]
        own_epoch, place = np.divmod(epoch * self.shown[which] + shown, size)  # of the set's own order
        keys = own_epoch, size, self.seed_of(which, seed)
        own = block_sample_at(place, *keys, blocks) if blocks else sample_at(place, *keys)
        return self.first_sample[which] + own

    def _window(self, which: int, epoch: int, position: int, blocks: Blocks) -> int:
        """Number in the run of the last window of a set that the part of a position reads."""
        part = int(self._part_of(np.array([position]), blocks)[0])
        last = epoch * int(self.shown[which]) + max(int(self._bounds(part + 1, blocks)[which]) - 1, 0)
        own_epoch, place = divmod(last, self.sizes[which])
        windows = count_windows(self.sizes[which], blocks)
        return own_epoch * windows + min(place // blocks.window_samples, windows - 1)

    @staticmethod
    def seed_of(which: int, seed: int) -> int:
        """The seed of a set's own order: sets of one size would otherwise be shuffled alike."""
        if which == 0:
            return seed
        low, high = random_words(Stream.MIX_ORDER, seed, np.array([which]), np.array([1 << 63], dtype=np.uint64), 2)[0].tolist()
        return low | high << 32


class DamagedSample(Exception):
    """A sample that cannot be read or decoded; the message names the file, the key and the problem."""

    def __init__(self, index: int, message: str) -> None:
        super().__init__(message)
        self.index = index


class Samples(ABC):
    """One split of a data set, whose samples have numbers. Reading is thread-safe."""

    folder: Any  # Place
    classes: list[str]  # names in index order, which identify the classes
    class_names: list[str]  # what to call them; the same where the set has no other names
    samples: Any  # samples[indices] gives (B,) of SAMPLE_DTYPE for B sample numbers
    mixture: Mixture | None = None  # how several sets are interleaved; None: one set

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def key(self, index: int) -> str:
        """The name of a sample, for messages."""

    @abstractmethod
    def damaged(self, index: int, reason: str) -> DamagedSample:
        """An error about a sample, to be raised by the caller."""

    @abstractmethod
    def read_batch(self, indices: list[int]) -> list[np.ndarray | DamagedSample]:
        """The encoded images, (bytes,) uint8 each; instead of one that cannot be read, the error. Raises UserError: none of the
        samples can be read any more."""

    def read(self, index: int) -> np.ndarray:
        """The encoded image of one sample, (bytes,) uint8. Raises DamagedSample, or as :meth:`read_batch`."""
        (image,) = self.read_batch([index])
        if isinstance(image, DamagedSample):
            raise image
        return image

    def will_need(self, runs: list[tuple[int, int]]) -> None:  # noqa: B027 (most need no announcement)
        """Announce runs of adjacent samples, (first, number) each, that will be read soon. Returns immediately."""


def images_per_epoch(shards: Samples) -> int:
    """Images of an epoch without repeated augmentation: all of a set, or those that a mixture shows."""
    return shards.mixture.images if shards.mixture else len(shards)
