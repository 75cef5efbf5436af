"""Base of samples that are no shards: images are checked, and where necessary re-encoded, as when shards are written.

This happens when a batch asks for an image, so that nothing is read twice and each rank reads its own images only.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod

import numpy as np

from pipeline.data.image_checks import StoredImage
from pipeline.data.manifest import SAMPLE_DTYPE
from pipeline.data.shards import DamagedSample


class CheckedImages(ABC):
    """The part of :class:`~pipeline.data.samples.Samples` that reads. A subclass finds an image and its label."""

    mixture: None = None  # one set: see pipeline.data.samples

    def __init__(self) -> None:
        self._coming: dict[int, StoredImage | DamagedSample] = {}  # checked by __getitem__, not yet read
        self._lock = threading.Lock()

    @property
    def samples(self) -> CheckedImages:
        """``samples[indices]`` is :meth:`__getitem__`."""
        return self

    @abstractmethod
    def look(self, index: int) -> StoredImage | DamagedSample:
        """The image as a shard would have it, or why it cannot be used. Thread-safe."""

    @abstractmethod
    def label(self, index: int) -> int:
        """The index of its class."""

    def __getitem__(self, indices: np.ndarray) -> np.ndarray:
        """(B,) of ``SAMPLE_DTYPE``. An unusable image is listed as 1 x 1 pixel; :meth:`read` raises the reason."""
        rows = np.zeros(len(indices), dtype=SAMPLE_DTYPE)
        for row, index in zip(rows, indices.tolist()):
            image = self.look(index)
            with self._lock:
                self._coming[index] = image
            width, height = (image.width, image.height) if isinstance(image, StoredImage) else (1, 1)
            row["label"], row["width"], row["height"] = self.label(index), width, height
        return rows

    def read(self, index: int) -> np.ndarray:
        """The encoded image as it would be stored in a shard. Thread-safe.

        Returns:
            (bytes,) uint8.

        Raises:
            DamagedSample: it cannot be read or decoded.
        """
        with self._lock:
            image = self._coming.pop(index, None)
        image = image or self.look(index)
        if isinstance(image, DamagedSample):
            raise image
        return np.frombuffer(image.data, dtype=np.uint8)

    def will_need(self, runs: list[tuple[int, int]]) -> None:  # noqa: B027 (a subclass need not)
        """Does nothing: the images are read in their order, which the kernel's readahead detects."""
