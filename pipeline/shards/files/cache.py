"""Keep whole shards on a disk of the node, which all processes on it share, also those of other jobs and users.

::

    DIR/train-000007-5d41402abc4b2a76b9719d911017c592.tar    a shard; the digits are the first half of its SHA-256
    DIR/.train-000007-5d41...7c592.tar.231014400.1000.partial  on its way: its size when whole, and the user who fetches it

A name stands for one content, so that nothing here needs to be kept up to date: shards that were written anew, or another data set,
have other names. What a process has claimed or has open is held by ``flock``, which the kernel releases however the process ends.

- Whoever writes a partial file has it locked. One that nobody has locked was left by a process that was killed; the next process
  of the same user continues it.
- Whoever reads a shard has it locked as a reader. A shard with readers is never removed; of the others, the least recently used
  one is (its modification time is that of its last use). So what is counted as removed has left the disk.
- Claiming, publishing and removing happen under a lock on the folder itself; opening and reading need none.
"""

import enum
import errno
import fcntl
import os
import re
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from pipeline.shards.files.local import OpenFile
from pipeline.shards.manifest import ShardInfo

KEEP_FREE = 0.05  # of the disk, for its other users, where there is no limit or a larger one
_DIGITS = 32  # of the SHA-256, in a name: 128 bits
_WHOLE = re.compile(rf".+-[0-9a-f]{{{_DIGITS}}}\.tar")
_PARTIAL = re.compile(rf"\.(?P<name>.+-[0-9a-f]{{{_DIGITS}}}\.tar)\.(?P<bytes>\d{{1,18}})\.\d+\.partial")
_LOCK_SECONDS = 30.0  # to wait for the folder, which is held for milliseconds


class Unclaimed(enum.Enum):
    """Why a process is not the one to fetch a shard."""

    CACHED = "it is there"
    ELSEWHERE = "another process fetches it"
    NO_ROOM = "there is no room for it"


class CachedShard(OpenFile):
    """A shard of the cache, open for reading and locked against removal until no thread refers to it any more."""

    def touch(self) -> None:
        """Record that it is in use. Only its owner can: a shard that another user fetched keeps the time of that user's last use."""
        with suppress(OSError):
            os.utime(self._descriptor)

    def is_removed(self) -> bool:
        """Whether its name was removed, so that its space is free once it is closed."""
        return os.fstat(self._descriptor).st_nlink == 0


class Partial(OpenFile):
    """A shard that this process fetches; see :meth:`ShardCache.claim`. ``begun`` bytes are there already. To be closed, which releases
    the claim: what was written and not discarded is left for the next process that claims the shard."""

    def __init__(self, descriptor: int, path: Path, whole: Path, size: int, cache: "ShardCache") -> None:
        super().__init__(descriptor)  # closes it, whatever follows
        if not _lock(descriptor, fcntl.LOCK_EX):
            raise OSError(errno.EAGAIN, os.strerror(errno.EAGAIN), str(path))
        self._path, self._whole, self._cache = path, whole, cache
        self.begun = os.fstat(descriptor).st_size
        if self.begun > size:
            self.restart()

    def append(self, data: bytes | memoryview) -> None:
        rest = memoryview(data)
        while rest:
            written = os.pwrite(self._descriptor, rest, self.begun)
            self.begun, rest = self.begun + written, rest[written:]

    def restart(self) -> None:
        os.ftruncate(self._descriptor, 0)
        self.begun = 0

    def publish(self) -> None:
        """Give the file its name, when all of it is there and verified."""
        os.fsync(self._descriptor)
        with self._cache.alone():  # who lists the folder to find room would see the file by neither name
            if not self.is_at(self._path, follow_links=False):
                raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(self._path))
            if self._whole.exists():  # from another user, whose claim this process was not allowed to see
                self.discard()
            else:
                os.rename(self._path, self._whole)

    def discard(self) -> None:
        with suppress(OSError):
            if self.is_at(self._path, follow_links=False):
                os.unlink(self._path)


@dataclass(frozen=True)
class _File:
    path: Path
    bytes: int  # of the whole shard
    missing: int  # bytes that are still to be written
    used: float  # last use, seconds
    name: str  # of the shard in the cache
    owner: int


