"""Which numbers of a run a process holds, under any ZeRO stage: stretches of named, flattened parameters.

A checkpoint is a set of such stretches that together cover everything once. So any number of processes, at any ZeRO stage, can
read what another one has written: each asks for the stretches that it holds. This is the idea of DeepSpeed's universal
checkpoints (per-parameter weights and moments), without their conversion by hand, their loss of buffers and their border
between the stages 1, 2 and 3.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from pipeline.optim.ema import WeightAverage
from pipeline.optim.engine import Engine

WEIGHT, EMA = "weight", "ema"
MOMENTS = ("exp_avg", "exp_avg_sq")


@dataclass(frozen=True)
class Held:
    """A stretch of one quantity of one parameter."""

    quantity: str  # "weight", "exp_avg", "exp_avg_sq" or "ema"
    name: str  # of the parameter
    start: int  # place of the first number in the flattened parameter
    values: Tensor  # (n,) float32, a view: writing into it changes the run
    everywhere: bool  # every process holds the same stretch
    copy: bool = False  # a second copy of what is held as another stretch already

    def share(self, rank: int, size: int) -> Held | None:
        """What process ``rank`` of ``size`` saves of it: a part of what all hold, all of what nobody else does."""
        if self.copy:
            return None
        if not self.everywhere:
            return self
        count = len(self.values)
        first, end = count * rank // size, count * (rank + 1) // size
        return Held(self.quantity, self.name, self.start + first, self.values[first:end], False) if first < end else None


def held(engine: Engine, ema: WeightAverage | None) -> Iterator[Held]:
    """Everything that this process holds of weights, AdamW's moments and averaged weights.

    Moments appear once the optimizer has taken a step, or after :func:`create_moments`.

    Args:
        engine: the DeepSpeed engine, between two steps.
        ema: the averaged weights, if the run has them.
    """
    stretches = {0: _replicated, 1: _optimizer_sharded, 2: _optimizer_sharded, 3: _all_sharded}[
        engine.zero_optimization_stage()
    ]
    averages = ema.averages if ema else {}
    for name, parameter in engine.module.named_parameters():
        yield from stretches(engine, name, parameter, averages.get(name))


def create_moments(engine: Engine, optimizer_step: int) -> None:
    """Give AdamW its state before the first step, all zeros, so that a checkpoint can be read into it."""
    if optimizer_step == 0:
        return
    optimizer, flat = _optimizer_and_tensors(engine)
    for tensor in flat:
        step = torch.tensor(float(optimizer_step), dtype=torch.float32, device=tensor.device)
        optimizer.state[tensor] = {"step": step, **{moment: torch.zeros_like(tensor) for moment in MOMENTS}}


def optimizer_step_count(engine: Engine) -> int:
    """How many steps AdamW has taken."""
    optimizer, flat = _optimizer_and_tensors(engine)
    return next((int(optimizer.state[tensor]["step"]) for tensor in flat if tensor in optimizer.state), 0)


def _optimizer_and_tensors(engine: Engine) -> tuple[torch.optim.Optimizer, list[Tensor]]:
    """PyTorch's optimizer and the tensors it works on: parameters, or flat shards of many."""
    stage, optimizer = engine.zero_optimization_stage(), engine.optimizer
    if stage == 0:
        return optimizer, [p for p in engine.module.parameters() if p.requires_grad]
    flat = optimizer.fp32_partitioned_groups_flat if stage == 3 else optimizer.single_partition_of_fp32_groups
    return optimizer.optimizer, list(flat)


def _replicated(engine: Engine, name: str, parameter: nn.Parameter, average: Tensor | None) -> Iterator[Held]:
    """ZeRO 0: every process holds everything."""
    yield Held(WEIGHT, name, 0, parameter.data.view(-1), everywhere=True)
    for moment in MOMENTS:
        if moment in (state := engine.optimizer.state.get(parameter, {})):
            yield Held(moment, name, 0, state[moment].view(-1), everywhere=True)
    if average is not None:
        yield Held(EMA, name, 0, average.view(-1), everywhere=True)


def _optimizer_sharded(engine: Engine, name: str, parameter: nn.Parameter, average: Tensor | None) -> Iterator[Held]:
    """ZeRO 1 and 2: all weights, but master weights and moments of a stretch only, inside flat shards of many parameters."""
    yield Held(WEIGHT, name, 0, parameter.data.view(-1), everywhere=True)
    if average is not None:
        yield Held(EMA, name, 0, average.view(-1), everywhere=True)
    mapping = getattr(parameter, "_hp_mapping", None)  # None: frozen, or another process has it
    if mapping is None:
        return
    start, place = mapping.lp_fragment_address.start, mapping.get_hp_fragment_address()
    flat = engine.optimizer.single_partition_of_fp32_groups[mapping.param_group_index]
    yield Held(WEIGHT, name, start, flat.data.narrow(0, place.start, place.numel), everywhere=False, copy=True)
    state = engine.optimizer.optimizer.state.get(flat, {})
    for moment in MOMENTS:
        if moment in state:
            yield Held(moment, name, start, state[moment].narrow(0, place.start, place.numel), everywhere=False)


def _all_sharded(engine: Engine, name: str, parameter: nn.Parameter, average: Tensor | None) -> Iterator[Held]:
    """ZeRO 3: one stretch of each parameter, all of the same length, so that the last ones are padded."""
    shard, whole = parameter.ds_tensor, parameter.ds_numel  # type: ignore[attr-defined]  # set by DeepSpeed
    size = shard.ds_numel
    start = size * torch.distributed.get_rank()
    count = max(0, min(size, whole - start))
    if count == 0:
        return
    yield Held(WEIGHT, name, start, shard.data[:count], everywhere=False)
    if average is not None:
        yield Held(EMA, name, start, average[:count], everywhere=False)
    if not parameter.requires_grad:
        return
    optimizer = engine.optimizer
    group, place, _ = optimizer.grad_position[optimizer.get_param_id(parameter)]
    flat = optimizer.fp32_partitioned_groups_flat[group]
    yield Held(WEIGHT, name, start, flat.data.narrow(0, place, count), everywhere=False, copy=True)
    state = optimizer.optimizer.state.get(flat, {})
    for moment in MOMENTS:
        if moment in state:
            yield Held(moment, name, start, state[moment].narrow(0, place, count), everywhere=False)
