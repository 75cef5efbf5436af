"""The files of a cache, open and locked: a shard that a process reads, and one that it fetches."""

from __future__ import annotations

import errno
import fcntl
import os
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from pathlib import Path

from pipeline.data.shard_files import OpenFile

_HELD = (errno.EWOULDBLOCK, errno.EACCES)


class CachedShard(OpenFile):
    """A shard of the cache, open for reading and locked against removal until no thread refers to it any more."""

    def touch(self) -> None:
        """Record that it is in use. Only its owner can: a shard that another user fetched keeps the time of that user's last use."""
        with suppress(OSError):
            os.utime(self._descriptor)

    def is_removed(self) -> bool:
        """Whether its name was removed, so that its space is free once it is closed."""
        return os.fstat(self._descriptor).st_nlink == 0

    def is_at(self, path: Path) -> bool:
        """Whether it is the file of that name; a link is not."""
        return _is_at(self._descriptor, path)


class Partial:
    """A shard that this process fetches; see :meth:`ShardCache.claim`. To be closed.

    Args:
        alone: holds the lock on the cache's folder.

    Attributes:
        begun: bytes that are there already.
    """

    def __init__(
        self, descriptor: int, path: Path, whole: Path, size: int, alone: Callable[[], AbstractContextManager[None]]
    ) -> None:
        self._descriptor, self._path, self._whole, self._alone = descriptor, path, whole, alone
        if os.fstat(descriptor).st_size > size:
            os.ftruncate(descriptor, 0)
        self.begun = os.fstat(descriptor).st_size

    def append(self, data: bytes | memoryview) -> None:
        """Write the bytes that follow.

        Raises:
            OSError: the disk is full or refuses to write.
        """
        rest = memoryview(data)
        while rest:
            written = os.pwrite(self._descriptor, rest, self.begun)
            self.begun, rest = self.begun + written, rest[written:]

    def read(self, offset: int, size: int) -> bytes:
        """What was written."""
        return os.pread(self._descriptor, size, offset)

    def restart(self) -> None:
        """Drop all bytes."""
        os.ftruncate(self._descriptor, 0)
        self.begun = 0

    def publish(self) -> None:
        """Give the file its name, when all of it is there and verified.

        Raises:
            OSError: the disk refuses, the folder stays locked, or somebody removed the partial file.
        """
        os.fsync(self._descriptor)
        with self._alone():  # who lists the folder to find room would see the file by neither name
            if not _is_at(self._descriptor, self._path):
                raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(self._path))
            if self._whole.exists():  # from another user, whose claim this process was not allowed to see
                self.discard()
            else:
                os.rename(self._path, self._whole)

    def discard(self) -> None:
        """Remove the file."""
        with suppress(OSError):
            if _is_at(self._descriptor, self._path):
                os.unlink(self._path)

    def close(self) -> None:
        """Release the claim. What was written and not discarded is left for the next process that claims the shard."""
        os.close(self._descriptor)


def lock(descriptor: int, kind: int) -> bool:
    """Lock an open file or folder without waiting; False if another process holds it."""
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in _HELD:
            return False
        raise
    return True


def is_held(path: Path) -> bool:
    """Whether a process is writing a partial file."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return False
    try:
        return not lock(descriptor, fcntl.LOCK_SH)
    finally:
        os.close(descriptor)


def hold(path: Path) -> int | None:
    """A descriptor of a file that nobody reads or writes, locked so that nobody begins to; None if somebody does."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return None
    try:
        if lock(descriptor, fcntl.LOCK_EX):
            return descriptor
    except OSError:
        pass
    os.close(descriptor)
    return None


def _is_at(descriptor: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), os.stat(path, follow_symlinks=False))
    except OSError:
        return False
