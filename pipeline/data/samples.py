"""What the plan and the reader need to know of a split."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Protocol

import numpy as np

from pipeline.data.shards import DamagedSample


class Samples(Protocol):
    """One split: a :class:`~pipeline.data.shards.ShardSet` or an :class:`~pipeline.data.image_folder.ImageFolder`.

    Attributes:
        folder: its folder.
        samples: ``samples[indices]`` gives (B,) of ``SAMPLE_DTYPE`` for B sample numbers.
        classes: class names in index order.
    """

    folder: Path
    classes: list[str]

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
