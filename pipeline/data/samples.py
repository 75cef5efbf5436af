"""What the plan and the reader need to know of a split."""

from __future__ import annotations

from typing import Any, Protocol, runtime_checkable

import numpy as np

from pipeline.data.mixture import Mixture
from pipeline.data.shards import DamagedSample


class Samples(Protocol):
    """One split: a :class:`~pipeline.data.shards.ShardSet`, an :class:`~pipeline.data.image_folder.ImageFolder`, or several shard
    sets as a :class:`~pipeline.data.mixed_set.MixedSet`.

    Attributes:
        folder: its folder, a path or a URL.
        samples: ``samples[indices]`` gives (B,) of ``SAMPLE_DTYPE`` for B sample numbers.
        classes: class names in index order.
        mixture: how several sets are interleaved; None: one set.
    """

    folder: Any  # Place
    classes: list[str]

    @property
    def mixture(self) -> Mixture | None:
        return None

    @property
    def samples(self) -> Any: ...

    def __len__(self) -> int: ...

    def key(self, index: int) -> str:
        """The name of a sample, for messages."""

    def damaged(self, index: int, reason: str) -> DamagedSample:
        """An error about a sample, to be raised by the caller."""

    def read(self, index: int) -> np.ndarray:
        """The encoded image, (bytes,) uint8. Thread-safe.

        Raises:
            DamagedSample: it cannot be read.
        """

    def will_need(self, runs: list[tuple[int, int]]) -> None:
        """Announce runs, (first sample, number of samples) each, that will be read soon."""


def images_per_epoch(shards: Samples) -> int:
    """Images of an epoch without repeated augmentation: all of a set, or those that a mixture shows."""
    return shards.mixture.images if shards.mixture else len(shards)


@runtime_checkable
class SampleBatches(Protocol):
    """:class:`Samples` that are read faster many at a time, because each has to be waited for."""

    def read_batch(self, indices: list[int]) -> list[np.ndarray | DamagedSample]:
        """For each sample what :meth:`Samples.read` returns, or the error that it raises."""


def read_batch(samples: Samples, indices: list[int]) -> list[np.ndarray | DamagedSample]:
    """Encoded images, (bytes,) uint8 each; in place of one that cannot be read, the error."""
    if isinstance(samples, SampleBatches):
        return samples.read_batch(indices)
    images: list[np.ndarray | DamagedSample] = []
    for index in indices:
        try:
            images.append(samples.read(index))
        except DamagedSample as damage:
            images.append(damage)
    return images
