"""Let a run's store follow its folder, in a thread of each rank: no step waits for an upload.

Each rank copies the part of a checkpoint that it has written, of one checkpoint at a time, the newest first. What waits meanwhile is
dropped when a newer save comes, unless retention has another reason to keep it. The ranks hear by their exchange of status that every
part is confirmed; then rank 0 writes the manifest, and all go on with the next. A part stays open until it is copied, so that retention
in the folder does not take it away.

A store that does not answer, or refuses, is tried again for ever; the run goes on, and what is kept on the disk is bounded by retention.
"""

import logging
import os
import queue
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from pipeline.checkpoint.bucket import RunStore
from pipeline.checkpoint.folder import FOLDER, kept
from pipeline.checkpoint.manifest import CheckpointManifest, FileRecord
from pipeline.cluster.agreement import Agreement
from pipeline.errors import UserError, first_line
from pipeline.stores.lock import LockLost, StoreLock
from pipeline.stores.store import StoreFails

_log = logging.getLogger(__name__)
_EVERY = 30.0  # seconds between two copies of the growing files
_SHARE = 20  # a file that took a second is copied again after so many: large ones do not fill the line
_FIRST_PAUSE, _LONGEST_PAUSE = 1.0, 60.0  # seconds between attempts after the store itself was given up
_LAST_FILES = 20.0  # seconds at an end with an error for the files that tell of it


@dataclass(eq=False)
class _Save:
    """A checkpoint that is to be copied."""

    manifest: CheckpointManifest
    part: FileRecord | None  # of this rank
    descriptor: int | None  # of that part's file, which may have lost its name
    path: Path | None  # of that file, if it is to be removed after use

    @property
    def step(self) -> int:
        return self.manifest.state.step

    def drop(self) -> None:
        if self.descriptor is not None:
            os.close(self.descriptor)
        if self.path:
            with suppress(OSError):
                self.path.unlink(missing_ok=True)
                self.path.parent.rmdir()


