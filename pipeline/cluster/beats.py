"""Write and read heartbeats in the job's key-value store.

They are not authenticated: whoever can write there can end the run anyway (``docs/security.md``). So what is read is validated,
and no message can end a run as if it were finished.
"""

import json
import os
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from enum import Enum
from typing import Annotated, NamedTuple

import torch.distributed as dist
from pydantic import AfterValidator, Field, TypeAdapter

from pipeline.errors import RANK_LOST, USER_ERROR, printable

_EXIT_CODES = (USER_ERROR, RANK_LOST, 130)  # that a rank may pass to the others; 130: Ctrl-C. Never success.
_LARGEST = 65536  # bytes of a message; a heartbeat has a few hundred
_SHOWN = 60  # characters of a foreign message in the warning


def _check_code(code: int) -> int:
    if code not in _EXIT_CODES:
        raise ValueError(f"the exit code must be one of {_EXIT_CODES}, got {code}")
    return code


def _at_most(characters: int) -> AfterValidator:
    """Text that is printed is cut and without control characters."""
    return AfterValidator(lambda text: printable(text, characters))


# Strict: no conversions.
_Number = Annotated[int, Field(strict=True, ge=0, lt=2**63)]
_Text = Annotated[str, Field(strict=True)]


class Status(str, Enum):
    RUNNING = "running"
    BROKEN = "broken"  # a collective failed; waits for the verdict
    INFORMED = "informed"  # has read the verdict and exits
    LEFT = "left"  # finished normally
    ENDED = "ended"  # failed, and reports its error
    VERDICT = "verdict"  # rank 0: the run must end, for the reason in the message


class Beat(NamedTuple):
    """What a rank writes with every beat of its heartbeat."""

    rank: _Number
    host: Annotated[_Text, _at_most(255)] = "unknown"
    pid: _Number = 0
    number: _Number = 0  # counts up: a change shows that the rank lives
    step: _Number = 0
    doing: Annotated[_Text, _at_most(100)] = "starting"
    calls: _Number = 0  # of Heartbeat.at in this step; all ranks make the same ones, so a rank with fewer is behind
    status: Status = Status.RUNNING
    message: Annotated[_Text, _at_most(4000)] = ""  # the error message if BROKEN or ENDED, the sentence of a VERDICT
    exit_code: Annotated[_Number, AfterValidator(_check_code)] = RANK_LOST  # for the other ranks, if ENDED or VERDICT
    hanging: tuple[_Number, ...] = ()  # of a VERDICT: ranks that are alive and should print where they hang
    address: Annotated[_Text, _at_most(255)] = ""  # of its node, on the way to rank 0
    file: Annotated[_Text, _at_most(300)] = ""  # of which a read has not returned since the beat before
    peer: Annotated[_Text, _at_most(255)] = ""  # address that does not answer this rank, which is where it was a beat before

    @property
    def who(self) -> str:
        return f"rank {self.rank} (host {self.host}, pid {self.pid})"

    @property
    def place(self) -> str:
        return f"step {self.step}, {self.doing}"

    def to_json(self) -> str:
        return json.dumps(self)


_VALID = TypeAdapter(Beat)  # anyone who reaches the store may have written the text


@dataclass(frozen=True)
class Verdict:
    """Why the run ends."""

    message: str  # the sentence
    exit_code: int = RANK_LOST
    hanging: tuple[int, ...] = ()  # ranks that are alive and should print where they hang


class Board:
    """Heartbeats in the job's key-value store, over a connection that nothing else uses; what is no heartbeat is named once."""

    def __init__(self, store: dist.TCPStore) -> None:
        self._store = store
        self._newest: dict[int, Beat] = {}  # the last valid one of each rank that was read
        self._warned: set[int] = set()

    def write(self, beat: Beat) -> None:
        self._store.set(_key(beat.rank), beat.to_json())

    def read(self, ranks: Sequence[int]) -> list[Beat]:
        """The newest valid heartbeat of each rank, number 0 if it has sent none; a ``RuntimeError`` if the store does not answer."""
        keys = [_key(rank) for rank in ranks]
        if not self._store.check(keys):  # multi_get would wait for a key that does not exist yet, or was deleted
            for key in keys:
                self._store.compare_set(key, "", "")
        for rank, note in zip(ranks, self._store.multi_get(keys), strict=True):
            self._take(rank, note)
        return [self._newest[rank] for rank in ranks]

    def _take(self, rank: int, note: bytes) -> None:
        self._newest.setdefault(rank, Beat(rank, os.environ["MASTER_ADDR"] if rank == 0 else "unknown"))
        with suppress(ValueError):
            beat = _VALID.validate_json(note) if 0 < len(note) <= _LARGEST else None
            if beat and beat.rank == rank:
                self._newest[rank] = beat
                return
        if note and rank not in self._warned:
            self._warned.add(rank)
            store, shown = "{MASTER_ADDR}:{MASTER_PORT}".format_map(os.environ), note[: 4 * _SHOWN].decode(errors="replace")
            said = f"{_key(rank)} in the job's store at {store} is not a heartbeat ({printable(shown, _SHOWN)}) and is ignored"
            docs = "see the repository's docs/security.md for how to keep strangers out"
            print_now(f"warning: {said}: somebody else writes to this port; {docs}")


def print_now(line: str) -> None:
    """To stderr from a thread, not through the logger: a main thread that hangs may hold a lock of ``sys.stderr``."""
    with suppress(OSError):  # the terminal may be gone
        os.write(2, f"{line}\n".encode())


def _key(rank: int) -> str:
    return f"heartbeat/{rank}"
