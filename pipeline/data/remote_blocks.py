"""Blocks of adjacent samples (``data.order=block``) on their way from a store, and in memory until the window after next begins."""

from __future__ import annotations

import threading
from bisect import bisect_right
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial

from pipeline.stores.parallel import Threads

_PART = 8 << 20  # bytes of a request
_AT_ONCE = 16  # requests: 128 MiB in flight; reads of single samples, which are waited for, have threads of their own
_WINDOWS = 2  # the one that is being read, and the one that comes


@dataclass(frozen=True)
class _Block:
    begin: int
    size: int
    parts: list[Future[memoryview]]


class Blocks:
    """The blocks that were announced last.

    Args:
        read: bytes of a file, as (name, begin, size).
    """

    def __init__(self, read: Callable[[str, int, int], memoryview]) -> None:
        self._read, self._threads = read, Threads(_AT_ONCE)
        self._windows: deque[dict[str, list[_Block]]] = deque()
        self._lock = threading.Lock()

    def announce(self, ranges: list[tuple[str, int, int]]) -> None:
        """Fetch the blocks of a window, (name, begin, size) each, and forget the window before the last. Returns immediately."""
        window: dict[str, list[_Block]] = {}
        for name, begin, size in sorted(ranges):
            parts = [
                self._threads.submit(partial(self._read, name, begin + at, min(_PART, size - at)))
                for at in range(0, size, _PART)
            ]
            window.setdefault(name, []).append(_Block(begin, size, parts))
        with self._lock:
            self._windows.append(window)
            old = self._windows.popleft() if len(self._windows) > _WINDOWS else {}
        for blocks in old.values():
            for block in blocks:
                for part in block.parts:
                    part.cancel()

    def find(self, name: str, begin: int, size: int) -> Callable[[], bytes | memoryview] | None:
        """A function that waits for the bytes, if they are part of a block; it raises what reading the block raised."""
        with self._lock:
            windows = list(self._windows)
        for window in reversed(windows):
            blocks = window.get(name, [])
            place = bisect_right(blocks, begin, key=lambda block: block.begin) - 1
            if place >= 0 and begin + size <= blocks[place].begin + blocks[place].size:
                return partial(_bytes_of, blocks[place], begin - blocks[place].begin, size)
        return None


def _bytes_of(block: _Block, begin: int, size: int) -> bytes | memoryview:
    first, last = begin // _PART, (begin + size - 1) // _PART
    parts = [block.parts[number].result() for number in range(first, last + 1)]
    if first == last:
        return parts[0][begin - first * _PART :][:size]
    return b"".join(parts)[begin - first * _PART :][:size]
