"""Reading encoded images ahead of time, in threads, with neighbours in the place of samples that cannot be read."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Generic, TypeVar

import numpy as np

from pipeline.data.bad_samples import BadSamples
from pipeline.data.plan import BatchRequest, Plan
from pipeline.data.shards import DamagedSample

_THREADS = 4  # they wait for the disk or the network, not for a core: enough to keep a few requests in flight

Result = TypeVar("Result")


class Ahead(Generic[Result]):
    """``make(start)``, ``make(start + 1)``, ...: computed ahead of time, handed out one after the other.

    An error in ``make`` is raised where its result would have been handed out.

    Args:
        make: computes result number i; called from several threads at once where ``threads`` > 1.
        start: number of the first result.
        depth: results that are ready or being made.
        threads: how many are made at the same time.
        name: of the threads, for debuggers.
    """

    def __init__(self, make: Callable[[int], Result], start: int, depth: int, threads: int, name: str) -> None:
        self._make, self._number = make, start
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix=name)
        self._waiting: deque[Future[Result]] = deque()
        self._depth = depth

    def next(self) -> Result:
        """The next result; waits until it is there."""
        while len(self._waiting) <= self._depth:  # one is taken below
            self._waiting.append(self._pool.submit(self._make, self._number))
            self._number += 1
        return self._waiting.popleft().result()

    def close(self) -> None:
        """Stop the threads; what was made ahead is dropped."""
        self._pool.shutdown(wait=True, cancel_futures=True)
        self._waiting.clear()


@dataclass(frozen=True)
class Encoded:
    """A batch as it comes from the disk."""

    number: int
    request: BatchRequest
    images: list[np.ndarray]  # B of (bytes,) uint8
    replaced: int  # samples of it that stand in for bad ones


class Reader:
    """Batches ``start``, ``start + 1``, ... of a plan, encoded.

    Args:
        plan: what to read.
        bad: where samples that cannot be read are noted, and what replaces them.
        start: number of the first batch.
        depth: batches that are read ahead.
    """

    def __init__(self, plan: Plan, bad: BadSamples, start: int, depth: int) -> None:
        self.plan, self.bad = plan, bad
        self._ahead = Ahead(self.read, start, depth, _THREADS, "read")

    def next(self) -> Encoded:
        """The next batch; waits until it is there."""
        return self._ahead.next()

    def read(self, number: int) -> Encoded:
        """Batch ``number``, without the samples that are known as bad by now; threads may call this at the same time.

        Raises:
            UserError: more samples than ``data.max_bad_samples`` cannot be used.
        """
        self.plan.shards.will_need(self.plan.coming_blocks(number))
        asked_for = request = self.plan.request(number)
        while True:
            if not self.bad.replacement.keys().isdisjoint(asked_for.index.tolist()):
                request = self.plan.request(number, self.bad.replacement)
            images = self._read_sound(request.index)
            if images is not None:
                return Encoded(number, request, images, replaced=int((request.index != asked_for.index).sum()))

    def close(self) -> None:
        """Stop the threads."""
        self._ahead.close()

    def _read_sound(self, indices: np.ndarray) -> list[np.ndarray] | None:
        """The encoded images; None after some of them were noted as bad: the request changes then."""
        images, sound = [], True
        for index in indices.tolist():
            try:
                images.append(self.plan.shards.read(index))
            except DamagedSample as damage:
                self.bad.add(damage)
                sound = False
        return images if sound else None
