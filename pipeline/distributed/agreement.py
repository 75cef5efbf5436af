"""Processes that act together: an error of one becomes the error of all, and all stop, or complete a save, at the same step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist

from pipeline.distributed.world import World
from pipeline.errors import UserError

Result = TypeVar("Result")


def do_in_main(action: Callable[[], Result], world: World) -> Result | None:
    """Let the main process do something, such as writing a file; every process must call.

    Args:
        action: what it does; the other processes do nothing meanwhile.
        world: all processes.

    Returns:
        In the main process what the action returned, None in the others.

    Raises:
        UserError: in every process: what the action raised in the main one.
    """
    result = failure = None
    if world.is_main:
        try:
            result = action()
        except UserError as error:
            failure = error
    raise_on_all(failure, world)
    return result


def raise_on_all(error: UserError | None, world: World) -> None:
    """Raise in every process what at least one of them has met; every process must call.

    Args:
        error: what this process has met, or None.
        world: all processes.

    Raises:
        UserError: the sentence of the first process, by rank, that has one.
    """
    failed = torch.tensor(float(error is not None), device=world.device)
    if world.sum(failed):  # seldom: gathering objects is slow
        raise next(UserError(sentence) for sentence in world.gather(str(error) if error else None) if sentence)


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

    Args:
        patience: seconds that an exchange may wait for a process.

    Raises:
        UserError: the processes cannot reach each other.
    """

    def __init__(self, patience: float = 1800) -> None:
        try:
            self._group = dist.new_group(backend="gloo", timeout=timedelta(seconds=patience))
        except RuntimeError as error:
            reason = str(error).partition("\n")[0]
            raise UserError(
                f"the processes cannot connect their CPUs ({reason}): set GLOO_SOCKET_IFNAME to the network interface between the nodes, "
                f"such as eth0 (ip addr lists them)."
            ) from None
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
