"""Replace files atomically, append to files, lock them, and explain a disk that is full or read-only."""

import errno
import fcntl
import hashlib
import json
import mmap
import os
import shutil
import stat
import struct
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from pipeline.errors import UserError

_FULL = (errno.ENOSPC, errno.EDQUOT)


def replace_file(path: Path, write: Callable[[BinaryIO], object]) -> None:
    """Replace a file atomically: write a temporary file beside it, sync it, rename it. If anything fails, the old one stays intact.

    The temporary name contains the process id: a process whose parent was killed may briefly live on beside its successor.
    Raises OSError: from the system, with ``path`` as its ``filename``.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with open(temporary, "wb") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
        sync_folder(path.parent)
    except BaseException as error:
        with suppress(OSError):  # on a file system that became read-only: the first error is the one to report
            temporary.unlink(missing_ok=True)
        if isinstance(error, OSError) and str(error.filename or temporary) in (str(temporary), str(path.parent)):
            error.filename = str(path)  # the error of a failed write has none
        raise


def replace_text(path: Path, text: str) -> None:
    """:func:`replace_file` with the file's whole content."""
    replace_file(path, lambda file: file.write(text.encode()))


def remove_leftovers(path: Path) -> None:
    """Remove the temporary files that killed writers of a file left. No other process may be writing it."""
    for temporary in path.parent.glob(f".{path.name}.*.tmp"):
        temporary.unlink(missing_ok=True)


def user_cache() -> Path | None:
    """``$XDG_CACHE_HOME/pervit``, by default ``~/.cache/pervit``, which need not exist; None without a home directory."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    try:
        return (Path(base) if os.path.isabs(base) else Path.home() / ".cache") / "pervit"
    except RuntimeError:
        return None


def make_private(folder: Path) -> bool:
    """Create a folder with mode 0700; whether it is there, is this user's, and nobody else may write to it."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        about = folder.stat()
    except OSError:
        return False
    return about.st_uid == os.geteuid() and not about.st_mode & (stat.S_IWGRP | stat.S_IWOTH)


def open_regular(path: Path) -> int:
    """Open a regular file for reading; returns the descriptor. A pipe or device, which may block, raises an ``OSError``."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)  # without O_NONBLOCK a pipe waits for a writer
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "not a regular file", str(path))
    return descriptor


def file_sha256(path: Path) -> str:
    """SHA-256 of a regular file, hexadecimal."""
    digest = hashlib.sha256()
    with open(open_regular(path), "rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def write_json(path: Path | None, content: object) -> None:
    """Write what ``--json FILE`` asks for; None: nothing."""
    if path:
        path.write_text(json.dumps(content, indent=1) + "\n")


def check_writable(path: Path | None) -> None:
    """Check, before the work begins, that its result can be written to the file ``path``, if any; if not, a ``UserError``."""
    if path is None:
        return
    if path.is_dir():
        raise UserError(f"{path} must be a file, got a folder", "add a file name")
    folder = path.absolute().parent
    if not os.access(folder, os.W_OK):
        raise UserError(f"{path}: the folder {folder} does not exist or cannot be written", "create it or choose another")


def sync_folder(folder: Path) -> None:
    """Sync a directory: without it, a renamed file may have its old name after a power failure."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno != errno.EINVAL:  # not supported by some network file systems
            raise
    finally:
        os.close(descriptor)


def nearest_existing(path: Path) -> Path:
    """The path, or the nearest folder above it that exists."""
    return next(place for place in (path.absolute(), *path.absolute().parents) if place.exists())


def free_bytes(path: Path) -> int:
    """Bytes free on the disk where the path is, or will be."""
    return shutil.disk_usage(nearest_existing(path)).free


def check_space(folder: Path, needed: int) -> None:
    """Check that a write of ``needed`` bytes to a folder's file system will fit; an ``OSError`` with ``ENOSPC`` if not."""
    if free_bytes(folder) < needed:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(folder))


def lock_bytes(descriptor: int, path: Path, first: int = 0, length: int = 0, wait: bool = False) -> bool:
    """Lock a byte range of a file open for writing with a POSIX record lock, which network file systems support.

    The kernel releases it when the process ends. Beware: closing *any* descriptor of the file releases it too. The range need not
    exist; a length of 0 extends to infinity. Returns True if this process holds the lock, False if another one does and
    ``wait`` is false. Raises UserError: the file system does not support these locks.
    """
    try:
        fcntl.lockf(descriptor, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB), length, first)
    except OSError as error:
        if error.errno in (errno.EAGAIN, errno.EACCES):  # POSIX allows both
            return False
        problem = f"{path} requires a file system with POSIX locks, which keep two writers apart, got {error.strerror}"
        remedy = "have it mounted with locks (Lustre: flock, NFS: without nolock), or choose another folder"
        raise UserError(problem, remedy) from None
    return True


