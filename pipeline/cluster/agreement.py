"""Decide together: the error of one rank is raised on all, and all stop, or publish a checkpoint, at the same step."""

from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import TypeVar, cast

import torch
import torch.distributed as dist

from pipeline.cluster.rendezvous import DEFAULT_TIMEOUT
from pipeline.cluster.world import World
from pipeline.errors import UserError, first_line

Result = TypeVar("Result")
_RANKS_PER_CALL = 256  # up to which every call of an exchange reaches the others: gloo's ring takes 20 ms for them


def do_in_main(action: Callable[[], Result], world: World) -> Result | None:
    """Run an action on rank 0 alone while the others wait; None elsewhere. Its ``UserError`` is raised on every rank. Collective."""
    return do_on_all(lambda: action() if world.is_main else None, world)


def do_on_all(action: Callable[[], Result], world: World) -> Result:
    """Run an action on every rank. The ``UserError`` of any is raised on all. Collective."""
    result = failure = None
    try:
        result = action()
    except UserError as error:
        failure = error
    raise_on_all(failure, world)
    return cast(Result, result)


def raise_on_all(error: UserError | None, world: World) -> None:
    """Raise a ``UserError`` on every rank if any rank has one, with the message of the lowest that has. Collective."""
    failed = torch.tensor(float(error is not None), device=world.device)
    if world.sum(failed):  # rare: gathering objects is slow
        raise next(UserError(sentence) for sentence in world.gather(str(error) if error else None) if sentence)


@dataclass(frozen=True)
class Agreed:
    """The status of all ranks together; identical on each rank at the same exchange."""

    stop: int  # the signal that some rank received, or 0
    save_failed: bool  # some rank cannot write its part of a checkpoint
    written: int  # saves that every rank has on disk
    sent: int = 0  # of these, those that every rank has copied to the run's store


class Agreement:
    """Asynchronous status exchange over a gloo group of its own, apart from the GPUs' traffic.

    A call starts an all-reduce and returns the result of the one before: no rank waits, yet all act at the same step.
    Collective: every rank must make the same calls.

    gloo's ring passes a status on 2 (N - 1) times, one after the other, at about 40 µs each. From 512 ranks on only every
    second call starts an all-reduce, at 1,024 every fourth, so that steps of 20 ms still do not wait for it. Raises UserError:
    the ranks cannot reach each other; an exchange waits for one for ``timeout`` seconds."""

    def __init__(self, timeout: float = DEFAULT_TIMEOUT, every: int | None = None) -> None:
        self._every = every or max(1, dist.get_world_size() // _RANKS_PER_CALL)
        self._calls = 0
        self._work: dist.Work | None = None
        # stop, save_failed, -written, -sent: the maximum of these is their minimum
        self._values = torch.zeros(4, dtype=torch.int64)
        self._agreed = Agreed(0, False, 0)
        try:
            self._group = dist.new_group(timeout=timedelta(seconds=timeout), backend="gloo")
        except RuntimeError as error:
            remedy = "set GLOO_SOCKET_IFNAME to the network interface between the nodes, such as eth0 (ip addr lists them)"
            raise UserError(f"the ranks cannot connect over gloo ({first_line(error)})", remedy) from None

    def exchange(self, stop: int = 0, save_failed: bool = False, written: int = 0, sent: int = 0) -> Agreed:
        """Exchange this rank's status, with the meanings of :class:`Agreed`. Collective. Returns that of all ranks at the
        all-reduce before the newest one; at first, that nothing has happened."""
        if self._calls % self._every == 0:
            self._wait()
            highest_stop, any_failed, fewest_written, fewest_sent = self._values.tolist()
            self._agreed = Agreed(highest_stop, bool(any_failed), -fewest_written, -fewest_sent)
            self._values = torch.tensor([stop, int(save_failed), -written, -sent])
            self._work = dist.all_reduce(self._values, dist.ReduceOp.MAX, group=self._group, async_op=True)
        self._calls += 1
        return self._agreed

    def ask(self, yes: bool) -> bool:
        """Whether any rank says yes. Collective and blocking; no exchange is pending afterwards."""
        self._wait()
        value = torch.tensor([int(yes)])
        dist.all_reduce(value, dist.ReduceOp.MAX, group=self._group)
        return bool(value.item())

    def _wait(self) -> None:
        if self._work:
            self._work.wait()
        self._work = None
