"""One run per folder: an exclusive lock that ends with the process that holds it.

``RUN/.lock`` has a POSIX lock (:func:`pipeline.files.lock_bytes`), so a crash leaves no lock behind and a child process
inherits none. Its contents name the holder, for people. The holder opens it only once: closing any descriptor would release
the lock.
"""

from __future__ import annotations

import errno
import json
import logging
import os
import socket
import time
from contextlib import suppress
from pathlib import Path

from pipeline.distributed.environment import job_name
from pipeline.errors import UserError
from pipeline.files import disk_reason, lock_bytes, write_error
from pipeline.runs import LOCK
from pipeline.runs.files import Holder, read_holder

_log = logging.getLogger(__name__)
_POLL_SECONDS = 0.5  # between attempts to lock: the holder may be on another node, and nothing signals its end
_ATTEMPTS = 100  # to create folder and file: concurrent starts that are refused remove what they created
_held_here: set[Path] = set()  # POSIX grants the same process a second lock, whose release would release the first


class RunLock:
    """The lock on a run folder: acquired by :meth:`take`, held until :meth:`release` or the end of the process."""

    def __init__(self, path: Path, descriptor: int, created: list[Path]) -> None:
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
            raise _refusal(run_dir, Holder(**_about_me()))
        created: list[Path] = []
        for left in reversed(range(_ATTEMPTS)):
            created += _create(run_dir)
            try:
                descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
            except OSError as error:
                if left and error.errno == errno.ENOENT:
                    continue  # another start, which was refused, has just removed the folder it had created
                raise _not_writable(run_dir, path, error) from None
            try:
                _wait_for_lock(descriptor, run_dir, wait_seconds)
                if not _is_there(path, descriptor):  # likewise; a lock on a removed file excludes nobody
                    os.close(descriptor)
                    continue
                _write(descriptor, json.dumps(_about_me()) + "\n")
            except OSError as error:
                os.close(descriptor)
                raise write_error(path, error) from None
            except BaseException:
                os.close(descriptor)
                raise
            return cls(path, descriptor, created)
        raise UserError(f"{path} was removed {_ATTEMPTS} times, a folder that stays needed", "choose another output_dir")

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
                # A start that waits for this file notices that it is gone. A later start creates a new one; the folder is then
                # not empty, so that it stays.
                self._path.unlink()
                self.release()
                for folder in self._created:
                    folder.rmdir()

    def undo(self) -> None:
        """As if it had never been taken: also remove its file, and the folders that were created for it."""
        self._path.unlink(missing_ok=True)
        self.release()
        for folder in self._created:
            with suppress(OSError):  # somebody else has put something there
                folder.rmdir()


def check_lock(run_dir: Path) -> None:
    """Check that a start could lock a run folder. No file is left or changed.

    Raises:
        UserError: that of :meth:`RunLock.take`.
    """
    path = run_dir / LOCK
    if not os.path.exists(path):
        RunLock.take(run_dir).undo()
        return
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except OSError as error:
        raise _not_writable(run_dir, path, error) from None
    try:
        holder = read_holder(descriptor)
        if holder and holder.alive:
            raise _refusal(run_dir, holder)
    finally:
        os.close(descriptor)


def _create(run_dir: Path) -> list[Path]:
    """Create the folder and its parents; returns those that did not exist, innermost first."""
    for left in reversed(range(_ATTEMPTS)):
        try:
            missing = [folder for folder in (run_dir, *run_dir.parents) if not folder.exists()]
            run_dir.mkdir(parents=True, exist_ok=True)
            return missing
        except OSError as error:
            # mkdir finds a folder that another start removes before it can see that it is one.
            blocked = os.path.lexists(run_dir) and not run_dir.is_dir()
            if left and isinstance(error, FileExistsError | FileNotFoundError) and not blocked:
                continue
            raise UserError(
                f"output_dir {run_dir} cannot be created ({disk_reason(run_dir, error)}), a writable folder needed",
                "choose another output_dir",
            ) from None
    raise AssertionError("the last attempt returns or raises")


def _is_there(path: Path, descriptor: int) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), os.stat(path))
    except FileNotFoundError:
        return False


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


def _not_writable(run_dir: Path, path: Path, error: OSError) -> UserError:
    return UserError(f"output_dir {run_dir} is not writable ({disk_reason(path, error)})", "choose another output_dir")


def _refusal(run_dir: Path, holder: Holder) -> UserError:
    return UserError(
        f"{run_dir} is being trained by {holder}, 1 run per folder possible",
        "wait for it, stop it, or choose another output_dir",
    )


def _about_me() -> dict:
    return {
        "pid": os.getpid(),
        "host": socket.gethostname(),
        "slurm_job": job_name(os.environ),
        "since": time.strftime("%Y-%m-%d %H:%M:%S"),
    }


def _write(descriptor: int, text: str) -> None:
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, text.encode(), 0)
    os.fsync(descriptor)  # other nodes may read it
