"""An error of one process becomes the error of all, so that none waits for one that has stopped."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch

from pipeline.distributed import World
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
