"""The wish of a cluster, a terminal or a launcher that this process ends soon."""

from __future__ import annotations

import os
import signal

LAUNCHER = "PERVIT_LAUNCHER_PID"  # set by launch/local.sh, whose death is a SIGTERM for its ranks
ALONE_SECONDS = 60  # that a rank may take to end where no launcher is left to see to it; launch/local.sh waits as long


class StopSignal:
    """Notes SIGTERM and SIGUSR1, by which a cluster asks a job to end soon, and SIGHUP: the terminal was closed; the
    training looks at it between two steps.

    A context manager; the former handlers come back at its end, unless a signal has come: clusters repeat it, and the second one
    must not change the exit code of a process that is about to end. SIGHUP stays ignored where it was (``nohup``).

    Attributes:
        received: the signal's number, or 0.
    """

    def __init__(self) -> None:
        self.received = 0

    def __enter__(self) -> StopSignal:
        numbers = [signal.SIGTERM, signal.SIGUSR1]
        if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:
            numbers.append(signal.SIGHUP)
        self._former = {number: signal.signal(number, self._note) for number in numbers}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._former.items():
            signal.signal(number, signal.SIG_IGN if self.received else handler)

    def _note(self, number: int, _frame: object) -> None:
        self.received = number
        parent = str(os.getppid())
        if os.environ.get(LAUNCHER, parent) != parent:
            signal.alarm(ALONE_SECONDS)  # SIGALRM ends the process, even inside a collective operation that never ends
