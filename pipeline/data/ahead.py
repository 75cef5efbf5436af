"""Work done ahead of time in threads, handed out in order."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Generic, TypeVar

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
