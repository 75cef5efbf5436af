"""Processes agree, once a step and without waiting for each other, on whether to stop and on what is written."""

from __future__ import annotations

import signal
from dataclasses import dataclass

import torch
import torch.distributed as dist


@dataclass(frozen=True)
class Agreed:
    """What all processes know of each other; the same on each at the same exchange."""

    stop: int  # the signal that a process was sent, or 0
    save_failed: bool  # one cannot write its part of a checkpoint
    written: int  # saves that all have on the disk


class Agreement:
    """Exchanges a few numbers over CPU connections of its own, beside what the GPUs send each other.

    An exchange begins at one call and its result comes with the next one. So nobody waits, and all still act at the same
    step. Every process must call equally often.
    """

    def __init__(self) -> None:
        self._group = dist.new_group(backend="gloo")
        self._work, self._values = None, torch.zeros(3, dtype=torch.int64)

    def exchange(self, stop: int = 0, save_failed: bool = False, written: int = 0) -> Agreed:
        """Tell the others how this process stands.

        Returns:
            What all had told at the call before.
        """
        self._wait()
        values = self._values.tolist()
        result = Agreed(values[0], bool(values[1]), -values[2])
        self._values = torch.tensor([stop, int(save_failed), -written])
        self._work = dist.all_reduce(self._values, dist.ReduceOp.MAX, group=self._group, async_op=True)
        return result

    def ask(self, yes: bool) -> bool:
        """Whether anyone says yes; all wait for the answer. Afterwards nothing is under way."""
        self._wait()
        value = torch.tensor([int(yes)])
        dist.all_reduce(value, dist.ReduceOp.MAX, group=self._group)
        return bool(value.item())

    def _wait(self) -> None:
        if self._work:
            self._work.wait()
            self._work = None


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
