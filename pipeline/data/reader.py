"""Reads encoded images ahead of time in threads, substituting samples that cannot be read."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import count
from typing import Generic, TypeVar

import numpy as np

from pipeline.data.bad_samples import BadSamples
from pipeline.data.batches import Batches, BatchRequest
from pipeline.data.samples import read_batch
from pipeline.data.shards import DamagedSample
from pipeline.stores.store import StoreFails

_THREADS = 4  # I/O-bound: keeps a few requests to disk or network in flight without occupying cores

Result = TypeVar("Result")


class Ahead(Generic[Result]):
    """Computes ``make(number)`` for numbers in their order, ahead of time in threads, and returns the results in that order.

    An exception in ``make`` is raised by the :meth:`next` that would have returned its result.

    Args:
        make: computes a result; must be thread-safe if ``threads`` > 1.
        numbers: of the results; endless.
        depth: results to compute ahead.
        threads: results computed concurrently.
        name: prefix of the threads' names.
    """

    def __init__(self, make: Callable[[int], Result], numbers: Iterator[int], depth: int, threads: int, name: str) -> None:
        self._make, self._numbers = make, numbers
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix=name)
        self._waiting: deque[Future[Result]] = deque()
        self._depth = depth

    def next(self) -> Result:
        """The next result; blocks until it is ready."""
        while len(self._waiting) <= self._depth:  # depth + 1, because one is returned below
            self._waiting.append(self._pool.submit(self._make, next(self._numbers)))
        return self._waiting.popleft().result()

    def close(self) -> None:
        """Stop the threads and discard results computed ahead."""
        self._pool.shutdown(wait=True, cancel_futures=True)
        self._waiting.clear()


@dataclass(frozen=True)
class Encoded:
    """A batch of encoded images."""

    number: int
    request: BatchRequest
    images: list[np.ndarray]  # B of (bytes,) uint8
    replaced: int  # substitutes for bad samples


class Reader:
    """Reads encoded batches.

    Args:
        batches: the samples of each.
        bad: records samples that cannot be read, and provides substitutes.
        start: number of the first batch, which the others follow; or the endless numbers of all.
        depth: batches to read ahead.
    """

    def __init__(self, batches: Batches, bad: BadSamples, start: int | Iterable[int], depth: int) -> None:
        self.batches, self.bad = batches, bad
        self._ahead = Ahead(self._read, count(start) if isinstance(start, int) else iter(start), depth, _THREADS, "read")
        self.failure: StoreFails | None = None  # of a batch that nobody has asked for yet

    def next(self) -> Encoded:
        """The next batch; blocks until it is ready."""
        return self._ahead.next()

    def read(self, number: int) -> Encoded:
        """Read batch ``number`` with substitutes for all samples known to be bad. Thread-safe.

        Raises:
            UserError: more than ``data.max_bad_samples`` samples cannot be used.
        """
        self.batches.shards.will_need(self.batches.coming_blocks(number))
        asked_for = request = self.batches.request(number)
        while True:
            if not self.bad.replacement.keys().isdisjoint(asked_for.index.tolist()):
                request = self.batches.request(number, self.bad.replacement)
            images = self._read_sound(request.index)
            if images is not None:
                return Encoded(number, request, images, replaced=int((request.index != asked_for.index).sum()))

    def close(self) -> None:
        """Stop the threads."""
        self._ahead.close()

    def _read(self, number: int) -> Encoded:
        try:
            return self.read(number)
        except StoreFails as error:
            self.failure = error
            raise

    def _read_sound(self, indices: np.ndarray) -> list[np.ndarray] | None:
        """The encoded images; None if some were found bad, so that the request must be made again with substitutes."""
        images, sound = [], True
        for image in read_batch(self.batches.shards, indices.tolist()):
            if isinstance(image, DamagedSample):
                self.bad.add(image)
                sound = False
            else:
                images.append(image)
        return images if sound else None
