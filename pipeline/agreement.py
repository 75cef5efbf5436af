"""An error of one process becomes the error of all, so that none waits for one that has stopped."""

from __future__ import annotations

import torch

from pipeline.distributed import World
from pipeline.errors import UserError


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
