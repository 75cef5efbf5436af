"""Which parts of weights and optimizer state a rank holds under each ZeRO stage: slices of named, flattened parameters.

A checkpoint is a set of such slices that together cover everything exactly once. So it can be loaded at any world size and ZeRO
stage: each rank reads the slices that it holds. This is the idea of DeepSpeed's universal checkpoints (weights and moments per
parameter), without their manual conversion, their loss of buffers and their separation of stages 1, 2 and 3.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from pipeline.optim.ema import WeightAverage
from pipeline.optim.engine import Engine
from pipeline.optim.slices import create_state, inner_optimizer, slice_of, updated_tensors

WEIGHT, EMA = "weight", "ema"
ADAM_MOMENTS = ("exp_avg", "exp_avg_sq")  # and LAMB's
MOMENTS = (*ADAM_MOMENTS, "momentum_buffer")  # and Muon's


@dataclass(frozen=True)
class Held:
    """A slice of one quantity of one parameter, flattened."""

    quantity: str  # WEIGHT, EMA or one of MOMENTS
    name: str  # of the parameter
    start: int  # offset in the flattened parameter
    values: Tensor  # (n,) float32, a view: writing to it changes the run
    replicated: bool  # replicated: every rank holds the same slice
    copy: bool = False  # a second copy of another slice of this rank (master weights)

    def share(self, writer: int | None, writers: int) -> Held | None:
        """What this rank saves of it: its share of a replicated slice, all of a slice that only it holds.

        Args:
            writer: its number among those that write replicated slices; None: it writes none.
            writers: how many these are.
        """
        if self.copy:
            return None
        if not self.replicated:
            return self
        if writer is None:
            return None
        count = len(self.values)
        first, end = count * writer // writers, count * (writer + 1) // writers
        return Held(self.quantity, self.name, self.start + first, self.values[first:end], False) if first < end else None


def held(engine: Engine, ema: WeightAverage | None) -> Iterator[Held]:
    """All slices of weights, the optimizer's moments and averaged weights on this rank.

    Moments exist after the first optimizer step, or after :func:`create_moments`.

    Args:
        engine: the DeepSpeed engine, between two steps.
        ema: the averaged weights, if the run has them.
    """
    slices = {0: _replicated, 1: _optimizer_sharded, 2: _optimizer_sharded, 3: _all_sharded}[engine.zero_optimization_stage()]
    averages = ema.averages if ema else {}
    for name, parameter in engine.module.named_parameters():
        yield from slices(engine, name, parameter, averages.get(name))


def create_moments(engine: Engine, optimizer_step: int) -> None:
    """Create the optimizer's state before the first step, so that a checkpoint can be loaded into it. Collective."""
    if optimizer_step == 0:
        return
    create_state(engine)
    for state in inner_optimizer(engine).state.values():
        state["step"].fill_(optimizer_step)


def optimizer_step_count(engine: Engine) -> int:
    """The number of steps that the optimizer has taken."""
    state = inner_optimizer(engine).state
    return next((int(state[tensor]["step"]) for tensor in updated_tensors(engine) if tensor in state), 0)


def _moments(engine: Engine, name: str, parameter: nn.Parameter) -> Iterator[Held]:
    """The slices of a parameter's moments that the optimizer on this rank has."""
    piece = slice_of(engine, name, parameter)
    if piece is None:
        return
    state = inner_optimizer(engine).state.get(piece.tensor, {})
    for moment in MOMENTS:
        if moment in state:
            yield Held(moment, name, piece.start, piece.of(state[moment]), replicated=engine.zero_optimization_stage() == 0)


def _master_weights(engine: Engine, name: str, parameter: nn.Parameter) -> Iterator[Held]:
    """The slice of a parameter's weights in the optimizer's flat shards, with ZeRO."""
    piece = slice_of(engine, name, parameter)
    if piece is not None:
        yield Held(WEIGHT, name, piece.start, piece.of(piece.tensor), replicated=False, copy=True)


def _replicated(engine: Engine, name: str, parameter: nn.Parameter, average: Tensor | None) -> Iterator[Held]:
    """ZeRO 0: every rank holds everything."""
    yield Held(WEIGHT, name, 0, parameter.data.view(-1), replicated=True)
    yield from _moments(engine, name, parameter)
    if average is not None:
        yield Held(EMA, name, 0, average.view(-1), replicated=True)


def _optimizer_sharded(engine: Engine, name: str, parameter: nn.Parameter, average: Tensor | None) -> Iterator[Held]:
    """ZeRO 1 and 2: all weights, but master weights and moments only of a slice, inside flat shards of many parameters."""
    yield Held(WEIGHT, name, 0, parameter.data.view(-1), replicated=True)
    if average is not None:
        yield Held(EMA, name, 0, average.view(-1), replicated=True)
    yield from _master_weights(engine, name, parameter)
    yield from _moments(engine, name, parameter)


def _all_sharded(engine: Engine, name: str, parameter: nn.Parameter, average: Tensor | None) -> Iterator[Held]:
    """ZeRO 3: one slice of each parameter, all of equal length, so that the last ones are padded."""
    shard, whole = parameter.ds_tensor, parameter.ds_numel  # type: ignore[attr-defined]  # set by DeepSpeed
    size = shard.ds_numel
    start = size * torch.distributed.get_rank()
    count = max(0, min(size, whole - start))
    if count == 0:
        return
    yield Held(WEIGHT, name, start, shard.data[:count], replicated=False)
    if average is not None:
        yield Held(EMA, name, start, average[:count], replicated=False)
    yield from _master_weights(engine, name, parameter)
    yield from _moments(engine, name, parameter)
