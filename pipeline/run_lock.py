"""One run folder, one run: a lock that ends with the process that holds it, however that ends.

``RUN/.lock`` is locked as a whole with a POSIX record lock. Network file systems know those, and the system releases
them when their process dies, so a crash leaves no lock behind. A child process inherits none. The file's content says who
holds it, for people.

Beware: a process loses the lock as soon as it closes *any* handle of the file, so the holder opens it once.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import socket
import time
from contextlib import suppress
from pathlib import Path

from pipeline.errors import UserError
from pipeline.faults.restart import job_name
from pipeline.files import disk_reason, write_error

LOCK = ".lock"
_POLL_SECONDS = 0.5
_ATTEMPTS = 100  # of starts that are refused at the same moment, each of which removes what it has created
_HELD = (errno.EAGAIN, errno.EACCES)  # POSIX allows both
_held_here: set[Path] = set()  # a second lock of the same process would be granted, and would release the first when it closes


class RunLock:
    """The right to train in a run folder. :meth:`take` gets it; it lasts until :meth:`release` or the end of the process."""

    def __init__(self, path: Path, descriptor: int, created: list[Path]) -> None:
        self._path, self._descriptor, self._created = path, descriptor, created
        _held_here.add(path.resolve())

    @classmethod
    def take(cls, run_dir: Path, wait_seconds: float = 0) -> RunLock:
        """Lock a run folder.

        Args:
            run_dir: is created where it does not exist.
            wait_seconds: how long to wait for another holder to end, saying so once.

        Raises:
            UserError: another process holds it, the folder cannot be created or written, or its file system has no locks.
        """
        path = run_dir / LOCK
        if path.resolve() in _held_here:
            raise _refusal(run_dir, _describe(_about_me()))
        created: list[Path] = []
        for left in reversed(range(_ATTEMPTS)):
            created += _create(run_dir)
            try:
                descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
            except OSError as error:
                if left and error.errno == errno.ENOENT:
                    continue  # another start, which was refused, has just removed the folder that it had created
                raise UserError(
                    f"output_dir {run_dir} is not writable ({disk_reason(path, error)}): choose another output_dir."
                ) from None
            try:
                _wait_for_lock(descriptor, run_dir, wait_seconds)
                if not _is_there(path, descriptor):  # likewise; the lock of a removed file keeps nobody out
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
        raise UserError(f"{path} was removed {_ATTEMPTS} times, a folder that stays needed: choose another output_dir.")

    def release(self) -> None:
        """Let the next run have the folder."""
        if self._path.resolve() in _held_here:
            _held_here.discard(self._path.resolve())
            with suppress(OSError):
                _write(self._descriptor, "")  # names nobody who is gone
            os.close(self._descriptor)

    def abandon(self) -> None:
        """After a start that was refused: if it has created the folder, and nothing else is in it, both go. Else the lock stays."""
        with suppress(OSError):
            if self._created and os.listdir(self._path.parent) == [LOCK]:
                # Whoever has opened this file and waits for it sees that it is gone. Who comes later makes a new one, and then the
                # folder is not empty and stays.
                self._path.unlink()
                self.release()
                for folder in self._created:
                    folder.rmdir()


def _create(run_dir: Path) -> list[Path]:
    """The folder, and those above it; which of them were not there, the innermost first."""
    try:
        missing = [folder for folder in (run_dir, *run_dir.parents) if not folder.exists()]
        run_dir.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(
            f"output_dir {run_dir} cannot be created ({disk_reason(run_dir, error)}), a writable folder needed: choose another output_dir."
        ) from None
    return missing


def _is_there(path: Path, descriptor: int) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), os.stat(path))
    except FileNotFoundError:
        return False


def _wait_for_lock(descriptor: int, run_dir: Path, wait_seconds: float) -> None:
    until = time.monotonic() + wait_seconds
    waiting = False
    while not _try_lock(descriptor, run_dir):
        holder = _describe(_read(descriptor))
        if time.monotonic() >= until:
            raise _refusal(run_dir, holder)
        if not waiting:
            print(f"note: {run_dir} is still held by {holder}: waiting up to {wait_seconds:g} s for its end.", flush=True)
            waiting = True
        time.sleep(_POLL_SECONDS)


def _try_lock(descriptor: int, run_dir: Path) -> bool:
    try:
        fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in _HELD:
            return False
        raise UserError(
            f"{run_dir / LOCK} cannot be locked ({error.strerror}), a file system with POSIX locks needed to keep two runs apart: "
            f"have it mounted with locks (Lustre: flock, NFS: without nolock), or choose another output_dir."
        ) from None
    return True


def _refusal(run_dir: Path, holder: str) -> UserError:
    return UserError(
        f"{run_dir} is being trained by {holder}, 1 run per folder possible: wait for it, stop it, or choose another output_dir."
    )


def _about_me() -> dict:
    return {
        "pid": os.getpid(),
        "host": socket.gethostname(),
        "slurm_job": job_name(os.environ),
        "since": time.strftime("%Y-%m-%d %H:%M:%S"),
    }


def _describe(holder: dict) -> str:
    if not holder:  # it has not yet written who it is
        return "another process"
    job = f"Slurm job {holder['slurm_job']}, " if holder["slurm_job"] else ""
    return f"process {holder['pid']} on {holder['host']} ({job}since {holder['since']})"


def _read(descriptor: int) -> dict:
    try:
        return json.loads(os.pread(descriptor, 4096, 0))
    except (OSError, ValueError):
        return {}


def _write(descriptor: int, text: str) -> None:
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, text.encode(), 0)
    os.fsync(descriptor)  # other nodes are to read it
