"""Read the rows of a run that are new, and note what has been sent, in a small file of this user's, so that a sender may be killed.

``metrics.jsonl`` grows, until a resume cuts it back to the step of its checkpoint: then the rows that were read before no longer begin
the file. A digest of them tells, however the file came to be another one; a copy that rsync renews is not a rewind.

Items are noted before they are sent. What the tracker says has arrived decides, after a failure or a restart: the note is cut to that,
and sending goes on behind it. So nothing arrives twice, and nothing is missing.

    ~/.local/state/pervit-track/RUN-TRACKER-DIGEST.json        or in $XDG_STATE_HOME
"""

import hashlib
import json
import os
import re
import secrets
from collections import deque
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from pipeline.errors import UserError
from pipeline.files import lock_bytes, remove_leftovers, replace_text
from pipeline.runs.rows import Row, Tail, is_number, parse_row
from pipeline.track.tracker import Segment

ROWS, EVENTS, PICTURE = "rows", "events", "picture"
_WAITING = 10_000  # rows that are kept in memory until they are sent, about


@dataclass(frozen=True)
class Mark:
    """The first ``rows`` rows of a file, by the digest of their lines."""

    rows: int = 0
    digest: str = hashlib.blake2b(digest_size=16).hexdigest()


class GrowingRows:
    """The rows of a file of JSON lines, which need not exist yet, grows, and may be cut or replaced."""

    row: int  # number of the next row, counted from 0
    last_step: int  # of the row before it; -1 before the first
    unreadable: int  # whole lines, of those read so far, that are not rows with a step and a time

    def __init__(self, path: Path) -> None:
        self._tail = Tail(path)
        self.was_replaced = self._tail.was_replaced
        self.go_to(0)

    def go_to(self, row: int) -> None:
        """Let the next row be this one, counted from 0."""
        self._tail.rewind()
        self._waiting: deque[tuple[Row, bytes]] = deque()
        self._hash, self._next = hashlib.blake2b(digest_size=16), row
        self.row, self.last_step, self.unreadable = 0, -1, 0

    def take(self, most: int) -> list[Row]:
        """The next rows that are whole, at most so many. Raises OSError: the file cannot be read; not if it does not exist."""
        self._look()
        return self._pass(most)

    def _look(self) -> None:
        """Read until some thousands of rows wait."""
        for line in self._tail.lines():
            row = parse_row(line)
            if row is not None and is_number(row.get("time")):
                self._waiting.append((row, line))
                self._pass(self._next - self.row)
            elif line.strip():
                self.unreadable += 1
            if len(self._waiting) >= _WAITING:
                return

    def _pass(self, most: int) -> list[Row]:
        rows: list[Row] = []
        while self._waiting and len(rows) < most:
            row, line = self._waiting.popleft()
            self._hash.update(line + b"\n")
            self.row, self.last_step = self.row + 1, row["step"]
            rows.append(row)
        return rows

    @property
    def mark(self) -> Mark:
        """Of the rows before the next one."""
        return Mark(self.row, self._hash.hexdigest())

    def begins_with(self, mark: Mark) -> bool:
        """Whether these rows begin the file as it is now. The next row is the one behind them then, and the first one otherwise."""
        self.go_to(mark.rows)
        self._look()
        same = self.mark == mark
        if not same:
            self.go_to(0)
        return same


class Position:
    """What of one run was sent to one target of a tracker. Holds a lock, so that no second sender sends the same. ``folder``: of the file;
    None: the user's own. Raises UserError: another process sends this run to this target, or the file cannot be read or written."""

    identity: str  # of the run that was sent
    segment: Segment  # the present one
    mark: Mark  # the rows that were noted, by their digest

    def __init__(self, run: Path, tracker: str, target: str, folder: Path | None = None) -> None:
        folder = folder or Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state") / "pervit-track"
        digest = hashlib.sha256(f"{run.resolve()}\n{tracker}\n{target}".encode()).hexdigest()[:10]
        name = re.sub(r"[^\w.-]", "_", run.resolve().name)[:60]
        self.path, self._run = folder / f"{name}-{tracker}-{digest}.json", run
        lock = self.path.with_suffix(".lock")
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._lock = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
            if not lock_bytes(self._lock, lock):
                raise UserError(f"{run} is already being sent to {target} by another process", "end that one first")
            remove_leftovers(self.path)
        except OSError as error:
            raise self._unwritten(error) from None
        self.begin("")
        self._load()

    def begin(self, identity: str) -> None:
        """Forget all, for another run."""
        self.identity, self.mark = identity, Mark()
        self.segment = Segment(secrets.token_hex(4))
        self._entries: list[list[Any]] = []  # kind and number of rows or of events, or a picture's key

    def rewind(self) -> None:
        """Begin the next segment of the same run."""
        last = self.segment
        earlier = (*last.earlier, last.place) if last.place else last.earlier
        self.segment = Segment(f"{last.base}-{last.number + 1}", last.number + 1, "", earlier)
        self.mark, self._entries = Mark(), []

    def note(self, kind: str, value: int | str) -> None:
        """Add items: a number of rows or of events, or a picture's key."""
        if kind != PICTURE and self._entries and self._entries[-1][0] == kind:
            self._entries[-1][1] += value
        elif value:
            self._entries.append([kind, value])

    def cut(self, count: int) -> None:
        """Keep the first so many items."""
        kept: list[list[Any]] = []
        for kind, value in self._entries:
            part = min(count, 1 if kind == PICTURE else value)
            if part > 0:
                kept.append([kind, value if kind == PICTURE else part])
                count -= part
        self._entries = kept

    @property
    def sent(self) -> int:
        """Items in all."""
        return sum(map(self.count, (ROWS, EVENTS, PICTURE)))

    def count(self, kind: str) -> int:
        """Items of a kind."""
        return sum(1 if kind == PICTURE else value for name, value in self._entries if name == kind)

    @property
    def pictures(self) -> set[str]:
        """Keys of the pictures."""
        return {value for kind, value in self._entries if kind == PICTURE}

    def save(self) -> None:
        """Write the file. Raises UserError: it cannot be written."""
        state = {"run": str(self._run.resolve()), "identity": self.identity}
        noted = {"segment": asdict(self.segment), "mark": asdict(self.mark), "sent": self._entries}
        try:
            replace_text(self.path, json.dumps({**state, **noted}) + "\n")
        except OSError as error:
            raise self._unwritten(error) from None

    def _unwritten(self, error: OSError) -> UserError:
        do = "see to its folder and the free space, or name another folder with XDG_STATE_HOME; the same command then continues"
        return UserError(f"{self.path} cannot be written ({error.strerror}), in which is noted what was sent", do)

    def release(self) -> None:
        """Let another process send this run."""
        os.close(self._lock)

    def _load(self) -> None:
        try:
            state = json.loads(self.path.read_text())
            self.identity = str(state["identity"])
            self.segment = Segment(**{**state["segment"], "earlier": tuple(state["segment"]["earlier"])})
            self.mark = Mark(**state["mark"])
            self._entries = [[str(kind), value if kind == PICTURE else int(value)] for kind, value in state["sent"]]
        except FileNotFoundError:
            return
        except (OSError, ValueError, KeyError, TypeError) as error:
            problem = f"{self.path}, which has what was sent of {self._run}, cannot be read ({error})"
            raise UserError(problem, "remove it; the run is then sent again, as a new one") from None
