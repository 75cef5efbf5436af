"""The wish of a cluster that this process ends soon."""

from __future__ import annotations

import signal


class StopSignal:
    """Notes SIGTERM and SIGUSR1, by which a cluster asks a job to end soon; the training looks at it between two steps.

    A context manager; the former handlers come back at its end, unless a signal has come: clusters repeat it, and the second one
    must not change the exit code of a process that is about to end.

    Attributes:
        received: the signal's number, or 0.
    """

    def __init__(self) -> None:
        self.received = 0

    def __enter__(self) -> StopSignal:
        self._former = {number: signal.signal(number, self._note) for number in (signal.SIGTERM, signal.SIGUSR1)}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._former.items():
            signal.signal(number, signal.SIG_IGN if self.received else handler)

    def _note(self, number: int, _frame) -> None:
        self.received = number