def is_locked_by_another(descriptor: int) -> bool:
    """Whether another process holds a lock of :func:`lock_bytes` on any part of a file, open for writing. Takes none itself."""
    lock = struct.pack("hhqqixxxx", fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)  # struct flock of 64-bit Linux
    kind, *_ = struct.unpack("hhqqixxxx", fcntl.fcntl(descriptor, fcntl.F_GETLK, lock))
    return kind != fcntl.F_UNLCK


class DiskRefuses(UserError):
    """A file cannot be written now; a retry may succeed once there is space or the file system is writable again."""


def write_error(path: Path, error: OSError) -> UserError:
    """The error for a file of a run folder that could not be written; a :class:`DiskRefuses` if a retry may help."""
    go_on = "and start again: the run resumes from its newest checkpoint"
    if error.errno in _FULL:
        free = "its free space cannot be asked for"
        with suppress(OSError):
            free = f"{free_bytes(path.parent) / 1e6:.1f} MB free"
        full = f"its disk is full ({free}, {disk_reason(path, error)})"
        return DiskRefuses(f"{path} cannot be written: {full}: free some space {go_on}.")
    if error.errno in (errno.ENOENT, errno.ENOTDIR, errno.ESTALE):
        problem = f"{path} cannot be written: it, or its folder, was removed while the run went on"
        return UserError(problem, f"restore it {go_on}")
    return DiskRefuses(f"{path} cannot be written ({error.strerror}): see to its permissions and its file system {go_on}.")


@contextmanager
def being_written(path: Path) -> Iterator[None]:
    """In the block, a file of a run folder is written: an ``OSError`` becomes its :func:`write_error`."""
    try:
        yield
    except OSError as error:
        raise write_error(path, error) from None


class GrowingFile:
    """An append-only file of rows that loses none silently.

    Rows are buffered until :meth:`flush`, which writes all of them or none: after a partial write, on a full disk, the file is
    truncated again and the rows are kept for the next attempt. Raises UserError: it cannot be opened or created.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._rows = bytearray()
        with being_written(path):
            self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o666)
        self._size = os.fstat(self._descriptor).st_size  # of complete rows

    def add(self, row: bytes) -> None:
        self._rows += row

    def flush(self, to_disk: bool = False) -> None:
        """Write the buffered rows; ``to_disk`` also syncs them, so that they survive a power failure. Raises DiskRefuses:
        the file cannot be written now; UserError: it was removed: rows in an unlinked file would be lost."""
        try:
            present = os.fstat(self._descriptor)
            if not os.path.samestat(present, os.stat(self.path)):
                raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT))
            if present.st_size > self._size:  # a partial row of an attempt whose truncation failed too
                os.ftruncate(self._descriptor, self._size)
            rows = memoryview(self._rows)
            while rows:
                rows = rows[os.write(self._descriptor, rows) :]
            if to_disk:
                os.fsync(self._descriptor)
        except OSError as error:
            with suppress(OSError):
                os.ftruncate(self._descriptor, self._size)
            raise write_error(self.path, error) from None
        self._size += len(self._rows)
        self._rows = bytearray()

    def close(self) -> None:
        try:
            self.flush()
        finally:
            os.close(self._descriptor)


def cut_behind_rows(path: Path) -> None:
    """Cut a file of rows behind its last whole one before the first zero: a kill may have left a part of a row, and a power failure
    pages of zeros, which only rows follow that were not synced. Without the file nothing."""
    if not path.exists() or not path.stat().st_size:
        return
    with open(path, "r+b") as file:
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:  # the file may be gigabytes
            lost = content.find(b"\0")  # which JSON never has
            end = content.rfind(b"\n", 0, lost if lost >= 0 else len(content)) + 1
        file.truncate(end)


def disk_reason(path: Path, error: OSError) -> str:
    """The system's reason for a failed write to ``path``; ENOSPC for lack of inodes, where there is space, is spelled out."""
    reason = error.strerror or str(error)
    try:
        space = os.statvfs(nearest_existing(path.absolute().parent))
    except OSError:
        return reason
    no_inode = error.errno == errno.ENOSPC and space.f_files > 0 and space.f_favail == 0
    return f"{reason}, 0 inodes free: too many files" if no_inode else reason
