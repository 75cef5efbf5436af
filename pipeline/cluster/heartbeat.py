"""Exchange heartbeats between the ranks: when one is lost or hangs, all others name it and exit.

Once per second each rank writes a heartbeat with its position, and with an error that NCCL's watchdog has noted, under its own
key in the job's key-value store. Rank 0, which hosts the store, reads all of them, runs the failure detector (``lost_ranks``)
and writes its verdict, in its own heartbeat, which the others read. So N ranks make about 3 N small requests per second, all
name the same culprit, and only rank 0 itself must be judged by the others: it is lost if its heartbeats stop, its store does
not answer, or its connection closes.

Time from the fault to the exit of all other ranks: at most ``silence_timeout`` + 10 s (typically + 3 s); 15 s if a collective
failed; 5 s if the rank could report its own error. If a rank hangs, ``progress_timeout`` + 10 s after the last one stopped.
"""

import faulthandler
import itertools
import os
import re
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

import torch.distributed as dist

from pipeline.cluster import nccl
from pipeline.cluster.beats import Beat, Board, Status, Verdict, print_now
from pipeline.cluster.environment import node_name
from pipeline.cluster.host import cause_on, hanging_read, own_address, unanswered
from pipeline.cluster.lost_ranks import BROKEN_SILENCE_LIMIT, WARNING_SHARE, Judge, connection_lost, silence_limit
from pipeline.cluster.meeting import store_client
from pipeline.cluster.world import World
from pipeline.command_line import SPEAKS_SECOND
from pipeline.config import DistributedConfig
from pipeline.errors import RANK_LOST, USER_ERROR, UserError, first_line, printable

BEAT = 1.0  # seconds between heartbeats: short against silence_timeout (5 s or more)
_LAST_WORD = 5.0  # seconds that rank 0 keeps the store open for ranks that have not read the verdict: a few beats
_OF_COLLECTIVE = re.compile("gloo|onnection closed by peer|NCCL")  # in an error of communication with other ranks
_LONGEST_MESSAGE = 2000  # characters of an error message; the store must not be filled by one


