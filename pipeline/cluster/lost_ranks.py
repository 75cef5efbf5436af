"""Detect failures: judge from the heartbeats of all ranks which one is lost. No threads, no clock, no network.

Time counts only while the detector itself was running and saw no change. So neither a jump of the wall clock nor a suspension
of the detecting process makes other ranks look silent.
"""

from collections.abc import Callable, Sequence

from pipeline.cluster.beats import Beat, Status, Verdict
from pipeline.cluster.world import name_ranks
from pipeline.config import DistributedConfig

BROKEN_SILENCE_LIMIT = 5.0  # seconds; the minimum of silence_timeout, which it replaces once a collective has failed
_AGAIN = "then start the same command again, it resumes from the newest checkpoint."
READ_SHARE = 1 / 6  # of progress_timeout, after which a read of a file ends the run
WARNING_SHARE = 1 / 10  # of a wait's limit, after which it is named
_ALIVE = 3.0  # seconds: who sent a beat within a few beats


def silence_limit(config: DistributedConfig, broken: bool) -> float:
    """Seconds without a new beat after which a rank counts as lost; fewer once a collective is broken."""
    return min(config.silence_timeout, BROKEN_SILENCE_LIMIT) if broken else config.silence_timeout


def connection_lost(lost: Beat, how: str, find_cause: Callable[[str, str], str]) -> Verdict:
    """The verdict that a rank was cut off; ``how`` it was noticed follows the rank's name. ``find_cause``: of its host and address."""
    cause = find_cause(lost.host, lost.address)
    return Verdict(f"{lost.who} {how}; its last heartbeat came from {lost.place}: {cause}, {_AGAIN}")


