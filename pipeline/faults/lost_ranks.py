"""Which process of the run is lost: judged from the signs of life that all give. No threads, no clock, no network here.

Time is counted in seconds during which the judge itself was awake and saw that nothing changed. So neither a jump of the
wall clock nor a judge that was itself stopped for a while makes others look silent.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from enum import Enum

from pipeline.config import DistributedConfig
from pipeline.distributed.signing import printable
from pipeline.errors import RANK_LOST, USER_ERROR

BROKEN_PATIENCE = 5.0  # seconds of silence that are enough once a connection was seen to break: the floor of silence_timeout
EXIT_CODES = frozenset({USER_ERROR, RANK_LOST, 130})  # for the others of a job; 130: Ctrl-C. Never success.
_LONGEST = {"host": 255, "doing": 100, "words": 2000, "sentence": 4000}  # characters
_AGAIN = "then start the same command again, it goes on from the newest checkpoint."


class Status(str, Enum):
    """Of a process in the run."""

    RUNNING = "running"
    BROKEN = "broken"  # a collective operation failed; waits to hear who was lost
    INFORMED = "informed"  # knows the verdict and ends
    LEFT = "left"  # came to its normal end
    ENDED = "ended"  # ended with an error, which it tells


@dataclass(frozen=True)
class Sign:
    """A process's sign of life, sent once per beat."""

    rank: int
    host: str = "unknown"
    pid: int = 0
    beat: int = 0  # counts up: a change is the sign of life
    step: int = 0
    doing: str = "starting"
    calls: int = 0  # of Heartbeat.at in this step; all processes make the same ones, so who has fewer is behind
    status: Status = Status.RUNNING
    words: str = ""  # the error, if BROKEN or ENDED
    exit_code: int = RANK_LOST  # for the others, if ENDED

    @property
    def who(self) -> str:
        return f"rank {self.rank} (host {self.host}, pid {self.pid})"

    @property
    def place(self) -> str:
        return f"step {self.step}, {self.doing}"

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Sign:
        """Of what ``to_json`` made.

        Raises:
            ValueError: it is something else.
        """
        fields = _read(text, asdict(cls(0)))
        return cls(**{**fields, "status": Status(fields["status"])})


@dataclass(frozen=True)
class Verdict:
    """Why the run ends."""

    sentence: str
    exit_code: int = RANK_LOST
    hanging: tuple[int, ...] = ()  # ranks that live and shall show where they hang

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
    """The fields of a note, of the example's types: words fit to be printed, an exit code that is one."""
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
    """Rank 0, which keeps the store through which all hear of each other, is out of reach.

    Args:
        first: its last sign.
        how: "... and how it was noticed".
    """
    return Verdict(
        f"{first.who} {how}; its last sign came from {first.place}: see on its node what became of it (its log, dmesg, a lost network), {_AGAIN}"
    )