class Heartbeat:
    """Sends this rank's heartbeats and watches the others'. With a world size of one it does nothing.

    A context manager around a whole run: leaving the block is a normal end; an error in it is reported to the other ranks;
    after a failed collective, this rank waits to learn which one was lost. Each rank creates its own right after ``init_world``, and
    calls :meth:`at` at the same places. ``run_folder`` gets a record of the last collectives of each rank that ends after a fault.
    """

    def __init__(self, world: World, config: DistributedConfig, run_folder: Path | None = None) -> None:
        self._rank, self._size, self._config, self._run_folder = world.rank, world.size, config, run_folder
        self._host = printable(node_name(), 255)
        self._address, self._waits, self._calls = own_address(os.environ.get("MASTER_ADDR", "")), "", set[tuple[str, str]]()
        self._place = (0, "starting", 0)  # step, doing, calls in this step; replaced as a whole: no lock needed
        self._told = self._place  # with the beat before
        self._end = (Status.RUNNING, "", RANK_LOST)  # status, error message, exit code for the other ranks
        self._first = Beat(0, os.environ.get("MASTER_ADDR", "unknown"))  # last heartbeat of rank 0
        self._unanswered = 0.0  # seconds since the store last answered, without those in which this process was suspended
        self._read_at = 0.0  # when it answered, on the monotonic clock
        self._verdict: Verdict | None = None  # the first one counts
        self.on_loss: Callable[[str, int], None] | None = None  # told the verdict and the step before this process exits
        self._wake, self._done, self._judging = threading.Event(), threading.Event(), threading.Lock()
        if self._size > 1:
            # Two threads, because a request to the store of a suspended process blocks forever: one sends, one watches it.
            threading.Thread(target=self._talk, name="heartbeat", daemon=True).start()
            if self._rank != 0:
                threading.Thread(target=self._watch, name="heartbeat-watch", daemon=True).start()

    def at(self, step: int, doing: str) -> None:
        """Report progress; every call counts, even with equal arguments. ``doing`` is named in messages. Does no I/O."""
        last_step, _, calls = self._place
        self._place = (step, doing, calls + 1 if step == last_step else 0)

    def still(self, doing: str) -> None:
        """Report progress within the step last passed to :meth:`at`."""
        self.at(self._place[0], doing)

    def failed(self, error: BaseException) -> NoReturn:
        """After a collective failed: wait until the lost rank is known, name it, exit with ``RANK_LOST``; alone raise the error."""
        if self._size == 1:
            raise error
        self._end = (Status.BROKEN, printable(first_line(error), _LONGEST_MESSAGE), RANK_LOST)
        self._wake.set()
        self._done.wait(self._config.silence_timeout + 2 * BROKEN_SILENCE_LIMIT + 2 * _LAST_WORD)  # a thread exits first
        traceback.print_exception(error)
        self._announce(Verdict(f"a collective operation failed at {self._beat(0).place}; which rank was lost is not known."))
        os._exit(RANK_LOST)

    def leave(self, error: str | None = None, exit_code: int = RANK_LOST) -> None:
        """Announce that this rank exits, after an error with its message and an exit code for the others: ``USER_ERROR`` if a restart
        cannot help. Rank 0 waits until all others have left, since it hosts the store."""
        if self._size == 1:
            return
        message = printable(error or "", _LONGEST_MESSAGE)
        self._end = (Status.LEFT, "", RANK_LOST) if error is None else (Status.ENDED, message, exit_code)
        self._wake.set()
        # After a normal end the watch goes on, so this wait needs no limit; after an error the message must still be printed.
        self._done.wait(None if error is None else _LAST_WORD + 2 * BEAT)

    def __enter__(self) -> "Heartbeat":
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is None or isinstance(error, SystemExit):
            self.leave()
        elif isinstance(error, dist.DistError) or isinstance(error, RuntimeError) and _OF_COLLECTIVE.search(str(error)):
            self.failed(error)
        elif isinstance(error, KeyboardInterrupt):
            self.leave("stopped by Ctrl-C", 130)
        elif isinstance(error, UserError | OSError):
            self.leave(first_line(error), USER_ERROR)
        else:
            self.leave(f"{type(error).__name__}: {first_line(error)}")

    def _beat(self, number: int, verdict: Verdict | None = None) -> Beat:
        (step, doing, calls), (status, message, exit_code) = self._place, self._end
        if status is Status.RUNNING and (reported := nccl.failure()):
            status, message = Status.BROKEN, reported  # the main thread waits for the GPU and never learns of it
        file, self._calls = hanging_read(self._calls)
        peer, self._told = unanswered() if self._place is self._told else "", self._place
        what, where = (number, step, doing, calls, status, message, exit_code), (self._address, printable(file, 300), peer)
        beat = Beat(self._rank, self._host, os.getpid(), *what, (), *where)
        return beat._replace(status=Status.VERDICT, **vars(verdict)) if verdict else beat

    def _talk(self) -> None:
        """Thread: exchange heartbeats until the run ends."""
        try:
            # A connection of its own: the main thread's is locked while it waits for a key.
            board, judge = Board(store_client(2 * self._config.silence_timeout)), Judge(self._config, cause_on)
            self._read_at = time.monotonic()
            if self._rank == 0:
                self._lead(board, judge)
            else:
                self._follow(board, judge)
        except RuntimeError:  # all that PyTorch raises when the connection closes
            if self._end[0] is not Status.LEFT:
                self._finish(connection_lost(self._first, "ended without a word", cause_on))
        finally:
            self._done.set()

    def _lead(self, board: Board, judge: Judge) -> None:
        """Rank 0: read all heartbeats, judge, and stay until all others have left."""
        for number in itertools.count(1):
            own = self._beat(number)
            board.write(own)
            self._observe(judge, [own, *board.read(range(1, self._size))])
            if verdict := judge.verdict():
                return self._spread(verdict, board, judge, number)
            waited, self._waits = self._waits, judge.waiting(WARNING_SHARE)
            if self._waits and not waited:
                print_now(f"warning: {self._waits}")
            if own.status is Status.ENDED or own.status is Status.LEFT and judge.all_left:
                return
            self._pause(BEAT / 5 if own.status is Status.LEFT else BEAT)  # the run has ended: only this thread keeps the job

    def _follow(self, board: Board, judge: Judge) -> None:
        """All other ranks: read rank 0's heartbeat, with its verdict."""
        for number in itertools.count(1):
            own = self._beat(number)
            board.write(own)
            (self._first,) = board.read([0])
            self._observe(judge, [self._first, own])
            first, verdict = self._first, judge.silent()
            if first.status is Status.VERDICT:
                verdict = Verdict(first.message, first.exit_code, first.hanging)
            if verdict:
                return self._spread(verdict, board, judge, number)
            if own.status in (Status.ENDED, Status.LEFT):
                return
            self._pause()

    def _observe(self, judge: Judge, beats: list[Beat]) -> None:
        """The store has answered."""
        self._unanswered = 0.0
        self._read_at, before = time.monotonic(), self._read_at
        judge.observe(beats, min(self._read_at - before, 2 * BEAT))  # any more: this process itself was suspended

    def _pause(self, seconds: float = BEAT) -> None:
        self._wake.wait(seconds)
        self._wake.clear()

    def _spread(self, verdict: Verdict, board: Board, judge: Judge, number: int) -> None:
        """Publish the verdict, then exit. Rank 0 stays until the others have read it."""
        self._announce(verdict)
        if self._rank == 0:
            board.write(self._beat(number + 1, verdict))
            deadline = time.monotonic() + _LAST_WORD
            while time.monotonic() < deadline and set(judge.uninformed(3 * BEAT)) - {0}:
                time.sleep(BEAT / 5)  # a fraction of a beat, so that the exit is not delayed by a whole one
                judge.observe(board.read(range(1, self._size)), BEAT / 5)
        else:
            if self._end[0] is not Status.ENDED:
                self._end = (Status.INFORMED, "", RANK_LOST)
            board.write(self._beat(number + 1))
            board.read([0])  # the store has processed what was written
        self._finish(verdict)

    def _watch(self) -> None:
        """Thread of all but rank 0: exit if the store stops answering. Counts its own turns, so a suspension does not count."""
        while not self._done.wait(BEAT / 2):  # the resolution of its count
            self._unanswered += BEAT / 2
            if self._unanswered > silence_limit(self._config, self._end[0] is Status.BROKEN):
                self._finish(connection_lost(self._first, f"sent no heartbeat for {self._unanswered:.0f} s", cause_on))

    def _announce(self, verdict: Verdict) -> None:
        """Print the first verdict, unless the main thread is about to print its own error."""
        with self._judging:
            said = self._first.status is Status.VERDICT and SPEAKS_SECOND
            if self._verdict is None and self._end[0] is not Status.ENDED and not said:
                print_now(f"error: {verdict.message}")
            self._verdict = self._verdict or verdict

    def _finish(self, verdict: Verdict) -> None:
        """Exit, whatever the main thread does; if that has an error to report, let it."""
        self._announce(verdict)
        if self._end[0] is Status.ENDED:
            return
        verdict = self._verdict or verdict  # the first one
        if self.on_loss:
            with suppress(Exception):  # the exit matters
                self.on_loss(verdict.message, max(0, self._place[0] - 1))
        if self._run_folder:
            nccl.write_flight_record(self._run_folder, self._rank)
        if self._rank in verdict.hanging:
            faulthandler.dump_traceback(file=2, all_threads=True)
        elif verdict.hanging or self._rank != 0:
            # A launcher shows the first rank to exit: let it be the one with the traceback, or rank 0, which hears up to a beat later.
            time.sleep(2 * BEAT)
        os._exit(verdict.exit_code)
