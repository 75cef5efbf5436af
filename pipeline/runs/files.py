"""Read the small files of a run folder, its checkpoints and its lock, as far as they can be read; say in sentences what is damaged.

Nothing here needs PyTorch.
"""

import errno
import json
import os
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from pipeline.checkpoint.folder import FETCHED, SAVING, saved_steps, step_folder
from pipeline.checkpoint.manifest import MANIFEST, CheckpointManifest, find_damage
from pipeline.config import parse_value
from pipeline.errors import UserError
from pipeline.files import is_locked_by_another, open_regular
from pipeline.runs import CHECKPOINTS, CONFIG, ENVIRONMENT, EVENTS, LOCK, RESTARTS
from pipeline.runs.rows import Row, is_number, lines_left_out, parse_row
from pipeline.stores.lock import STALE

_LARGEST_FILE = 64 << 20  # bytes of a file that is read as a whole: none of these comes near it
_RECORDED = ("pid", "host", "slurm_job", "since")  # of a holder, in the lock file
_Content = TypeVar("_Content")
Stamp = tuple[int, int, int] | None  # inode, size, modification time; None: it is not there


@dataclass(frozen=True)
class Holder:
    """The process that the lock file of a run names; None where it does not tell."""

    pid: int | None = None
    host: str | None = None
    slurm_job: str | None = None
    since: str | None = None  # a date and time
    alive: bool = False  # it holds the lock now, as far as this machine can see

    def record(self) -> str:
        """What the lock file holds of it, which :func:`read_holder` reads."""
        return json.dumps({name: getattr(self, name) for name in _RECORDED}) + "\n"

    def __str__(self) -> str:
        if self.pid is None:  # it has not written its name yet
            return "another process"
        job = f"Slurm job {self.slurm_job}, " if self.slurm_job else ""
        return f"process {self.pid} on {self.host} ({job}since {self.since})"


def read_holder(descriptor: int) -> Holder | None:
    """Read an open lock file; None if nobody holds it and it names nobody, as one that was released in order. Whoever holds a
    lock must not call this: to close another descriptor of the file would release it."""
    alive, told = False, None
    try:
        alive = is_locked_by_another(descriptor)
        told = json.loads(os.pread(descriptor, 4096, 0) or b"null")  # a record has about 150 bytes
        if isinstance(told, dict) and is_number(beat := told.get("beat")):  # a copy of a store's lock
            alive = time.time() - beat < STALE
    except (OSError, ValueError, RecursionError):
        pass
    if isinstance(told, dict):
        return Holder(**{name: told.get(name) for name in _RECORDED}, alive=alive)
    return Holder(alive=alive) if alive else None


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint's folder."""

    step: int
    folder: Path
    manifest: CheckpointManifest | None  # None where it cannot be read
    problem: str | None  # what is damaged; None where manifest and files' sizes are right. Checksums are not compared
    written: float  # Unix time in seconds

    @property
    def bytes(self) -> int | None:
        """Size of its files by the manifest."""
        return sum(file.bytes for file in self.manifest.files) if self.manifest else None


