"""Failure detector: which rank is lost, judged from the heartbeats of all. No threads, no clock, no network.

Time counts only while the detector itself was running and saw no change. So neither a jump of the wall clock nor a suspension
of the detecting process makes other ranks look silent.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from enum import Enum
from typing import NamedTuple

from pipeline.config import DistributedConfig
from pipeline.distributed.signing import printable
from pipeline.errors import RANK_LOST, USER_ERROR

BROKEN_SILENCE_LIMIT = 5.0  # seconds; the minimum of silence_timeout, which it replaces once a collective has failed
EXIT_CODES = frozenset({USER_ERROR, RANK_LOST, 130})  # that a rank may pass to the others; 130: Ctrl-C. Never success.
_LONGEST = {"host": 255, "doing": 100, "words": 2000, "sentence": 4000}  # characters that are printed of a message's fields
_AGAIN = "then start the same command again, it goes on from the newest checkpoint."


class Status(str, Enum):
    """Of a rank."""

    RUNNING = "running"
    BROKEN = "broken"  # a collective failed; waits for the verdict
    INFORMED = "informed"  # has read the verdict and exits
    LEFT = "left"  # finished normally
    ENDED = "ended"  # failed, and reports its error


class Sign(NamedTuple):  # not a dataclass: rank 0 makes one for each rank once per beat, beside the training
    """A heartbeat, sent by each rank once per beat."""

    rank: int
    host: str = "unknown"
    pid: int = 0
    beat: int = 0  # counts up: a change shows that the rank lives
    step: int = 0
    doing: str = "starting"
    calls: int = 0  # of Heartbeat.at in this step; all ranks make the same ones, so a rank with fewer is behind
    status: Status = Status.RUNNING
    words: str = ""  # the error message, if BROKEN or ENDED
    exit_code: int = RANK_LOST  # for the other ranks, if ENDED

    @property
    def who(self) -> str:
        return f"rank {self.rank} (host {self.host}, pid {self.pid})"

    @property
    def place(self) -> str:
        return f"step {self.step}, {self.doing}"

    def to_json(self) -> str:
        return json.dumps(self._asdict())

    @classmethod
    def from_json(cls, text: str) -> Sign:
        """Of what ``to_json`` made.

        Raises:
            ValueError: it is something else.
        """
        fields = _read(text, _SIGN)
        return cls(**{**fields, "status": Status(fields["status"])})


_SIGN = Sign(0)._asdict()  # names and types of a message's fields
_TYPES = tuple(str if isinstance(value, str) else type(value) for value in _SIGN.values())


class Digest(NamedTuple):
    """What the leader of a group of ranks has read of them, in one message (``relay``)."""

    leader: int  # its rank
    beat: int = 0  # the leader's; counts up
    signs: tuple[Sign, ...] = ()

    def to_json(self) -> str:
        return json.dumps([self.leader, self.beat, self.signs])

    @classmethod
    def from_json(cls, text: str) -> Digest:
        """Of what ``to_json`` made; its leader has validated each sign.

        Raises:
            ValueError: it is something else.
        """
        try:
            leader, beat, rows = json.loads(text)
            if type(leader) is not int or type(beat) is not int or any(tuple(map(type, row)) != _TYPES for row in rows):
                raise ValueError("a leader, a beat and signs needed")
        except TypeError:
            raise ValueError("a leader, a beat and signs needed") from None
        for row in rows:
            row[_STATUS] = Status(row[_STATUS])
        return cls(leader, beat, tuple(map(Sign._make, rows)))


_STATUS = Sign._fields.index("status")


@dataclass(frozen=True)
class Verdict:
    """Why the run ends."""

    sentence: str
    exit_code: int = RANK_LOST
    hanging: tuple[int, ...] = ()  # ranks that are alive and should print where they hang

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Verdict:
        """Of what ``to_json`` made.

        Raises:
            ValueError: it is something else.
        """
        fields = _read(text, {**asdict(cls("")), "hanging": []})
        if not all(type(rank) is int for rank in fields["hanging"]):
            raise ValueError("hanging: ranks needed")
        return cls(**{**fields, "hanging": tuple(fields["hanging"])})


def _read(text: str, example: dict) -> dict:
    """The validated fields of a message: the example's types, printable text, a known exit code."""
    fields = json.loads(text)
    if not isinstance(fields, dict) or fields.keys() != example.keys():
        raise ValueError(f"the fields {', '.join(example)} needed")
    for name, value in fields.items():
        if type(value) is not (str if isinstance(example[name], str) else type(example[name])):
            raise ValueError(f"{name}: another type needed")
        if isinstance(value, int) and not 0 <= value < 2**63:
            raise ValueError(f"{name}: from 0 to 2**63 needed")
        if isinstance(value, str):
            fields[name] = printable(value, _LONGEST.get(name, 100))
    if fields["exit_code"] not in EXIT_CODES:
        raise ValueError(f"exit_code: one of {sorted(EXIT_CODES)} needed")
    return fields


def connection_lost(first: Sign, how: str) -> Verdict:
    """The verdict that rank 0, which hosts the store, is unreachable.

    Args:
        first: its last heartbeat.
        how: how that was noticed; continues a sentence that begins with the rank.
    """
    return Verdict(
        f"{first.who} {how}; its last heartbeat came from {first.place}: find the cause on its node (its log, dmesg, the network), {_AGAIN}"
    )


