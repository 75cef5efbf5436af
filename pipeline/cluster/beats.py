"""Write and read heartbeats in the job's key-value store.

They are not authenticated: whoever can write there can end the run anyway (``docs/security.md``). So what is read is validated,
and no message can end a run as if it were finished.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

import torch.distributed as dist

from pipeline.cluster.exchange import printable
from pipeline.errors import RANK_LOST, USER_ERROR

EXIT_CODES = frozenset({USER_ERROR, RANK_LOST, 130})  # that a rank may pass to the others; 130: Ctrl-C. Never success.
_LONGEST = {"host": 255, "doing": 100, "message": 4000}  # characters of a field that are kept, and so printed
_LARGEST = 65536  # bytes of a message; a heartbeat has a few hundred
_SHOWN = 60  # characters of a foreign message in the warning


class Status(str, Enum):
    """Of a rank."""

    RUNNING = "running"
    BROKEN = "broken"  # a collective failed; waits for the verdict
    INFORMED = "informed"  # has read the verdict and exits
    LEFT = "left"  # finished normally
    ENDED = "ended"  # failed, and reports its error
    VERDICT = "verdict"  # rank 0: the run must end, for the reason in the message


class Beat(NamedTuple):
    """What a rank writes with every beat of its heartbeat."""

    rank: int
    host: str = "unknown"
    pid: int = 0
    number: int = 0  # counts up: a change shows that the rank lives
    step: int = 0
    doing: str = "starting"
    calls: int = 0  # of Heartbeat.at in this step; all ranks make the same ones, so a rank with fewer is behind
    status: Status = Status.RUNNING
    message: str = ""  # the error message if BROKEN or ENDED, the sentence of a VERDICT
    exit_code: int = RANK_LOST  # for the other ranks, if ENDED or VERDICT
    hanging: tuple[int, ...] = ()  # of a VERDICT: ranks that are alive and should print where they hang

    @property
    def who(self) -> str:
        return f"rank {self.rank} (host {self.host}, pid {self.pid})"

    @property
    def place(self) -> str:
        return f"step {self.step}, {self.doing}"

    def to_json(self) -> str:
        return json.dumps(self)

    @classmethod
    def from_json(cls, text: str | bytes) -> Beat:
        """Invert ``to_json``. Anyone who reaches the store may have written the text.

        Raises:
            ValueError: it is something else, or passes an exit code to others that none may pass.
        """
        values = json.loads(text)
        if not isinstance(values, list) or [type(value) for value in values] != _TYPES:
            raise ValueError("not a heartbeat")
        fields = dict(zip(cls._fields, values, strict=True))
        numbers = [*fields["hanging"]]
        for name, value in fields.items():
            if type(value) is str:
                fields[name] = printable(value, _LONGEST.get(name, 100))
            elif type(value) is int:
                numbers.append(value)
        if not all(type(number) is int and 0 <= number < 2**63 for number in numbers):
            raise ValueError("not a heartbeat")
        if fields["exit_code"] not in EXIT_CODES:
            raise ValueError(f"the exit code must be one of {sorted(EXIT_CODES)}, got {fields['exit_code']}")
        return cls(**{**fields, "status": Status(fields["status"]), "hanging": tuple(fields["hanging"])})


_TYPES = [str if isinstance(value, str) else list if isinstance(value, tuple) else int for value in Beat(0)]  # in JSON


@dataclass(frozen=True)
class Verdict:
    """Why the run ends."""

    sentence: str
    exit_code: int = RANK_LOST
    hanging: tuple[int, ...] = ()  # ranks that are alive and should print where they hang


class Board:
    """Heartbeats in the job's key-value store. Whoever reaches it can write there: what is not a heartbeat is named once and ignored.

    Args:
        store: a connection that nothing else uses.
    """

    def __init__(self, store: dist.TCPStore) -> None:
        self._store = store
        self._newest: dict[int, Beat] = {}  # the last valid one of each rank that was read
        self._warned: set[int] = set()

    def write(self, beat: Beat) -> None:
        self._store.set(_key(beat.rank), beat.to_json())

    def read(self, ranks: Sequence[int]) -> list[Beat]:
        """The newest valid heartbeat of each rank; number 0 if it has sent none.

        Raises:
            RuntimeError: the store does not answer.
        """
        keys = [_key(rank) for rank in ranks]
        if not self._store.check(keys):  # multi_get would wait for a key that does not exist yet, or was deleted
            for key in keys:
                self._store.compare_set(key, "", "")
        for rank, note in zip(ranks, self._store.multi_get(keys), strict=True):
            self._take(rank, note)
        return [self._newest[rank] for rank in ranks]

    def _take(self, rank: int, note: bytes) -> None:
        self._newest.setdefault(rank, Beat(rank, os.environ["MASTER_ADDR"] if rank == 0 else "unknown"))
        try:
            beat = Beat.from_json(note) if 0 < len(note) <= _LARGEST else None
            if beat and beat.rank == rank:
                self._newest[rank] = beat
                return
        except (ValueError, RecursionError):
            pass
        if note and rank not in self._warned:
            self._warned.add(rank)
            warning = (
                f"warning: {_key(rank)} in the job's store at {os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']} is not a "
                f"heartbeat ({printable(note[: 4 * _SHOWN].decode(errors='replace'), _SHOWN)}) and is ignored: somebody else writes "
                f"to this port; see the repository's docs/security.md for how to keep strangers out"
            )
            with suppress(OSError):  # the terminal may be gone
                # Not through the logger: this is a thread, and a main thread that hangs may hold a lock of sys.stderr.
                os.write(2, f"{warning}\n".encode())


def _key(rank: int) -> str:
    return f"heartbeat/{rank}"
