"""Two runs that write into one shard set are kept apart."""

from __future__ import annotations

import fcntl
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from data_prep import SPLITS
from pipeline.errors import UserError

LOCK_FILE = ".lock"
_MANIFEST_BYTE = 0
_SHARDS_OF_A_SPLIT = 1 << 32


class FolderLock:
    """Keeps apart runs that write into one folder, also from several nodes of a cluster.

    Bytes of an empty file are locked (POSIX record locks, which network file systems know): one for the manifest and one
    for each shard, so that the tasks of a job array work side by side and two runs never write the same shard. The
    system releases the locks of a process that dies.

    Args:
        folder: the shard set.
    """

    def __init__(self, folder: Path) -> None:
        self._path = folder / LOCK_FILE
        self._file = open(self._path, "ab")  # closing any handle of it would release all locks, so there is only this one

    def __enter__(self) -> FolderLock:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def take_shards(self, split: str, numbers: Iterable[int]) -> None:
        """Claim shards until the lock is closed.

        Raises:
            UserError: another process is writing one of them.
        """
        first = 1 + SPLITS.index(split) * _SHARDS_OF_A_SPLIT
        for number in numbers:
            try:
                fcntl.lockf(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, first + number)
            except BlockingIOError:
                raise UserError(
                    f"{self._path.parent}: {split} shard {number} is being written by another process, 1 writer per shard needed: "
                    f"wait for it or stop it."
                ) from None

    @contextmanager
    def manifest(self) -> Iterator[None]:
        """Wait for the right to change the manifest and the lists beside it."""
        fcntl.lockf(self._file, fcntl.LOCK_EX, 1, _MANIFEST_BYTE)
        try:
            yield
        finally:
            fcntl.lockf(self._file, fcntl.LOCK_UN, 1, _MANIFEST_BYTE)