class Judge:
    """Watches heartbeats and decides which rank is lost.

    Args:
        config: the timeouts.
    """

    def __init__(self, config: DistributedConfig) -> None:
        self._config = config
        self._signs: dict[int, Sign] = {}
        self._silent: dict[int, float] = {}  # rank -> seconds without a new beat
        self._still: dict[int, float] = {}  # rank -> seconds without progress
        self._broken = 0.0  # seconds since the first failed collective

    def observe(self, signs: Sequence[Sign], seconds: float) -> None:
        """Add the newest heartbeats.

        Args:
            signs: the latest of each watched rank.
            seconds: since the last call, without time in which this process was suspended.
        """
        for sign in signs:
            rank, last = sign.rank, self._signs.get(sign.rank)
            alive = last is None or sign.beat != last.beat
            moved = last is None or sign.calls != last.calls or sign.step != last.step or sign.status is not last.status
            self._silent[rank] = 0.0 if alive else self._silent[rank] + seconds
            self._still[rank] = 0.0 if moved else self._still[rank] + seconds
            self._signs[rank] = sign
        self._broken = self._broken + seconds if self._with(Status.BROKEN) else 0.0

    def _with(self, *statuses: Status) -> list[Sign]:
        return [sign for sign in self._signs.values() if sign.status in statuses]

    @property
    def silence_limit(self) -> float:
        """Seconds without a new beat after which a rank counts as lost."""
        limit = self._config.silence_timeout
        return min(limit, BROKEN_SILENCE_LIMIT) if self._with(Status.BROKEN) else limit

    @property
    def all_left(self) -> bool:
        """Whether every rank finished normally."""
        return len(self._with(Status.LEFT)) == len(self._signs)

    def uninformed(self, beat: float) -> list[int]:
        """Ranks that were alive within the last three beats of ``beat`` seconds and have not read the verdict yet."""
        return [sign.rank for sign in self._with(Status.RUNNING, Status.BROKEN) if self._silent[sign.rank] < 3 * beat]

    def verdict(self) -> Verdict | None:
        """Why the run must end, or None."""
        return self._ended() or self.silent() or self._broken_for_no_reason() or self._hanging()

    def _ended(self) -> Verdict | None:
        for sign in self._with(Status.ENDED):
            return Verdict(f"{sign.who} ended at {sign.place}: {sign.words}", sign.exit_code)
        return None

    def silent(self) -> Verdict | None:
        """A rank whose heartbeats stopped: killed, suspended, or cut off with its node or network."""
        watched = self._with(Status.RUNNING, Status.BROKEN)
        worst = max(watched, key=lambda sign: self._silent[sign.rank], default=None)
        if worst is None or self._silent[worst.rank] < self.silence_limit:
            return None
        seconds = self._silent[worst.rank]
        # Ranks of one node fall silent together, but the detector reads them up to a few beats apart: above 0.6 is "together".
        others = [sign.rank for sign in watched if sign is not worst and self._silent[sign.rank] > 0.6 * seconds]
        also = f" (and so did {_ranks(others)})" if others else ""
        return Verdict(
            f"{worst.who} gave no sign of life for {seconds:.0f} s{also}; its last heartbeat came from {worst.place}: find the cause on its node "
            f"(its log, dmesg, the network), {_AGAIN}"
        )

    def _hanging(self) -> Verdict | None:
        """All ranks are alive but none makes progress. Those that wait for the hung rank got further than it did."""
        running = self._with(Status.RUNNING)
        if not running or min(self._still[sign.rank] for sign in running) < self._config.progress_timeout:
            return None
        return self._behind(
            f"has made no progress for {{seconds:.0f}} s (distributed.progress_timeout {self._config.progress_timeout:g})"
        )

    def _broken_for_no_reason(self) -> Verdict | None:
        """A collective failed, but all ranks are alive: it timed out, or the network between two of them is cut."""
        if self._broken < 2 * BROKEN_SILENCE_LIMIT:  # a rank that was lost would have fallen silent by now
            return None
        broken = self._with(Status.BROKEN)[0]
        return self._behind(f"is furthest behind, and a collective operation of {broken.who} failed ({broken.words})")

    def _behind(self, what: str) -> Verdict:
        """The verdict that names the rank furthest behind, or says that all are at the same place."""
        running = self._with(Status.RUNNING, Status.BROKEN)
        place = {sign.rank: (sign.step, sign.calls) for sign in running}
        last = min(running, key=lambda sign: (place[sign.rank], -self._still[sign.rank]))
        far = max(running, key=lambda sign: place[sign.rank])
        what = what.format(seconds=self._still[last.rank])
        if len(running) > 1 and place[far.rank] == place[last.rank]:
            return Verdict(
                f"{last.who} {what}, like all the others: at {last.place}, none is ahead, so the fault lies between them "
                f"(network, driver) or in something they all wait for; see the traceback, {_AGAIN}",
                hanging=(last.rank,),
            )
        others = f", while rank {far.rank} waits at {far.place}" if far is not last else ""
        return Verdict(
            f"{last.who} {what}: it is at {last.place}{others}; see its traceback, or raise the limit if it was merely slow, {_AGAIN}",
            hanging=(last.rank,),
        )


def _ranks(ranks: Sequence[int]) -> str:
    shown = ", ".join(map(str, ranks[:8])) + (f" and {len(ranks) - 8} more" if len(ranks) > 8 else "")
    return f"rank {shown}" if len(ranks) == 1 else f"ranks {shown}"
