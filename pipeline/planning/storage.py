"""Checkpoints of a run: bytes of each, how many are kept, how many are written."""

from __future__ import annotations

import math
from dataclasses import dataclass

from pipeline.config import Config
from pipeline.planning.operators import Step
from pipeline.planning.schedule import Length

_FLOAT = 4  # weights, moments and averages are saved in float32
_HOLD_UP_RATE = 5e9  # bytes per second of the copy to the CPU's memory for which a save holds up the training; an assumption


@dataclass(frozen=True)
class Checkpoints:
    """Sizes in bytes.

    Attributes:
        size: of one checkpoint, the parts of all processes together.
        part: of one process.
        kept: that lie on the disk at the end, the best one included.
        regular: written over the whole run by ``checkpoint.every_steps``, and at its end.
        written: at most: an evaluation that is the best so far adds one.
    """

    size: int
    part: int
    kept: int
    regular: int
    written: int

    @property
    def hold_up(self) -> float:
        """Seconds for which a save holds up the training: one copy in memory; writing goes on beside it."""
        return self.part / _HOLD_UP_RATE


def plan_checkpoints(config: Config, step: Step, length: Length, world_size: int) -> Checkpoints:
    """What the run's checkpoints take.

    Args:
        config: of the run.
        step: with the model's parameters.
        length: of the run.
        world_size: processes, between which a checkpoint's bytes are divided.
    """
    chosen, parameters = config.checkpoint, step.parameter_count
    size = _FLOAT * parameters * (1 + bool(config.train.ema_decay)) + _FLOAT * moments(config, step) + step.buffers
    by_multiple = length.steps // chosen.keep_every_steps if chosen.keep_every_steps else 0
    kept = min(chosen.keep_last, length.saves) + int(chosen.keep_best) + by_multiple
    written = length.saves + (length.evaluations if chosen.keep_best else 0)
    return Checkpoints(size, math.ceil(size / world_size), kept, length.saves, written)


def moments(config: Config, step: Step) -> int:
    """Numbers that the optimizer keeps: two for each parameter; Muon one for each of its matrices."""
    if config.optim.name != "muon":
        return 2 * step.parameter_count
    matrices = sum(math.prod(shape) for shape in step.parameters if len(shape) == 2)
    return 2 * step.parameter_count - matrices