class ShardCache:
    """The cache in one folder. Thread-safe; holds no state but its arguments. ``folder``: created when it is needed, in an
    existing folder: where a disk is not mounted, the one below is not filled. ``limit``: bytes that all shards in it may take;
    None: as many as the disk has."""

    def __init__(self, folder: Path, limit: int | None = None, keep_free: float = KEEP_FREE) -> None:
        self.folder, self.limit, self.keep_free = folder, limit, keep_free

    def path(self, shard: ShardInfo) -> Path:
        return self.folder / f"{shard.file.removesuffix('.tar')}-{shard.sha256[:_DIGITS]}.tar"

    def open(self, shard: ShardInfo) -> CachedShard | None:
        """Open a shard for reading; None if it is not there, or was not whole and is removed. Raises OSError: neither."""
        path = self.path(shard)
        try:
            descriptor = _open(path)
        except (FileNotFoundError, NotADirectoryError):
            return None
        copy = CachedShard(descriptor)  # closes it, whatever follows
        if not _lock(descriptor, fcntl.LOCK_SH):
            return None  # about to be removed, or to be published
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode) or found.st_size != shard.bytes:
            if not self.remove(shard, copy):  # a folder, or another user's file
                raise OSError(errno.EEXIST, "it is not the whole shard, and cannot be removed", str(path))
            return None
        return copy if found.st_nlink else None

    def remove(self, shard: ShardInfo, copy: CachedShard) -> bool:
        """Remove a damaged shard, but not a whole one that has replaced it; False if another user's file is protected."""
        path = self.path(shard)
        with suppress(OSError):
            if copy.is_at(path, follow_links=False):
                os.unlink(path)
            return True
        return False

    def claim(self, shard: ShardInfo) -> Partial | Unclaimed:
        """Become the process of this node that fetches a shard, after removing the least recently used ones to make room."""
        with suppress(FileExistsError):
            os.mkdir(self.folder)
        whole = self.path(shard)
        with self.alone():
            if whole.exists():
                return Unclaimed.CACHED
            own = self.folder / f".{whole.name}.{shard.bytes}.{os.getuid()}.partial"
            files = self._files()
            if any(file.name == whole.name and _is_written(file.path) for file in files):
                return Unclaimed.ELSEWHERE
            others = [file for file in files if file.path != own]
            begun = next((file.bytes - file.missing for file in files if file.path == own), 0)
            if not self._make_room(shard.bytes, shard.bytes - begun, others):
                return Unclaimed.NO_ROOM
            descriptor = os.open(own, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o666)
            return Partial(descriptor, own, whole, shard.bytes, self)

    def room(self) -> int:
        """Bytes that all shards may take together on this disk, those that are there included; the folder need not exist."""
        files = self._files() if self.folder.exists() else []
        most = self._free() + sum(file.bytes - file.missing for file in files)
        return most if self.limit is None else min(most, self.limit)

    def _free(self) -> int:
        """Bytes of the disk that may be written now."""
        disk = os.statvfs(self.folder if self.folder.exists() else self.folder.absolute().parent)
        return disk.f_bavail * disk.f_frsize - int(self.keep_free * disk.f_blocks * disk.f_frsize)

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Hold the lock on the folder; an ``OSError`` if another process holds it for long, for example a stopped one."""
        descriptor = os.open(self.folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            deadline = time.monotonic() + _LOCK_SECONDS
            while not _lock(descriptor, fcntl.LOCK_EX):
                if time.monotonic() > deadline:
                    raise OSError(errno.ETIMEDOUT, "locked by another process for long", str(self.folder))
                time.sleep(0.01)
            yield
        finally:
            os.close(descriptor)

    def _files(self) -> list[_File]:
        """The cache's own files; others in the folder are none of its business."""
        files = []
        with os.scandir(self.folder) as entries:
            for entry in entries:
                partial = _PARTIAL.fullmatch(entry.name)
                if not partial and not _WHOLE.fullmatch(entry.name):
                    continue
                with suppress(FileNotFoundError):
                    found = entry.stat(follow_symlinks=False)
                    if stat.S_ISREG(found.st_mode):
                        size = max(found.st_size, int(partial["bytes"]) if partial else 0)
                        name = partial["name"] if partial else entry.name
                        files.append(_File(Path(entry.path), size, size - found.st_size, found.st_mtime, name, found.st_uid))
        return files

    def _make_room(self, size: int, to_write: int, others: list[_File]) -> bool:
        """Remove the least recently used of the others, if that makes room for a shard of which ``to_write`` bytes are missing; else none."""
        over = to_write - (self._free() - sum(file.missing for file in others))
        if self.limit is not None:
            over = max(over, size + sum(file.bytes for file in others) - self.limit)
        folder = os.stat(self.folder)
        sticky = folder.st_mode & stat.S_ISVTX and os.geteuid() not in (0, folder.st_uid)  # as /tmp is
        to_remove = []
        for file in sorted(others, key=lambda file: file.used):
            if over <= 0:
                break
            held = None if sticky and file.owner != os.geteuid() else _hold(file.path, fcntl.LOCK_EX)
            if held:
                to_remove.append((file.path, held))
                over -= file.bytes
        if over <= 0:
            for path, _ in to_remove:
                path.unlink(missing_ok=True)
        return over <= 0


def _lock(descriptor: int, kind: int) -> bool:
    """Lock an open file or folder without waiting; False if another process holds it."""
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
            return False
        raise
    return True


def _open(path: Path) -> int:
    """A descriptor of a file for reading; a link is an error, a pipe is not waited for."""
    return os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)


def _hold(path: Path, kind: int) -> OpenFile | None:
    """A file that is locked as long as it is open; None if another process uses it, or it cannot be opened."""
    with suppress(OSError):
        file = OpenFile(descriptor := _open(path))
        return file if _lock(descriptor, kind) else None
    return None


def _is_written(path: Path) -> bool:
    return _hold(path, fcntl.LOCK_SH) is None and os.access(path, os.R_OK)
