"""Allow one run per folder: an exclusive lock that ends with the process that holds it.

``RUN/.lock`` has a POSIX lock (:func:`pipeline.files.lock_bytes`), so a crash leaves no lock behind and a child process
inherits none. Its contents name the holder, for people. The holder opens it only once: closing any descriptor would release
the lock.
"""

from __future__ import annotations

import errno
import logging
import os
import socket
import time
from contextlib import suppress
from pathlib import Path

from pipeline.cluster.environment import job_name
from pipeline.errors import UserError
from pipeline.files import disk_reason, lock_bytes, nearest_existing, write_error
from pipeline.runs import LOCK
from pipeline.runs.files import Holder, read_holder

_log = logging.getLogger(__name__)
_POLL_SECONDS = 0.5  # between attempts to lock: the holder may be on another node, and nothing signals its end
_held_here: set[Path] = set()  # POSIX grants the same process a second lock, whose release would release the first


class RunLock:
    """The lock on a run folder: acquired by :meth:`take`, held until :meth:`release` or the end of the process."""

    def __init__(self, path: Path, descriptor: int, created: bool) -> None:
        self._path, self._descriptor, self._created = path, descriptor, created
        _held_here.add(path.resolve())

    @classmethod
    def take(cls, run_dir: Path, wait_seconds: float = 0) -> RunLock:
        """Lock a run folder.

        Args:
            run_dir: created if it does not exist.
            wait_seconds: how long to wait for another holder to end; this is logged once.

        Raises:
            UserError: another process holds it, the folder cannot be created or written, or its file system has no locks.
        """
        path = run_dir / LOCK
        if path.resolve() in _held_here:
            raise _refusal(run_dir, _this_process())
        created = not run_dir.exists()
        try:
            run_dir.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        except OSError as error:
            raise _not_writable(run_dir, error) from None
        try:
            _wait_for_lock(descriptor, run_dir, wait_seconds)
            if os.fstat(descriptor).st_nlink == 0:  # a lock on a removed file excludes nobody
                raise UserError(f"{run_dir} was removed by another start, which was refused", "start again")
            _write(descriptor, _this_process().record())
        except OSError as error:
            os.close(descriptor)
            raise write_error(path, error) from None
        except BaseException:
            os.close(descriptor)
            raise
        return cls(path, descriptor, created)

    def release(self) -> None:
        """Let the next run have the folder."""
        if self._path.resolve() in _held_here:
            _held_here.discard(self._path.resolve())
            with suppress(OSError):
                _write(self._descriptor, "")  # a released lock names no holder
            os.close(self._descriptor)

    def abandon(self) -> None:
        """After a refused start: remove the folder if this start created it and nothing else is in it; else keep the lock."""
        with suppress(OSError):
            if self._created and os.listdir(self._path.parent) == [LOCK]:
                self._path.unlink()
                self.release()
                self._path.parent.rmdir()


def check_lock(run_dir: Path) -> None:
    """Check that a start could lock a run folder. Nothing is created or changed.

    Raises:
        UserError: that of :meth:`RunLock.take`.
    """
    path = run_dir / LOCK
    try:
        if not path.exists():
            nearest = nearest_existing(run_dir)
            if not nearest.is_dir():
                raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR))
            if not os.access(nearest, os.W_OK | os.X_OK):
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
            return
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except OSError as error:
        raise _not_writable(run_dir, error) from None
    try:
        holder = read_holder(descriptor)
        if holder and holder.alive:
            raise _refusal(run_dir, holder)
    finally:
        os.close(descriptor)


def _wait_for_lock(descriptor: int, run_dir: Path, wait_seconds: float) -> None:
    until = time.monotonic() + wait_seconds
    waiting = False
    while not lock_bytes(descriptor, run_dir / LOCK):
        holder = read_holder(descriptor) or Holder()
        if time.monotonic() >= until:
            raise _refusal(run_dir, holder)
        if not waiting:
            _log.info(f"note: {run_dir} is still held by {holder}: waiting up to {wait_seconds:g} s for its end.")
            waiting = True
        time.sleep(_POLL_SECONDS)


def _not_writable(run_dir: Path, error: OSError) -> UserError:
    return UserError(
        f"output_dir {run_dir} must be a writable folder ({disk_reason(run_dir / LOCK, error)})", "choose another output_dir"
    )


def _refusal(run_dir: Path, holder: Holder) -> UserError:
    return UserError(
        f"{run_dir} is being trained by {holder}, and a folder can have only one run at a time",
        "wait for it, stop it, or choose another output_dir",
    )


def _this_process() -> Holder:
    return Holder(os.getpid(), socket.gethostname(), job_name(os.environ), since=time.strftime("%Y-%m-%d %H:%M:%S"))


def _write(descriptor: int, text: str) -> None:
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, text.encode(), 0)
    os.fsync(descriptor)  # other nodes may read it
