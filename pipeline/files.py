"""Files that are whole or not there, files that grow row by row, and what to say when the disk refuses either."""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import stat
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

from pipeline.errors import UserError

_FULL = (errno.ENOSPC, errno.EDQUOT)


def replace_file(path: Path, write: Callable[[BinaryIO], object]) -> None:
    """Write a file under a temporary name beside it, flush it to disk, rename it: it is whole or not there.

    The temporary name has the process id: a process whose parent was killed may live on for a moment beside its successor.

    Args:
        path: the file; an older one is replaced and stays whole when anything goes wrong.
        write: gets the open file.

    Raises:
        OSError: as the system raised it, its ``filename`` being this one's.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with open(temporary, "wb") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
        sync_folder(path.parent)
    except OSError as error:
        _remove(temporary)
        # A write that fails names no file at all.
        if error.filename is None or str(error.filename) in (str(temporary), str(path.parent)):
            error.filename = str(path)
        raise
    except BaseException:
        _remove(temporary)
        raise


def replace_text(path: Path, text: str) -> None:
    """:func:`replace_file` with the file's whole content."""
    replace_file(path, lambda file: file.write(text.encode()))


def remove_leftovers(path: Path) -> None:
    """Remove what killed writers of a file left beside it. Nobody else may be writing it now."""
    for temporary in path.parent.glob(f".{path.name}.*.tmp"):
        temporary.unlink(missing_ok=True)


def open_regular(path: Path) -> int:
    """Open a file for reading; a pipe or a device, which may never begin or never end, is an ``OSError`` that names it.

    Returns:
        The descriptor.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)  # a pipe would wait for a writer
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "not a regular file", str(path))
    return descriptor


def sync_folder(folder: Path) -> None:
    """Flush the names in a folder to disk: without it a file that was renamed may have its old name after a power cut."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno != errno.EINVAL:  # some network file systems know no such thing
            raise
    finally:
        os.close(descriptor)


def check_space(folder: Path, needed: int) -> None:
    """See that something fits before it is begun.

    Args:
        folder: on the disk in question.
        needed: bytes.

    Raises:
        OSError: ``ENOSPC``, it does not fit.
    """
    if shutil.disk_usage(folder).free < needed:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(folder))


def lock_bytes(descriptor: int, path: Path, first: int = 0, length: int = 0, wait: bool = False) -> bool:
    """Lock a stretch of an open file against other processes: a POSIX record lock, which network file systems know.

    The system releases it when the process dies. Beware: the process also loses it when it closes *any* handle of the file.

    Args:
        descriptor: of the file, opened for writing.
        path: its name, for the message.
        first, length: the stretch in bytes, which need not exist; a length of 0 reaches beyond every end.
        wait: until the lock can be had.

    Returns:
        Whether this process has it; False if another one does.

    Raises:
        UserError: the file system has no such locks.
    """
    try:
        fcntl.lockf(descriptor, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB), length, first)
    except OSError as error:
        if error.errno in (errno.EAGAIN, errno.EACCES):  # POSIX allows both
            return False
        raise UserError(
            f"{path} cannot be locked ({error.strerror}), a file system with POSIX locks needed to keep two writers apart",
            "have it mounted with locks (Lustre: flock, NFS: without nolock), or choose another folder",
        ) from None
    return True


class DiskRefuses(UserError):
    """A file cannot be written now; free space, or a disk that is writable again, would mend it."""


def write_error(path: Path, error: OSError) -> UserError:
    """The sentence for a file of a run folder that could not be written.

    Args:
        path: the file.
        error: what the system said.

    Returns:
        A :class:`DiskRefuses` if trying again may help.
    """
    go_on = "and start again: the run goes on from its newest checkpoint"
    if error.errno in _FULL:
        return DiskRefuses(
            f"{path} cannot be written: its disk is full ({_free_mb(path)}, {disk_reason(path, error)}): free some space {go_on}."
        )
    if error.errno in (errno.ENOENT, errno.ENOTDIR, errno.ESTALE):
        return UserError(f"{path} cannot be written: it, or its folder, was removed while the run went on: restore it {go_on}.")
    return DiskRefuses(f"{path} cannot be written ({error.strerror}): see to its permissions and its file system {go_on}.")


class GrowingFile:
    """A file that gets rows at its end; nothing that was added is lost without a word.

    Rows are collected and written by :meth:`flush`, all of them or none: what a full disk took of them is cut off again, and they
    are kept for the next attempt.

    Args:
        path: created, in an existing folder, or continued.

    Raises:
        UserError: it cannot be opened.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._rows = bytearray()
        try:
            self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o666)
        except OSError as error:
            raise write_error(path, error) from None
        self._size = os.fstat(self._descriptor).st_size  # with whole rows only

    def add(self, row: bytes) -> None:
        """Collect a row."""
        self._rows += row

    def flush(self, to_disk: bool = False) -> None:
        """Hand the collected rows to the system.

        Args:
            to_disk: also wait until they would survive a power cut.

        Raises:
            DiskRefuses: the file cannot be written now.
            UserError: it is no longer there: rows in a removed file nobody would ever see.
        """
        try:
            present = os.fstat(self._descriptor)
            if not os.path.samestat(present, os.stat(self.path)):
                raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT))
            if present.st_size > self._size:  # a part of a row, of an attempt that could not even be cut off again
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
        """Write what is left, and close.

        Raises:
            UserError: as :meth:`flush`.
        """
        try:
            self.flush()
        finally:
            os.close(self._descriptor)


def _remove(temporary: Path) -> None:
    with suppress(OSError):  # on a file system that became read-only: what stopped the writing is what is to be told
        temporary.unlink(missing_ok=True)


def disk_reason(path: Path, error: OSError) -> str:
    """What the system said about a write to ``path``. That a disk has space and yet no room for another file nobody would guess."""
    reason = error.strerror or str(error)
    try:
        space = os.statvfs(next(folder for folder in path.absolute().parents if folder.exists()))
    except OSError:
        return reason
    no_inode = error.errno == errno.ENOSPC and space.f_files > 0 and space.f_favail == 0
    return f"{reason}, 0 inodes free: too many files" if no_inode else reason


def _free_mb(path: Path) -> str:
    try:
        return f"{shutil.disk_usage(path.parent).free / 1e6:.1f} MB free"
    except OSError:
        return "its free space cannot be asked for"