class Judge:
    """Watches heartbeats and decides which rank is lost; ``find_cause`` says what to look for on the node of a silent one."""

    def __init__(self, config: DistributedConfig, find_cause: Callable[[str, str], str]) -> None:
        self._config, self._find_cause = config, find_cause
        self._newest: dict[int, Beat] = {}
        self._silent: dict[int, float] = {}  # rank -> seconds without a new beat
        self._still: dict[int, float] = {}  # rank -> seconds without progress
        # rank -> seconds that a read of one file has taken, or that one node has not answered
        self._waits: dict[str, dict[int, float]] = {"file": {}, "peer": {}}
        self._broken = 0.0  # seconds since the first failed collective

    def observe(self, beats: Sequence[Beat], seconds: float) -> None:
        """Add the newest heartbeats of the watched ranks, ``seconds`` after the last call without those of a suspension."""
        for beat in beats:
            rank, last = beat.rank, self._newest.get(beat.rank)
            alive = last is None or beat.number != last.number
            moved = last is None or beat.calls != last.calls or beat.step != last.step or beat.status is not last.status
            self._silent[rank] = 0.0 if alive else self._silent[rank] + seconds
            self._still[rank] = 0.0 if moved else self._still[rank] + seconds
            for what, waits in self._waits.items():
                waits_on = last is not None and not moved and getattr(beat, what) and getattr(beat, what) == getattr(last, what)
                waits[rank] = waits[rank] + seconds if waits_on else 0.0
            self._newest[rank] = beat
        self._broken = self._broken + seconds if self._with(Status.BROKEN) else 0.0

    def _with(self, *statuses: Status) -> list[Beat]:
        return [beat for beat in self._newest.values() if beat.status in statuses]

    @property
    def all_left(self) -> bool:
        """Whether every rank finished normally."""
        return len(self._with(Status.LEFT)) == len(self._newest)

    def uninformed(self, seconds: float) -> list[int]:
        """Ranks that were alive within the last ``seconds`` and have not read the verdict yet."""
        return [beat.rank for beat in self._with(Status.RUNNING, Status.BROKEN) if self._silent[beat.rank] < seconds]

    def verdict(self) -> Verdict | None:
        """Why the run must end, or None."""
        for beat in self._with(Status.ENDED):
            return Verdict(f"{beat.who} ended at {beat.place}: {beat.message}.", beat.exit_code)
        if verdict := self.silent():
            return verdict
        if waits := self.waiting():
            return Verdict(f"{waits}, {_AGAIN}")
        # A collective failed, but all ranks are alive, as one that was lost would have fallen silent by now: it timed out, or
        # the network between two of them is cut.
        if self._broken >= 2 * BROKEN_SILENCE_LIMIT:
            return self._behind(self._with(Status.BROKEN)[0])
        # All ranks are alive but none makes progress. Those that wait for the hung rank got further than it did.
        running = [self._still[beat.rank] for beat in self._with(Status.RUNNING)]
        return self._behind() if running and min(running) >= self._config.progress_timeout else None

    def silent(self) -> Verdict | None:
        """A rank whose heartbeats stopped: killed, suspended, or cut off with its node or network."""
        watched = self._with(Status.RUNNING, Status.BROKEN)
        worst = max(watched, key=lambda beat: self._silent[beat.rank], default=None)
        if worst is None or self._silent[worst.rank] < silence_limit(self._config, bool(self._with(Status.BROKEN))):
            return None
        seconds = self._silent[worst.rank]
        # Ranks of one node fall silent together, but the detector reads them up to a few beats apart: above 0.6 is "together".
        others = [beat.rank for beat in watched if beat is not worst and self._silent[beat.rank] > 0.6 * seconds]
        also = f" (and so did {name_ranks(others)})" if others else ""
        return connection_lost(worst, f"sent no heartbeat for {seconds:.0f} s{also}", self._find_cause)

    def waiting(self, share: float = 1.0) -> str:
        """Which rank has waited for so much of the limit for a read of which file, or for an answer of which node, and what to do;
        empty if none has."""
        alive = [beat for beat in self._with(Status.RUNNING) if self._silent[beat.rank] < _ALIVE]
        hosts = {beat.address: beat.host for beat in alive}
        limits = {"file": READ_SHARE * self._config.progress_timeout, "peer": self._config.silence_timeout}
        for what, waits in self._waits.items():
            # An address that is no node of the run may be a store, whose reads have limits of their own.
            waiting = [beat for beat in alive if waits[beat.rank] and (beat.peer in hosts or what == "file")]
            worst = max(waiting, key=lambda beat: waits[beat.rank], default=Beat(0))
            if not waiting or waits[worst.rank] < share * limits[what]:
                continue
            also = f" (with {name_ranks([beat.rank for beat in waiting if beat is not worst])})" if len(waiting) > 1 else ""
            who = f"{worst.who}{also} has waited {waits[worst.rank]:.0f} s for"
            if what == "file":
                todo = "see whether the node reaches it, or raise distributed.progress_timeout"
                return f"{who} a read of {worst.file} at {worst.place}: {todo}"
            there = hosts[worst.peer]
            todo = f"mend the network between {worst.host} and {there}, or leave one of the two out"
            return f"{who} an answer of {there} ({worst.peer}) at {worst.place}, while both reach rank 0: {todo}"
        return ""

    def _behind(self, broken: Beat | None = None) -> Verdict:
        """The verdict that names the rank furthest behind, or says that all are at the same place."""
        running = self._with(Status.RUNNING, Status.BROKEN)
        place = {beat.rank: (beat.step, beat.calls) for beat in running}
        last = min(running, key=lambda beat: (place[beat.rank], -self._still[beat.rank]))
        far = max(running, key=lambda beat: place[beat.rank])
        limit = f"distributed.progress_timeout {self._config.progress_timeout:g}"
        what = f"has made no progress for {self._still[last.rank]:.0f} s ({limit})"
        if broken:
            what = f"is furthest behind, and a collective operation of {broken.who} failed ({broken.message})"
        if len(running) > 1 and place[far.rank] == place[last.rank]:
            cut = "".join(f", {beat.who} has no answer from {beat.peer}" for beat in running if beat.peer)
            where = f", like all the others: at {last.place}, none is ahead{cut}, so the fault lies between them"
            todo = "(network, driver) or in something they all wait for; see the traceback"
        else:
            others = f", while rank {far.rank} waits at {far.place}" if far is not last else ""
            where = f": it is at {last.place}{others};"
            todo = "see its traceback, or raise the limit if it was merely slow"
        return Verdict(f"{last.who} {what}{where} {todo}, {_AGAIN}", hanging=(last.rank,))
