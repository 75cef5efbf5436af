"""Note what has been sent of a run to a tracker, in a small file of this user's, so that a follower may be killed and started again.

Items are noted before they are sent. What the tracker says has arrived decides, after a failure or a restart: the note is cut to that,
and sending goes on behind it. So nothing arrives twice, and nothing is missing.

    ~/.local/state/pervit-follow/RUN-TRACKER-DIGEST.json        or in $XDG_STATE_HOME
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import secrets
from dataclasses import asdict
from pathlib import Path
from typing import Any

from pipeline.errors import UserError
from pipeline.files import lock_bytes, remove_leftovers, replace_text
from pipeline.follow.run_files import Mark
from pipeline.follow.tracker import Segment

ROWS, EVENTS, PICTURE = "rows", "events", "picture"


class Position:
    """Of one run, for one target. Holds a lock, so that no second follower sends the same.

    Args:
        run: the run folder.
        tracker: its name. target: where it sends to.
        folder: of the file; None: the user's own.

    Attributes:
        identity: of the run that was sent. segment: the present one.
        mark: the rows that were noted, by their digest.

    Raises:
        UserError: another process follows this run to this target, or the file cannot be read or written.
    """

    def __init__(self, run: Path, tracker: str, target: str, folder: Path | None = None) -> None:
        folder = folder or Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state") / "pervit-follow"
        digest = hashlib.sha256(f"{run.resolve()}\n{tracker}\n{target}".encode()).hexdigest()[:10]
        name = re.sub(r"[^\w.-]", "_", run.resolve().name)[:60]
        self.path = folder / f"{name}-{tracker}-{digest}.json"
        self._run = run
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._lock = os.open(self.path.with_suffix(".lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
            if not lock_bytes(self._lock, self.path.with_suffix(".lock")):
                raise UserError(f"{run} is already followed to {target} by another process", "end that one first")
            remove_leftovers(self.path)
        except OSError as error:
            raise self._unwritten(error) from None
        self.begin("")
        self._load()

    def begin(self, identity: str) -> None:
        """Forget all, for another run."""
        self.identity, self.mark = identity, Mark()
        self.segment = Segment(secrets.token_hex(4))
        self._entries: list[list[Any]] = []

    def rewind(self) -> None:
        """Begin the next segment of the same run."""
        last = self.segment
        base = last.id.partition("-")[0]
        earlier = (*last.earlier, last.place) if last.place else last.earlier
        self.segment = Segment(f"{base}-{last.number + 1}", last.number + 1, "", earlier)
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
            if part <= 0:
                break
            kept.append([kind, value if kind == PICTURE else part])
            count -= part
        self._entries = kept

    @property
    def sent(self) -> int:
        """Items in all."""
        return sum(1 if kind == PICTURE else value for kind, value in self._entries)

    def count(self, kind: str) -> int:
        """Rows, or events."""
        return sum(value for name, value in self._entries if name == kind)

    @property
    def pictures(self) -> set[str]:
        """Keys of the pictures."""
        return {value for kind, value in self._entries if kind == PICTURE}

    def save(self) -> None:
        """Write the file.

        Raises:
            UserError: it cannot be written.
        """
        state = {
            "run": str(self._run.resolve()),
            "identity": self.identity,
            "segment": asdict(self.segment),
            "mark": asdict(self.mark),
            "sent": self._entries,
        }
        try:
            replace_text(self.path, json.dumps(state) + "\n")
        except OSError as error:
            raise self._unwritten(error) from None

    def _unwritten(self, error: OSError) -> UserError:
        return UserError(
            f"{self.path} cannot be written ({error.strerror}), in which is noted what was sent",
            "see to its folder and the free space, or name another folder with XDG_STATE_HOME; the same command then goes on",
        )

    def release(self) -> None:
        """Let another process follow this run."""
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
            raise UserError(
                f"{self.path}, which has what was sent of {self._run}, cannot be read ({error})",
                "remove it; the run is then sent again, as a new one",
            ) from None