class Mirror:
    """Copies a run to its store.

    Args:
        lock: of the place, on rank 0, which writes manifests and removes what is old; None elsewhere.
        leads: whether this rank copies the files of its folder that are no checkpoints.
        apart: whether the nodes have a folder each, so that no folder ever has a whole checkpoint but what was fetched.
    """

    def __init__(self, run_dir: Path, store: RunStore, lock: StoreLock | None, leads: bool, apart: bool) -> None:
        self._run_dir, self._store, self._lock, self._leads, self.apart = run_dir, store, lock, leads, apart
        self._waiting: list[_Save] = []  # by step, ascending
        self._current: _Save | None = None
        self._turn = 0  # of the current one, counted from 1; the same on all ranks
        self.sent = 0  # checkpoints of which this rank has copied its part, or had none
        self._ordered = self._published = 0  # manifests; the second is counted by the thread
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._copied: dict[str, tuple[tuple[int, ...], float]] = {}  # file -> its stamp, and when it may be copied again
        self._closing, self._warned = threading.Event(), False
        self.failure: UserError | None = None  # why this run may not write to the store any more
        self._thread = threading.Thread(target=self._work, name="mirror", daemon=True)

    def start(self) -> None:
        """Begin to write: the run is that which the store has."""
        self._jobs.put(self._copy_files)
        self._thread.start()

    @property
    def backlog(self) -> int:
        """Bytes of this rank's parts that are not in the store yet."""
        saves = [*self._waiting, *([self._current] if self._current and self.sent < self._turn else [])]
        return sum(save.part.bytes for save in saves if save.part)

    @property
    def busy(self) -> bool:
        """Whether a checkpoint is not in the store yet."""
        return bool(self._current or self._waiting or self._published < self._ordered)

    def add(self, manifest: CheckpointManifest, part: FileRecord | None, path: Path, descriptor: int | None) -> None:
        """Take a save that all ranks have written, with the ``part`` of this rank, if it has one, in a file that had this path
        when it was opened. On all ranks, at the same step."""
        save = _Save(manifest, part, descriptor, path if self.apart else None)
        if self._lock and self._current and not self._waiting:
            place = self._store.place
            _log.info(f"note: the upload of step {self._current.step} to {place} goes on; that of step {save.step} waits")
        waiting = [*(each for each in self._waiting if each.step != save.step), save]
        stay = kept(sorted(each.step for each in waiting), manifest.state, keep_last=1)
        before, self._waiting = self._waiting, sorted((s for s in waiting if s.step in stay), key=lambda save: save.step)
        for each in before:
            if each not in self._waiting:
                each.drop()
        self._next()

    def settle(self, sent: int) -> None:
        """Go on when all ranks have ``sent`` their parts. On all ranks, at the same exchange."""
        if self._current and sent >= self._turn:
            done, self._current = self._current, None
            if self._lock:
                self._ordered += 1
                self._jobs.put(partial(self._publish, done.manifest))
            done.drop()
            self._next()

    def finish(
        self, agreement: Agreement, stop: Callable[[], bool], waiting: Callable[[], None], seconds: float | None
    ) -> bool:
        """Wait until every checkpoint is in the store, at most so many seconds, None: until a rank has to ``stop``; returns whether all
        is there. ``waiting`` is called repeatedly meanwhile. Collective."""
        began = time.monotonic()
        while agreement.ask(self.busy):
            self.settle(agreement.exchange(sent=self.sent).sent)
            late = stop() if seconds is None else time.monotonic() - began > seconds
            if agreement.ask(late or self.failure is not None):
                if self._lock and not self.failure:
                    rest = "begins with an older one" if self.apart else "on this machine copies the rest"
                    _log.warning(f"not every checkpoint of this run is in {self._store.place}: the next start {rest}")
                return False
            waiting()
            time.sleep(0.02)
        return True

    def close(self, seconds: float = _LAST_FILES) -> None:
        """Copy the files as they are now, for some seconds at most, and let the next run have the place."""
        if self._thread.ident is not None:
            self._jobs.put(partial(self._copy_files, everything=True))
            self._jobs.put(None)
            self._thread.join(min(seconds, _LAST_FILES) if self.busy else seconds)
        self._closing.set()
        if self._lock:
            self._lock.release()

    def _next(self) -> None:
        if not self._current and self._waiting:
            self._current = self._waiting.pop()
            self._turn += 1
            self._jobs.put(partial(self._send, self._current, self._turn))

    def _work(self) -> None:
        while not self._closing.is_set():
            try:
                job = self._jobs.get(timeout=_EVERY)
            except queue.Empty:
                job = self._copy_files
            if job is None:
                return
            self._insist(job)

    def _insist(self, job: Callable[[], None]) -> None:
        """Do something, however often that has to be tried."""
        pause = _FIRST_PAUSE
        while self.failure is None:
            try:
                job()
                if self._warned:
                    self._warned = False
                    _log.warning(f"{self._store.place} can be written again")
                return
            except LockLost as error:
                self.failure = error
            except Exception as error:  # whatever it is, the run goes on, and so does this thread
                if not self._warned:
                    self._warned = True
                    problem = error.problem if isinstance(error, UserError) else first_line(error)
                    _log.warning(f"{problem}: the run goes on in {self._run_dir}, its upload is tried again until it succeeds")
                if isinstance(error, StoreFails):
                    self._store.reopen()
                if self._closing.wait(pause):
                    return
                pause = min(2 * pause, _LONGEST_PAUSE)

    def _send(self, save: _Save, turn: int) -> None:
        """Copy what this rank has of a checkpoint; before it the files, whose rows lead to it."""
        self._copy_files(everything=True)
        if save.part:
            self._store.put_part(save.step, save.part, Path(f"/proc/self/fd/{save.descriptor}"))
        self.sent = turn

    def _publish(self, manifest: CheckpointManifest) -> None:
        assert self._lock
        self._lock.renew()  # whoever took the place decides what is there
        self._store.put_manifest(manifest)
        self._store.remove_old(manifest, busy=[save.step for save in (*self._waiting, self._current) if save])
        self._published += 1

    def _copy_files(self, everything: bool = False) -> None:
        """Copy the files that have changed; without ``everything``, large ones not every time."""
        if not self._leads:
            return
        if self._lock:
            self._lock.renew()
        for folder, names, files in os.walk(self._run_dir):
            here = Path(folder)
            names[:] = [name for name in names if name != FOLDER and not name.startswith(".")]
            for path in (here / name for name in files if not name.startswith(".")):
                with suppress(FileNotFoundError):  # removed meanwhile
                    self._copy(path, path.relative_to(self._run_dir).as_posix(), everything)

    def _copy(self, path: Path, name: str, everything: bool) -> None:
        about, began = path.stat(), time.monotonic()
        stamp = (about.st_ino, about.st_size, about.st_mtime_ns)
        before, due = self._copied.get(name, (None, 0.0))
        if stamp != before and (everything or began >= due):
            self._store.put(name, path, about.st_size)
            self._copied[name] = stamp, time.monotonic() + _SHARE * (time.monotonic() - began)
