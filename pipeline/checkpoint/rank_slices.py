"""Find what a rank holds of weights and optimizer state under each ZeRO stage: slices of named, flattened parameters.

A checkpoint is a set of such slices that together cover everything exactly once. So it can be loaded at any world size and ZeRO
stage: each rank reads the slices that it holds. This is the idea of DeepSpeed's universal checkpoints (weights and moments per
parameter), without their manual conversion, their loss of buffers and their separation of stages 1, 2 and 3. Of the optimizer it
knows nothing: it saves what is in its state, tensors of a parameter's shape in slices and anything else as a number.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import cycle
from typing import Any

import torch
from torch import Tensor, nn

from pipeline.checkpoint.manifest import OptimizerState
from pipeline.checkpoint.parts import BUFFER, EMA, EMA_BUFFER, WEIGHT, optimizer_quantity, slice_key
from pipeline.cluster.world import World
from pipeline.optim.averages import WeightAverage
from pipeline.optim.engine import Engine
from pipeline.optim.slices import inner_optimizer, slice_of, updated_groups

# Ranks that write what all ranks hold. More would not be faster, but a rank that loads needs all of it: it opens their files.
_WRITERS = 16


@dataclass(frozen=True)
class RankSlice:
    """A slice of one quantity of one parameter, flattened."""

    quantity: str  # WEIGHT, EMA or optimizer_quantity
    name: str  # of the parameter
    start: int  # offset in the flattened parameter
    values: Tensor  # (n,) a view: writing to it changes the run
    replicated: bool  # every rank holds the same slice
    copy: bool = False  # a second copy of another slice of this rank (master weights)

    def written_by(self, writer: int | None, writers: int) -> "RankSlice | None":
        """What this rank saves of it: all of a slice that only it holds, and as ``writer`` its share of a replicated one."""
        if self.copy or self.replicated and writer is None:
            return None
        if not self.replicated or writer is None:
            return self
        count = len(self.values)
        first, end = count * writer // writers, count * (writer + 1) // writers
        return replace(self, start=self.start + first, values=self.values[first:end]) if first < end else None


def rank_slices(engine: Engine, ema: WeightAverage | None) -> Iterator[RankSlice]:
    """All slices of weights, of averaged weights and of the optimizer's state on this rank; the latter exists after its first step, or
    after :func:`~pipeline.optim.slices.create_state`."""
    stage, state = engine.zero_optimization_stage(), inner_optimizer(engine).state
    for name, parameter in engine.module.named_parameters():
        start, values = 0, parameter.data.view(-1)
        if stage == 3:  # one slice of each parameter, all of equal length, so that the last ones are padded
            shard, elements = parameter.ds_tensor, parameter.ds_numel
            start = shard.ds_numel * torch.distributed.get_rank()
            values = shard.data[: max(0, min(shard.ds_numel, elements - start))]
            if not len(values):
                continue
        yield RankSlice(WEIGHT, name, start, values, replicated=stage < 3)
        if ema:
            yield RankSlice(EMA, name, start, ema.averages[name].view(-1)[: len(values)], replicated=stage < 3)
        updated = slice_of(engine, name, parameter)
        if updated is None:
            continue
        if stage:
            yield RankSlice(WEIGHT, name, updated.start, updated.of(updated.tensor), replicated=False, copy=True)
        for key, value in state.get(updated.tensor, {}).items():
            if _is_tensor(value, updated.tensor):
                yield RankSlice(optimizer_quantity(key), name, updated.start, updated.of(value), replicated=stage == 0)


def _is_tensor(value: Any, updated: Tensor) -> bool:
    return isinstance(value, Tensor) and value.shape == updated.shape


def _scalars(kept: Mapping[str, Any], updated: Tensor) -> dict[str, Any]:
    return {key: value for key, value in kept.items() if value is not None and not _is_tensor(value, updated)}


def _updated_parameters(engine: Engine) -> Iterator[tuple[str, Tensor]]:
    """Each parameter with the tensor that the optimizer updates for it: the parameter, or the flat shard of its group."""
    for group, tensors in updated_groups(engine):
        yield from zip(group["names"], cycle(tensors))


def optimizer_state(engine: Engine) -> list[OptimizerState]:
    """What the optimizer keeps for the parameters of each group, as it is; nothing before the first step."""
    found, state = [], inner_optimizer(engine).state
    for group, tensors in updated_groups(engine):
        largest = max(tensors, key=torch.numel, default=None)  # of a parameter of shape () a number has the shape, too
        if group["names"] and largest is not None and (kept := state.get(largest)):
            shaped = [key for key, value in kept.items() if _is_tensor(value, largest)]
            found.append(OptimizerState(group["names"], shaped, list(_scalars(kept, largest))))
    return found


def read_scalars(engine: Engine, read: Callable[[str, str], Tensor]) -> None:
    """Restore the scalars of an optimizer that has its state. ``read``: (quantity, parameter) -> (1,)"""
    for name, tensor in _updated_parameters(engine):
        kept = inner_optimizer(engine).state[tensor]
        for key, value in _scalars(kept, tensor).items():
            saved = read(optimizer_quantity(key), name)[0]
            kept[key] = value.copy_(saved) if isinstance(value, Tensor) else type(value)(saved.item())


def saved_tensors(engine: Engine, ema: WeightAverage | None, world: World) -> dict[str, Tensor]:
    """The live tensors that this rank saves: what only it holds, and if it is a writer its share of what all hold; on rank 0 also the
    optimizer's scalars, buffers and their averages. Empty for some ranks of a large world."""
    tensors = {}
    writers = min(world.size, _WRITERS)
    writer = writer_number(world.rank, world.size, writers)
    for held in rank_slices(engine, ema):
        if written := held.written_by(writer, writers):
            tensors[slice_key(written.quantity, written.name, written.start)] = written.values.detach()
    if world.is_main:
        state = inner_optimizer(engine).state
        for name, tensor in _updated_parameters(engine):
            for key, value in _scalars(state.get(tensor, {}), tensor).items():
                number = value.detach() if isinstance(value, Tensor) else torch.tensor(value, dtype=torch.float64)
                tensors[slice_key(optimizer_quantity(key), name, 0)] = number.reshape(1)
        for name, buffer in saved_buffers(engine.module).items():
            tensors[slice_key(BUFFER, name, 0)] = buffer.detach()
        for name, average in ema.buffers.items() if ema else ():
            tensors[slice_key(EMA_BUFFER, name, 0)] = average.reshape(-1)
    return tensors


def writer_number(rank: int, size: int, writers: int) -> int | None:
    """Which of ``writers`` ranks, spread evenly over all, this one is; None: none of them."""
    number = -(-rank * writers // size)
    return number if number * size // writers == rank else None


def bytes_of_all(engine: Engine, ema: WeightAverage | None, world: World) -> int:
    """Bytes that all ranks save together, about: slices that not all hold are taken to be of one size."""
    held = [found for found in rank_slices(engine, ema) if not found.copy]
    shared = sum(found.values.nbytes for found in held if found.replicated)
    return shared + world.size * sum(found.values.nbytes for found in held if not found.replicated)


def saved_buffers(model: nn.Module) -> dict[str, Tensor]:
    """The state dict without parameters: for example BatchNorm's running statistics."""
    parameters = {name for name, _ in model.named_parameters()}
    return {name: value for name, value in model.state_dict().items() if name not in parameters}
