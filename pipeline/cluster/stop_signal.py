"""Cooperative shutdown on SIGTERM, SIGUSR1 and SIGHUP."""

from __future__ import annotations

import os
import signal

LAUNCHER = "PERVIT_LAUNCHER_PID"  # set by launch/local.sh, whose death sends SIGTERM to its ranks
ALONE_SECONDS = 60  # grace period once the launcher is gone; launch/local.sh itself waits as long before it kills its ranks


class StopSignal:
    """Records SIGTERM and SIGUSR1, which a cluster sends before it ends a job, and SIGHUP of a closed terminal. The training
    loop checks it between steps.

    A context manager. On exit it restores the former handlers, or ignores these signals if one was received: clusters repeat
    them, and a second one must not change the exit code of a process that is shutting down. An ignored SIGHUP (``nohup``) stays
    ignored.

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
            signal.alarm(ALONE_SECONDS)  # SIGALRM ends the process even inside a collective that hangs
