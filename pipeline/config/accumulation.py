"""Gradient accumulation: how the micro-batches of all ranks add up to the global batch."""

from __future__ import annotations

import math

from pipeline.config.bounds import MAX_BATCH
from pipeline.config.sections import TrainConfig
from pipeline.errors import UserError


def accumulation_steps(train: TrainConfig, world_size: int, unit: int = 1) -> int:
    """Micro-batches per rank and optimizer step: global batch size / (micro-batch size * world size).

    Args:
        train: both batch sizes.
        world_size: number of processes.
        unit: a micro-batch must be a multiple of this (``config.augment.unit``); the suggested values respect it.

    Raises:
        UserError: the batch sizes do not divide; the message shows the arithmetic and values that work.
    """
    global_batch, micro = train.global_batch_size, train.micro_batch
    per_pass = micro * world_size
    steps, rest = divmod(global_batch, per_pass)
    if rest or steps == 0:
        processes = "process" if world_size == 1 else "processes"
        raise UserError(
            f"train.global_batch_size must be a multiple of train.micro_batch_size {micro} x {world_size} {processes} = {per_pass}, got "
            f"{global_batch} ({global_batch} / {per_pass} = {global_batch / per_pass:.4g} accumulation steps)",
            _remedy(global_batch, micro, world_size, unit),
        )
    return steps


def fitting_micro_batches(train: TrainConfig, world_size: int, unit: int = 1) -> list[int]:
    """The micro-batch sizes that a run may have on so many processes, ascending; for the arguments see :func:`accumulation_steps`.

    Raises:
        UserError: there are none.
    """
    global_batch, whole = train.global_batch_size, unit * world_size
    per_rank, rest = divmod(global_batch, whole)
    if rest or not per_rank:
        of_units = f" in groups of {unit} images (augment.mix_group)" if unit > 1 else ""
        raise UserError(
            f"train.global_batch_size must be a multiple of {whole} for {world_size} processes{of_units}, got {global_batch} "
            f"({global_batch} / {whole} = {global_batch / whole:.4g})",
            _remedy(global_batch, None, world_size, unit),
        )
    return [unit * number for number in _divisors(per_rank) if unit * number <= MAX_BATCH]


def _remedy(global_batch: int, micro: int | None, world_size: int, unit: int) -> str:
    """Micro-batch sizes (None: any) and world sizes that fit this global batch size, which a run cannot change once started."""
    if global_batch % unit:  # no run can have started with it, so suggest another global batch size
        needed = unit * world_size
        return f"set train.global_batch_size to a multiple of {needed} (augment.mix_group {unit} x {world_size} processes)"
    fitting = _divisors(global_batch // unit)  # world sizes
    nearest = max((n for n in fitting if n < world_size), default=0), min((n for n in fitting if n > world_size), default=0)
    starts = []
    for number in filter(None, nearest):
        best = micro and _largest(global_batch, number, micro, unit)
        starts.append(f"{number}" if best == micro else f"{number} with train.micro_batch_size={best}")
    remedies = [f"start another number of processes, such as {' or '.join(starts)}"] if starts else []
    if micro and world_size in fitting:
        remedies.insert(0, f"set train.micro_batch_size to {_largest(global_batch, world_size, micro, unit)}")
    return ", or ".join(remedies)


def _largest(global_batch: int, world_size: int, micro: int, unit: int) -> int:
    """The largest micro-batch size up to ``micro``, itself a multiple of ``unit``, that fits; ``unit`` always does."""
    return unit * max(n for n in _divisors(global_batch // world_size // unit) if n * unit <= micro)


def _divisors(number: int) -> list[int]:
    small = [n for n in range(1, math.isqrt(number) + 1) if number % n == 0]
    return sorted({*small, *(number // n for n in small)})
