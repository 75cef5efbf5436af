"""Every process tells the others that it lives and where it is; who learns that one is lost names it and ends.

How it works: each process writes its sign of life under a key of its own into the store through which PyTorch brought the
processes together, once per beat. Rank 0, whose process keeps that store, reads all signs, judges (``lost_ranks``) and
writes a verdict that the others read with its own sign: N processes make about 3 N small requests per second, all name the
same culprit, and only rank 0 itself needs a second opinion. It is lost if its sign stops, if its store does not answer,
or if the connection to it closes. Signs and verdict are signed with the job's secret (``notices``): others do not count.

Time from the fault to the end of every other process: at most ``silence_timeout`` + 10 s (typically + 3 s); 15 s where a
broken connection gave the fault away; after last words 5 s. For a process that hangs ``progress_timeout`` + 10 s, from
the moment that nobody moves any more.
"""

from __future__ import annotations

import faulthandler
import itertools
import os
import socket
import threading
import time
import traceback
from contextlib import suppress
from typing import Any, NoReturn

import torch.distributed as dist

from pipeline.config import DistributedConfig
from pipeline.distributed.rendezvous import store_client
from pipeline.distributed.signing import job_secret, printable
from pipeline.distributed.world import World
from pipeline.errors import RANK_LOST, USER_ERROR, UserError
from pipeline.faults.lost_ranks import BROKEN_PATIENCE, Judge, Sign, Status, Verdict, connection_lost
from pipeline.faults.notices import Notices

BEAT = 1.0  # seconds between two signs of life
_LAST_WORD = 5.0  # seconds that rank 0 keeps the store open for those who have not read the verdict
_LONGEST_WORDS = 2000  # characters


