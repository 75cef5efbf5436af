"""Read from a run folder what is new, and see whether a resume has rewound it.

``metrics.jsonl`` grows, until a resume cuts it back to the step of its checkpoint: then the rows that were read before no longer begin
the file. A digest of them tells, however the file came to be another one; a copy that rsync renews is not a rewind.
"""

from __future__ import annotations

import hashlib
import json
from collections import deque
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from pipeline.runs import CONFIG, ENVIRONMENT, EVENTS, METRICS, TENSORBOARD
from pipeline.runs.files import RunFiles
from pipeline.runs.pictures import PictureFiles
from pipeline.runs.rows import Row, Tail, is_number, parse_row

_WAITING = 10_000  # rows that are kept in memory until they are sent, about


@dataclass(frozen=True)
class Mark:
    """The first ``rows`` rows of a file, by the digest of their lines."""

    rows: int = 0
    digest: str = hashlib.blake2b(digest_size=16).hexdigest()


class GrowingRows:
    """The rows of a file of JSON lines, which grows, and may be cut or replaced.

    Args:
        path: it need not exist yet.

    Attributes:
        row: number of the next row, counted from 0. last_step: of the row before it; -1 before the first.
        unreadable: whole lines, of those read so far, that are not rows with a step and a time.
    """

    def __init__(self, path: Path) -> None:
        self._tail = Tail(path)
        self.was_replaced = self._tail.was_replaced
        self.go_to(0)

    def go_to(self, row: int) -> None:
        """Let the next row be this one, counted from 0."""
        self._tail.rewind()
        self._waiting: deque[tuple[Row, bytes]] = deque()
        self._hash, self.row, self.last_step = hashlib.blake2b(digest_size=16), 0, -1
        self._next, self.unreadable = row, 0

    def look(self) -> None:
        """Read what is whole, until some thousands of rows wait.

        Raises:
            OSError: the file cannot be read; not if it does not exist.
        """
        blocks = self._tail.blocks()
        while len(self._waiting) < _WAITING and (lines := next(blocks, None)) is not None:
            for line in lines:
                row = parse_row(line)
                if row is not None and is_number(row.get("time")):
                    self._waiting.append((row, line))
                elif line.strip():
                    self.unreadable += 1
            while self._waiting and self.row < self._next:
                self._take()

    def peek(self, most: int) -> list[Row]:
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

    def _take(self) -> None:
        row, line = self._waiting.popleft()
        self.last_step = row["step"]
        self._hash.update(line + b"\n")
        self.row += 1


class FollowedRun(RunFiles):
    """A run folder with the rows and pictures that are to be sent. It need not exist yet."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.metrics, self.event_rows = GrowingRows(path / METRICS), GrowingRows(path / EVENTS)
        self.pictures = PictureFiles(path / TENSORBOARD)

    @property
    def has_begun(self) -> bool:
        """Whether there is a run to tell of."""
        return (self.path / CONFIG).is_file() and (self.path / METRICS).is_file()

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