class Judge:
    """Watches signs, says who is lost.

    Args:
        config: the time limits.
    """

    def __init__(self, config: DistributedConfig) -> None:
        self._config = config
        self._signs: dict[int, Sign] = {}
        self._silent: dict[int, float] = {}  # rank -> seconds without a new beat
        self._still: dict[int, float] = {}  # rank -> seconds at the same place
        self._broken = 0.0  # seconds since the first broken collective

    def observe(self, signs: Sequence[Sign], seconds: float) -> None:
        """Take in what was read.

        Args:
            signs: the latest of each watched process.
            seconds: for which the judge was awake since it read the ones before.
        """
        for sign in signs:
            last = self._signs.get(sign.rank, Sign(sign.rank, beat=-1))
            alive = sign.beat != last.beat
            moved = (sign.step, sign.calls, sign.status) != (last.step, last.calls, last.status)
            self._silent[sign.rank] = 0.0 if alive else self._silent[sign.rank] + seconds
            self._still[sign.rank] = 0.0 if moved or last.beat < 0 else self._still[sign.rank] + seconds
            self._signs[sign.rank] = sign
        self._broken = self._broken + seconds if self._with(Status.BROKEN) else 0.0

    def _with(self, *statuses: Status) -> list[Sign]:
        return [sign for sign in self._signs.values() if sign.status in statuses]

    @property
    def patience(self) -> float:
        """Seconds of silence that are too many."""
        usual = self._config.silence_timeout
        return min(usual, BROKEN_PATIENCE) if self._with(Status.BROKEN) else usual

    @property
    def all_left(self) -> bool:
        """Whether every process came to its normal end."""
        return len(self._with(Status.LEFT)) == len(self._signs)

    def uninformed(self, beat: float) -> list[int]:
        """Ranks that live, as far as one beat of ``beat`` seconds tells, and do not yet know that the run ends."""
        return [sign.rank for sign in self._with(Status.RUNNING, Status.BROKEN) if self._silent[sign.rank] < 3 * beat]

    def verdict(self) -> Verdict | None:
        """Why the run has to end, None while all is well."""
        return self._ended() or self.silent() or self._broken_for_no_reason() or self._hanging()

    def _ended(self) -> Verdict | None:
        for sign in self._with(Status.ENDED):
            return Verdict(f"{sign.who} ended at {sign.place}: {sign.words}", sign.exit_code)
        return None

    def silent(self) -> Verdict | None:
        """A process whose beats stopped: killed, stopped, its node or its network gone."""
        watched = self._with(Status.RUNNING, Status.BROKEN)
        worst = max(watched, key=lambda sign: self._silent[sign.rank], default=None)
        if worst is None or self._silent[worst.rank] < self.patience:
            return None
        seconds = self._silent[worst.rank]
        others = [sign.rank for sign in watched if sign is not worst and self._silent[sign.rank] > 0.6 * seconds]
        also = f" (and so did {_ranks(others)})" if others else ""
        return Verdict(
            f"{worst.who} gave no sign of life for {seconds:.0f} s{also}; its last sign came from {worst.place}: see on its node what became "
            f"of it (its log, dmesg, a lost network), {_AGAIN}"
        )

    def _hanging(self) -> Verdict | None:
        """All live and nobody moves on. Who waits for a process that hangs got further than it did."""
        running = self._with(Status.RUNNING)
        if not running or min(self._still[sign.rank] for sign in running) < self._config.progress_timeout:
            return None
        return self._behind(
            f"has not moved on for {{seconds:.0f}} s (distributed.progress_timeout {self._config.progress_timeout:g})"
        )

    def _broken_for_no_reason(self) -> Verdict | None:
        """A collective failed, but everybody lives: it timed out, or the network between two others is cut."""
        if self._broken < 2 * BROKEN_PATIENCE:
            return None
        broken = self._with(Status.BROKEN)[0]
        return self._behind(f"is furthest behind, and a collective operation of {broken.who} failed ({broken.words})")

    def _behind(self, what: str) -> Verdict:
        """Names the process that is furthest behind; none, if all are at the same place."""
        running = self._with(Status.RUNNING, Status.BROKEN)
        place = {sign.rank: (sign.step, sign.calls) for sign in running}
        last = min(running, key=lambda sign: (place[sign.rank], -self._still[sign.rank]))
        far = max(running, key=lambda sign: place[sign.rank])
        what = what.format(seconds=self._still[last.rank])
        if len(running) > 1 and place[far.rank] == place[last.rank]:
            return Verdict(
                f"{last.who} {what}, like all the others: at {last.place}, none is ahead, so the fault lies between them "
                f"(network, driver) or in what they all wait for; see the traceback, {_AGAIN}",
                hanging=(last.rank,),
            )
        others = f", while rank {far.rank} waits at {far.place}" if far is not last else ""
        return Verdict(
            f"{last.who} {what}: it is at {last.place}{others}; see its traceback, or raise the limit if it only was slow, {_AGAIN}",
            hanging=(last.rank,),
        )


def _ranks(ranks: Sequence[int]) -> str:
    shown = ", ".join(map(str, ranks[:8])) + (f" and {len(ranks) - 8} more" if len(ranks) > 8 else "")
    return f"rank {shown}" if len(ranks) == 1 else f"ranks {shown}"
