"""Mutual exclusion of processes that write into one shard set."""

from __future__ import annotations

import fcntl
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from data_prep import SPLITS
from pipeline.errors import UserError
from pipeline.files import lock_bytes

LOCK_FILE = ".lock"
_MANIFEST_BYTE = 0
_SHARDS_OF_A_SPLIT = 1 << 32


class FolderLock:
    """POSIX locks for concurrent writers, on one node or several.

    Locks bytes of an empty file (:func:`pipeline.files.lock_bytes`), one for the manifest and one per shard, so that the tasks
    of a job array write concurrently and no two processes write the same shard.

    Args:
        folder: the shard set.
    """

    def __init__(self, folder: Path) -> None:
        self._path = folder / LOCK_FILE
        self._file = open(self._path, "ab")  # the only handle: closing any handle of a file releases all of its POSIX locks

    def __enter__(self) -> FolderLock:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def take_shards(self, split: str, numbers: Iterable[int]) -> None:
        """Lock shards until this object is closed.

        Raises:
            UserError: another process is writing one of them.
        """
        first = 1 + SPLITS.index(split) * _SHARDS_OF_A_SPLIT
        for number in numbers:
            if not lock_bytes(self._file.fileno(), self._path, first + number, 1):
                raise UserError(
                    f"{self._path.parent}: {split} shard {number} is being written by another process, 1 writer per shard needed",
                    "wait for it or stop it",
                )

    @contextmanager
    def manifest(self) -> Iterator[None]:
        """Hold the lock on the manifest and the lists beside it; blocks until it is free."""
        lock_bytes(self._file.fileno(), self._path, _MANIFEST_BYTE, 1, wait=True)
        try:
            yield
        finally:
            fcntl.lockf(self._file, fcntl.LOCK_UN, 1, _MANIFEST_BYTE)
