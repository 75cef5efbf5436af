"""What a run folder tells, each time only what is new; and whether a resume has rewound it.

``metrics.jsonl`` grows, until a resume cuts it back to the step of its checkpoint: then the rows that were read before no longer begin
the file. A digest of them tells, however the file came to be another one; a copy that rsync renews is not a rewind.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections import deque
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import yaml

from pipeline.follow.pictures import PictureFiles
from pipeline.follow.tracker import Point, event_values, row_values

CONFIG, ENVIRONMENT, METRICS, EVENTS, LOCK = "config.yaml", "environment.json", "metrics.jsonl", "events.jsonl", ".lock"
_BLOCK = 1 << 20  # bytes read at once
_WAITING = 10_000  # rows that are kept in memory until they are sent, about
_LARGEST_STEP = 2**53


@dataclass(frozen=True)
class Mark:
    """The first ``rows`` rows of a file, by the digest of their lines."""

    rows: int = 0
    digest: str = hashlib.blake2b(digest_size=16).hexdigest()


class GrowingRows:
    """The JSON objects of a file of lines, which grows, and may be cut or replaced.

    Args:
        path: it need not exist yet.

    Attributes:
        row: number of the next row, counted from 0. last_step: of the row before it; -1 before the first.
        unreadable: whole lines, of those read so far, that are none.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file: tuple[int, int] | None = None  # device and inode
        self._size = 0
        self.go_to(0)

    def go_to(self, row: int) -> None:
        """Let the next row be this one, counted from 0."""
        self._place, self._begun = 0, b""  # bytes read; of a line that has no end yet
        self._waiting: deque[tuple[dict[str, Any], bytes]] = deque()
        self._hash, self.row, self.last_step = hashlib.blake2b(digest_size=16), 0, -1
        self._next, self.unreadable = row, 0

    def look(self) -> None:
        """Read what is whole, until some thousands of rows wait.

        Raises:
            OSError: the file cannot be read; not if it does not exist.
        """
        if (file := self._open()) is None:
            return
        with file:
            file.seek(self._place)
            while len(self._waiting) < _WAITING and (block := file.read(_BLOCK)):
                self._place += len(block)
                *whole, self._begun = (self._begun + block).split(b"\n")
                for line in whole:
                    if (row := _row(line)) is not None:
                        self._waiting.append((row, line))
                    elif line.strip():
                        self.unreadable += 1
                while self._waiting and self.row < self._next:
                    self._take()

    def was_replaced(self) -> bool:
        """Whether the file is another one than at the last look, or shorter than what was read of it. One that is gone is not."""
        try:
            now = os.stat(self.path)
        except OSError:
            return False
        return self._file is not None and ((now.st_dev, now.st_ino) != self._file or now.st_size < self._place)

    def peek(self, most: int) -> list[dict[str, Any]]:
        """The next rows, at most so many."""
        return [row for row, _ in islice(self._waiting, most)]

    def take(self, count: int) -> None:
        """Go on behind so many rows of those of :meth:`peek`."""
        for _ in range(count):
            self._take()

    @property
    def mark(self) -> Mark:
        """Of the rows before the next one."""
        return Mark(self.row, self._hash.hexdigest())

    def begins_with(self, mark: Mark) -> bool:
        """Whether these rows begin the file as it is now. The next row is the one behind them then, and the first one otherwise."""
        self.go_to(mark.rows)
        self.look()
        same = self.mark == mark
        if not same:
            self.go_to(0)
            self.look()
        return same

    def _open(self) -> Any:
        try:
            file = open(self.path, "rb")
        except FileNotFoundError:
            return None
        there = os.fstat(file.fileno())
        self._file = (there.st_dev, there.st_ino)
        return file

    def _take(self) -> None:
        row, line = self._waiting.popleft()
        self.last_step = row["step"]
        self._hash.update(line + b"\n")
        self.row += 1


def _row(line: bytes) -> dict[str, Any] | None:
    """A line as a row; None if it is none: a row has a step and a time."""
    try:
        row = json.loads(line)
        step = row["step"]
        float(row["time"])
    except (ValueError, KeyError, TypeError, RecursionError):
        return None
    return row if isinstance(step, int) and not isinstance(step, bool) and 0 <= step < _LARGEST_STEP else None


class RunFiles:
    """A run folder, for reading alone. It need not exist yet."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.metrics, self.events = GrowingRows(path / METRICS), GrowingRows(path / EVENTS)
        self.pictures = PictureFiles(path / "tensorboard")

    @property
    def has_begun(self) -> bool:
        """Whether there is a run to tell of."""
        return (self.path / CONFIG).is_file() and (self.path / METRICS).is_file()

    @property
    def config(self) -> dict[str, Any]:
        """Section -> key -> value; empty if it cannot be read."""
        with suppress(OSError, ValueError, yaml.YAMLError, RecursionError):
            read = yaml.safe_load((self.path / CONFIG).read_text())
            return read if isinstance(read, dict) else {}
        return {}

    @property
    def starts(self) -> list[dict[str, Any]]:
        """``environment.json``; empty if it cannot be read."""
        with suppress(OSError, ValueError, RecursionError):
            read = json.loads((self.path / ENVIRONMENT).read_text())
            return [start for start in read if isinstance(start, dict)] if isinstance(read, list) else []
        return []

    @property
    def identity(self) -> str:
        """Tells two runs apart that had the folder one after the other: its first start."""
        first = self.starts[:1]
        return hashlib.sha256(json.dumps(first, sort_keys=True).encode()).hexdigest()[:12] if first else ""

    def texts(self) -> dict[str, str]:
        """Files that are sent whole, by name."""
        found = {}
        for name in (CONFIG, ENVIRONMENT, EVENTS):
            with suppress(OSError):
                found[name] = (self.path / name).read_text(errors="replace")
        return found

    def state(self) -> tuple[object, ...]:
        """Changes when one of the small files does."""

        def of(name: str) -> object:
            with suppress(OSError):
                found = os.stat(self.path / name)
                return found.st_ino, found.st_size, found.st_mtime_ns
            return None

        return tuple(map(of, (CONFIG, ENVIRONMENT, EVENTS)))

    def is_complete(self) -> bool:
        """Whether the schedule's end was reached and the folder was released."""
        try:
            if (self.path / LOCK).read_text().strip():
                return False
        except OSError:
            pass
        events = list(_objects(self.path / EVENTS))
        if any(event.get("event") == "start" for event in events):
            return events[-1].get("event") == "end" and events[-1].get("whole") is True
        from pipeline.errors import UserError
        from pipeline.reports.run_folder import read_run

        try:
            return read_run(self.path).finished  # a run from before there was events.jsonl
        except UserError:
            return False


def _objects(path: Path) -> Iterator[dict[str, Any]]:
    with suppress(OSError):
        for line in path.read_bytes().splitlines():
            with suppress(ValueError, RecursionError):
                found = json.loads(line)
                if isinstance(found, dict):
                    yield found


def points(rows: list[dict[str, Any]], of_events: bool = False) -> list[Point]:
    """Rows as they are sent."""
    values = event_values if of_events else row_values
    return [Point(row["step"], float(row["time"]), values(row)) for row in rows]
