"""How a global batch is made up of the micro-batches of all processes."""

from __future__ import annotations

from pipeline.config.sections import TrainConfig
from pipeline.errors import UserError


def accumulation_steps(train: TrainConfig, world_size: int) -> int:
    """Micro-batches per optimizer step: global batch / (micro-batch * processes).

    Raises:
        UserError: it does not divide; the sentence shows the arithmetic.
    """
    per_pass = train.micro_batch_size * world_size
    steps, rest = divmod(train.global_batch_size, per_pass)
    if rest or steps == 0:
        fitting = [m for m in range(1, train.micro_batch_size + 1) if train.global_batch_size % (m * world_size) == 0]
        remedy = (
            f"set train.micro_batch_size to {fitting[-1]}"
            if fitting
            else f"set train.global_batch_size to a multiple of {world_size}"
        )
        raise UserError(
            f"train.global_batch_size is {train.global_batch_size}, but train.micro_batch_size {train.micro_batch_size} x "
            f"{world_size} processes = {per_pass} does not divide it ({train.global_batch_size} / {per_pass} = "
            f"{train.global_batch_size / per_pass:.4g} accumulation steps, a whole number needed): {remedy}."
        )
    return steps
