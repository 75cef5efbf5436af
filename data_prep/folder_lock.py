"""Two runs that write into one shard set are kept apart."""

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
    """Keeps apart runs that write into one folder, also from several nodes of a cluster.

    Bytes of an empty file are locked (:func:`pipeline.files.lock_bytes`): one for the manifest and one for each shard, so that
    the tasks of a job array work side by side and two runs never write the same shard.

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
            if not lock_bytes(self._file.fileno(), self._path, first + number, 1):
                raise UserError(
                    f"{self._path.parent}: {split} shard {number} is being written by another process, 1 writer per shard needed",
                    "wait for it or stop it",
                )

    @contextmanager
    def manifest(self) -> Iterator[None]:
        """Wait for the right to change the manifest and the lists beside it."""
        lock_bytes(self._file.fileno(), self._path, _MANIFEST_BYTE, 1, wait=True)
        try:
            yield
        finally:
            fcntl.lockf(self._file, fcntl.LOCK_UN, 1, _MANIFEST_BYTE)