class Heartbeat:
    """Signs of life of this process, and an ear for those of the others. A world of one needs neither: it does nothing.

    As a context manager it covers a whole run: the end of the block is a normal end, an error in it is told to the others,
    an error of a collective operation waits for the name of the culprit.

    Args:
        world: all processes; each makes its Heartbeat right after ``init_world``, and calls :meth:`at` at the same places.
        config: the time limits.

    Raises:
        UserError: several processes without the job's secret.
    """

    def __init__(self, world: World, config: DistributedConfig) -> None:
        self._rank, self._size, self._config = world.rank, world.size, config
        self._secret = job_secret() if world.size > 1 else b""
        self._identity: dict[str, Any] = {"rank": world.rank, "host": printable(socket.gethostname(), 255), "pid": os.getpid()}
        self._place = (0, "starting", 0)  # step, doing, calls in this step; replaced as a whole, so that readers need no lock
        self._end = (Status.RUNNING, "", RANK_LOST)  # status, words, exit code for the others
        self._first = Sign(0, os.environ.get("MASTER_ADDR", "unknown"))  # last sign of rank 0
        self._unanswered = 0.0  # awake seconds since the store last answered,
        self._read_at = 0.0  # and when that was, on the monotonic clock
        self._verdict: Verdict | None = None  # the first one counts
        self._wake, self._done, self._judging = threading.Event(), threading.Event(), threading.Lock()
        if self._size > 1:
            # Two threads, because a request to the store of a stopped process blocks for ever: one talks, one watches it.
            threading.Thread(target=self._talk, name="heartbeat", daemon=True).start()
            if self._rank != 0:
                threading.Thread(target=self._watch, name="heartbeat-watch", daemon=True).start()

    def at(self, step: int, doing: str) -> None:
        """Mark this process's place; every call is progress, also one with equal arguments. No input or output.

        Args:
            step: that is being worked on.
            doing: what, as it shall stand in the sentence: "reading data", "training", "evaluating", "saving".
        """
        last_step, _, calls = self._place
        self._place = (step, doing, calls + 1 if step == last_step else 0)

    def still(self, doing: str) -> None:
        """Mark progress at the step that was last told of."""
        self.at(self._place[0], doing)

    def failed(self, error: BaseException) -> NoReturn:
        """A collective operation broke: wait until it is known who was lost, say it, end with ``RANK_LOST``.

        Raises:
            BaseException: ``error`` itself in a world of one.
        """
        if self._size == 1:
            raise error
        self._end = (Status.BROKEN, _first_line(error), RANK_LOST)
        self._wake.set()
        self._done.wait(self._config.silence_timeout + 2 * BROKEN_PATIENCE + 2 * _LAST_WORD)  # ends in one of the threads
        traceback.print_exception(error)
        self._announce(
            Verdict(f"a collective operation failed at {self._sign(0).place}; which process was lost did not come out.")
        )
        os._exit(RANK_LOST)

    def leave(self, last_words: str | None = None, exit_code: int = RANK_LOST) -> None:
        """This process ends. Rank 0 waits until all others have left too, since the store goes with it.

        Args:
            last_words: the error with which it ends, for the others to repeat; None for a normal end.
            exit_code: with which the others shall end after the last words; ``USER_ERROR`` if a restart cannot help.
        """
        if self._size == 1:
            return
        words = printable(last_words or "", _LONGEST_WORDS)
        self._end = (Status.LEFT, "", RANK_LOST) if last_words is None else (Status.ENDED, words, exit_code)
        self._wake.set()
        # A normal end goes on watching, so this wait needs no limit; who has an error to print must come to print it.
        self._done.wait(None if last_words is None else _LAST_WORD + 2 * BEAT)

    def __enter__(self) -> Heartbeat:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is None or isinstance(error, SystemExit):
            self.leave()
        elif is_collective_error(error):
            self.failed(error)
        elif isinstance(error, KeyboardInterrupt):
            self.leave("stopped by Ctrl-C", 130)
        elif isinstance(error, UserError | OSError):
            self.leave(_first_line(error), USER_ERROR)
        else:
            self.leave(f"{type(error).__name__}: {_first_line(error)}")

    def _sign(self, beat: int) -> Sign:
        (step, doing, calls), (status, words, exit_code) = self._place, self._end
        return Sign(
            **self._identity, beat=beat, step=step, doing=doing, calls=calls, status=status, words=words, exit_code=exit_code
        )

    def _talk(self) -> None:
        """Thread: exchange signs until the run ends."""
        try:
            self._exchange_signs()
        except RuntimeError:  # all that PyTorch raises when the connection closes
            if self._end[0] is not Status.LEFT:
                self._finish(connection_lost(self._first, "ended without a word"))
        finally:
            self._done.set()

    def _exchange_signs(self) -> None:
        # A connection of its own: the main thread's is locked while that waits for a key.
        notices, judge = Notices(store_client(2 * self._config.silence_timeout), self._secret, self._rank), Judge(self._config)
        self._read_at = time.monotonic()
        if self._rank == 0:
            self._lead(notices, judge)
        else:
            self._follow(notices, judge)

    def _lead(self, notices: Notices, judge: Judge) -> None:
        """Rank 0: read every sign, judge, and stay until all others have left."""
        for beat in itertools.count(1):
            own = self._sign(beat)
            (_, *others), _ = notices.read(range(self._size))  # its own key too: it is to say who else writes there
            notices.write_sign(own)
            self._observe(judge, [own, *others])
            if verdict := judge.verdict():
                return self._spread(verdict, notices, judge, beat)
            if own.status is Status.ENDED or own.status is Status.LEFT and judge.all_left:
                return
            self._pause()

    def _follow(self, notices: Notices, judge: Judge) -> None:
        """The other ranks: read rank 0's sign and its verdict."""
        for beat in itertools.count(1):
            own = self._sign(beat)
            notices.write_sign(own)
            (self._first,), verdict = notices.read([0])
            self._observe(judge, [self._first, own])
            if verdict := verdict or judge.silent():
                return self._spread(verdict, notices, judge, beat)
            if own.status in (Status.ENDED, Status.LEFT):
                return
            self._pause()

    def _observe(self, judge: Judge, signs: list[Sign]) -> None:
        """The store has answered: show the judge the signs, and how much time has passed since the last ones."""
        self._unanswered = 0.0
        self._read_at, before = time.monotonic(), self._read_at
        judge.observe(signs, min(self._read_at - before, 2 * BEAT))  # more: this process itself did not run

    def _pause(self) -> None:
        self._wake.wait(BEAT)
        self._wake.clear()

    def _spread(self, verdict: Verdict, notices: Notices, judge: Judge, beat: int) -> None:
        """Make the verdict known, then end. Rank 0 stays until the others have read it."""
        self._announce(verdict)
        if self._rank == 0:
            notices.write_verdict(verdict)
            deadline = time.monotonic() + _LAST_WORD
            while time.monotonic() < deadline and set(judge.uninformed(BEAT)) - {0}:
                time.sleep(BEAT / 5)
                judge.observe(notices.read(range(self._size))[0], BEAT / 5)
        else:
            if self._end[0] is not Status.ENDED:
                self._end = (Status.INFORMED, "", RANK_LOST)
            notices.write_sign(self._sign(beat + 1))
            notices.wait_until_written()
        self._finish(verdict)

    def _watch(self) -> None:
        """Thread of all but rank 0: end if the store no longer answers. Counts its own turns, so that being stopped is no time."""
        while not self._done.wait(BEAT / 2):
            self._unanswered += BEAT / 2
            usual = self._config.silence_timeout
            if self._unanswered > (min(usual, BROKEN_PATIENCE) if self._end[0] is Status.BROKEN else usual):
                self._finish(connection_lost(self._first, f"gave no sign of life for {self._unanswered:.0f} s"))

    def _announce(self, verdict: Verdict) -> None:
        """Print the first verdict, unless the main thread is about to print an error of its own."""
        with self._judging:
            if self._verdict is None and self._end[0] is not Status.ENDED:
                with suppress(OSError):  # the terminal may be gone
                    os.write(2, f"error: {verdict.sentence}\n".encode())  # the main thread may hold the lock of sys.stderr
            self._verdict = self._verdict or verdict

    def _finish(self, verdict: Verdict) -> None:
        """End the process, whatever its main thread does; let it end on its own if it has an error to tell."""
        self._announce(verdict)
        if self._end[0] is Status.ENDED:
            return
        verdict = self._verdict or verdict  # the first one
        if self._rank in verdict.hanging:
            faulthandler.dump_traceback(file=2, all_threads=True)
        elif verdict.hanging or self._rank != 0:
            time.sleep(BEAT)  # a launcher shows the output of the rank that ends first: the traceback, else the sentence once
        os._exit(verdict.exit_code)


def is_collective_error(error: BaseException) -> bool:
    """Whether ``error`` came from the exchange with other processes, not from this one's own doing."""
    return isinstance(error, dist.DistError) or (
        isinstance(error, RuntimeError) and any(word in str(error) for word in ("gloo", "onnection closed by peer", "NCCL"))
    )


def _first_line(error: BaseException) -> str:
    return printable(str(error).partition("\n")[0] or type(error).__name__, _LONGEST_WORDS)