class RunFiles:
    """The small files of a run folder, which need not exist yet. :meth:`look` reads what has changed."""

    config: dict[str, Any]  # section -> key -> value; that of the newest readable checkpoint where ``config.yaml`` tells none
    precision: str  # the first line of ``config.yaml``: the precision and why it was chosen
    starts: list[dict[str, Any]]  # entries of ``environment.json``
    events: list[Row]  # rows of ``events.jsonl``
    restarts: list[dict[str, Any]]  # entries of ``restarts.json``
    checkpoints: list[Checkpoint]  # ascending by step
    saving: bool  # whether another checkpoint is being written, or was when the run was killed
    holder: Holder | None  # who trains, or ended without releasing the folder
    problems: list[str]  # what is damaged, a sentence each; a file that is not there is none

    def __init__(self, path: Path) -> None:
        self.path = path
        self._read: dict[Path, tuple[Stamp, Any]] = {}
        self.look()

    def look(self) -> None:
        """Read what has changed."""
        self.problems = []
        self.checkpoints = self._checkpoints()
        self.config, self.precision = self._file(CONFIG, _config) or ({}, "")
        if not self.config and (newest := self.newest_manifest):
            self.problems.append(f"The config shown is that of the checkpoint of step {newest.state.step}.")
            self.config = dict(newest.state.config)
        self.starts = self._file(ENVIRONMENT, _entries) or []
        self.events, damaged = self._file(EVENTS, _rows) or ([], 0)
        self.problems += [lines_left_out(damaged, EVENTS)] if damaged else []
        self.restarts = self._file(RESTARTS, _entries) or []
        self.holder, self.saving = None, False
        with suppress(OSError), open(open_regular(self.path / LOCK), "rb") as file:
            self.holder = read_holder(file.fileno())
        with suppress(OSError):
            self.saving = any(name.startswith(SAVING) for name in os.listdir(self.path / CHECKPOINTS))

    @property
    def stamps(self) -> tuple[Stamp, ...]:
        """Changes when one of the small files does."""
        return tuple(_stamp(self.path / name) for name in (CONFIG, ENVIRONMENT, EVENTS))

    def value(self, key: str) -> Any:
        """A value of the config by its dotted key; None where there is none."""
        section, _, name = key.rpartition(".")
        values = self.config.get(section) if section else self.config
        return values.get(name) if isinstance(values, dict) else None

    def number(self, key: str) -> float | None:
        """A number of the config by its dotted key; None where there is none."""
        value = self.value(key)
        return value if is_number(value) else None

    @property
    def newest_manifest(self) -> CheckpointManifest | None:
        """That of the newest checkpoint of which it can be read."""
        return next((found.manifest for found in reversed(self.checkpoints) if found.manifest), None)

    @property
    def newest_intact(self) -> CheckpointManifest | None:
        """That of the newest checkpoint without damage."""
        return next((found.manifest for found in reversed(self.checkpoints) if not found.problem), None)

    @property
    def newest_start(self) -> Row:
        """The newest start's row of ``events.jsonl``; empty without one."""
        return next((row for row in reversed(self.events) if row.get("event") == "start"), {})

    def seconds_of(self, event: str) -> list[float]:
        """How long each of a kind of events took, such as ``evaluation`` or ``save``."""
        return [row["seconds"] for row in self.events if row.get("event") == event and is_number(row.get("seconds"))]

    def _file(self, name: str, parse: Callable[[str], _Content]) -> _Content | None:
        """A file's content; None if it is not there or cannot be read."""
        content, problem = self._unless_changed(self.path / name, lambda: _parsed(self.path / name, parse))
        self.problems += [problem] if problem else []
        return content

    def _checkpoints(self) -> list[Checkpoint]:
        folders = {step: step_folder(self.path, step) for step in saved_steps(self.path)}
        found = [self._unless_changed(at / MANIFEST, partial(_checkpoint, step, at)) for step, at in folders.items()]
        found = [checkpoint for checkpoint in found if checkpoint.folder.exists()]  # others were removed meanwhile
        self.problems += [checkpoint.problem for checkpoint in found if checkpoint.problem]
        return found

    def _unless_changed(self, path: Path, read: Callable[[], _Content]) -> _Content:
        """What was read of a file before, if it is still the same."""
        stamp = _stamp(path)
        if path not in self._read or self._read[path][0] != stamp:
            self._read[path] = (stamp, read())
        return self._read[path][1]


def _parsed(path: Path, parse: Callable[[str], _Content]) -> tuple[_Content | None, str]:
    """A file's content, and what is wrong with it."""
    try:
        if path.stat().st_size > _LARGEST_FILE:
            raise OSError(errno.EFBIG, os.strerror(errno.EFBIG))
        return parse(path.read_text(encoding="utf-8", errors="replace")), ""
    except FileNotFoundError:
        return None, ""
    except OSError as error:
        return None, f"{path.name} cannot be read ({error.strerror})."
    except (ValueError, RecursionError) as error:
        return None, f"{path.name} is damaged ({' '.join(str(error).split())[:120]})."


def _config(text: str) -> tuple[dict[str, Any], str]:
    tree = parse_value(text)
    if not isinstance(tree, dict) or not tree:
        raise ValueError("it holds no keys")
    first = text.partition("\n")[0]
    return {str(key): value for key, value in tree.items()}, first[2:].strip() if first.startswith("# ") else ""


def _entries(text: str) -> list[dict[str, Any]]:
    """The objects of a JSON list; what else it holds is left out."""
    entries = json.loads(text)
    if not isinstance(entries, list):
        raise ValueError("it is not a list")
    return [entry for entry in entries if isinstance(entry, dict)]


def _rows(text: str) -> tuple[list[Row], int]:
    """Rows, and the number of damaged lines."""
    rows = [parse_row(line) for line in text.encode().split(b"\n") if line.strip()]
    return [row for row in rows if row is not None], rows.count(None)


def _checkpoint(step: int, folder: Path) -> Checkpoint:
    manifest, problem = None, None
    try:
        manifest = CheckpointManifest.read(folder)
        copied = (folder.parents[1] / FETCHED).exists()  # of a run in a store, parts only if they are needed
        problem = None if copied else "; ".join(find_damage(folder, manifest.files, contents=False)) or None
    except UserError as error:
        problem = str(error)
    except OSError as error:
        problem = f"{folder} cannot be read ({error.strerror})."
    stamp = _stamp(folder / MANIFEST) or _stamp(folder)
    return Checkpoint(step, folder, manifest, problem, stamp[2] / 1e9 if stamp else 0.0)


def _stamp(path: Path) -> Stamp:
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_ino, found.st_size, found.st_mtime_ns
