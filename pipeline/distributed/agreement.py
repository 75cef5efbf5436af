"""Collective decisions: the error of one rank is raised on all, and all stop, or publish a checkpoint, at the same step."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist

from pipeline.distributed.world import DEFAULT_TIMEOUT, World
from pipeline.errors import UserError

Result = TypeVar("Result")
FLAT = 32  # ranks that are one group; more are a grid, see Agreement


def do_in_main(action: Callable[[], Result], world: World) -> Result | None:
    """Run an action, such as writing a file, on rank 0 alone while the others wait. Collective.

    Args:
        action: runs on rank 0.
        world: all ranks.

    Returns:
        The action's result on rank 0, None elsewhere.

    Raises:
        UserError: on every rank, if the action raised one.
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
    """Raise on every rank if any rank has an error. Collective.

    Args:
        error: this rank's, or None.
        world: all ranks.

    Raises:
        UserError: the message of the lowest rank that has one.
    """
    failed = torch.tensor(float(error is not None), device=world.device)
    if world.sum(failed):  # rare: gathering objects is slow
        raise next(UserError(sentence) for sentence in world.gather(str(error) if error else None) if sentence)


@dataclass(frozen=True)
class Agreed:
    """The status of all ranks together; identical on each rank at the same exchange."""

    stop: int  # the signal that some rank received, or 0
    save_failed: bool  # some rank cannot write its part of a checkpoint
    written: int  # saves that every rank has on disk


class Agreement:
    """Asynchronous status exchange over gloo groups of its own, apart from the GPUs' traffic.

    Each call starts an all-reduce and returns the result of the one before: no rank waits, yet all act at the same step.
    Collective: every rank must make the same calls.

    A gloo group connects each rank with each, and its ring passes a status on 2 (N - 1) times, one after the other. More than
    ``FLAT`` ranks are therefore a grid of rows and columns, and a status goes round a row in one call and round the columns in the
    next: 4,096 ranks have 126 connections and 126 messages in a row per call, in place of 4,095 and 8,190.

    Args:
        timeout: seconds that an exchange may wait for a rank.
        flat: in place of ``FLAT``.

    Raises:
        UserError: the ranks cannot reach each other.
    """

    def __init__(self, timeout: float = DEFAULT_TIMEOUT, flat: int = FLAT) -> None:
        groups = grid(dist.get_rank(), dist.get_world_size(), flat)
        try:
            self._groups = [  # of rows and columns, each rank makes its own two alone
                dist.new_group(ranks, timedelta(seconds=timeout), "gloo", use_local_synchronization=len(groups) > 1)
                for ranks in groups
            ]
        except RuntimeError as error:
            reason = str(error).partition("\n")[0]
            raise UserError(
                f"the ranks cannot connect over gloo ({reason})",
                "set GLOO_SOCKET_IFNAME to the network interface between the nodes, such as eth0 (ip addr lists them)",
            ) from None
        self._work: list[dist.Work] = []
        # Of each group: stop, save_failed, -written: the maximum of the last is its minimum.
        self._values = [torch.zeros(3, dtype=torch.int64) for _ in self._groups]

    def exchange(self, stop: int = 0, save_failed: bool = False, written: int = 0) -> Agreed:
        """Exchange status with all ranks. Collective.

        Args:
            stop: the signal that this rank received, or 0.
            save_failed: this rank cannot write its part of a checkpoint.
            written: saves that this rank has on disk.

        Returns:
            The status as of the previous call, or the one before that with more than ``flat`` ranks.
        """
        self._wait()
        values = self._values[-1].tolist()
        result = Agreed(values[0], bool(values[1]), -values[2])
        self._values = [torch.tensor([stop, int(save_failed), -written]), *self._values[:-1]]
        self._work = [
            dist.all_reduce(values, dist.ReduceOp.MAX, group=group, async_op=True)
            for values, group in zip(self._values, self._groups, strict=True)
        ]
        return result

    def ask(self, yes: bool) -> bool:
        """Whether any rank says yes. Collective and blocking; no exchange is pending afterwards."""
        self._wait()
        value = torch.tensor([int(yes)])
        for group in self._groups:
            dist.all_reduce(value, dist.ReduceOp.MAX, group=group)
        return bool(value.item())

    def _wait(self) -> None:
        for work in self._work:
            work.wait()
        self._work = []


def grid(rank: int, size: int, flat: int) -> list[list[int]]:
    """The groups through which a rank hears from all others, one after the other: its row and its column, or all ranks at once.

    Args:
        rank, size: of this process, and the world size.
        flat: largest size of a single group. A larger world has as many rows as the largest divisor up to its square root: one,
            too, if its size is a prime number.
    """
    rows = max(number for number in range(1, math.isqrt(size) + 1) if size % number == 0) if size > flat else 1
    if rows == 1:
        return [list(range(size))]
    columns = size // rows
    first = rank - rank % columns
    return [list(range(first, first + columns)), list(range(rank % columns, size, columns))]
