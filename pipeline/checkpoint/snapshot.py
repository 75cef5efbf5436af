"""What a process saves, and a copy of it in memory: the only part of a save for which the training waits."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from pipeline.checkpoint.held import held
from pipeline.checkpoint.parts import BUFFER, stretch_key
from pipeline.distributed.world import World
from pipeline.optim.ema import WeightAverage
from pipeline.optim.engine import Engine

_ALIGNMENT = 16  # bytes; no number lies across two machine words


def saved_tensors(engine: Engine, ema: WeightAverage | None, world: World) -> dict[str, Tensor]:
    """All that this process saves, as it is in use: its share of weights, moments and averages; process 0 also buffers."""
    tensors = {}
    for stretch in held(engine, ema):
        share = stretch.share(world.rank, world.size)
        if share:
            tensors[stretch_key(share.quantity, share.name, share.start)] = share.values.detach()
    if world.is_main:
        for name, buffer in saved_buffers(engine.module).items():
            tensors[stretch_key(BUFFER, name, 0)] = buffer.detach()
    return tensors


def saved_buffers(model: nn.Module) -> dict[str, Tensor]:
    """What a model's state dict has besides parameters: BatchNorm's running statistics, for example."""
    parameters = {name for name, _ in model.named_parameters()}
    return {name: value for name, value in model.state_dict().items() if name not in parameters}


class HostCopies:
    """Copies of tensors on the CPU, in one piece of memory that every snapshot uses again.

    So only the first one waits for the system to provide it, and a GPU copies into locked memory, without a halt after each
    tensor.
    """

    def __init__(self) -> None:
        self._copies: dict[str, Tensor] = {}

    def take(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """Copy; the copies taken before become invalid.

        Args:
            tensors: on the CPU or one GPU.

        Returns:
            Contiguous tensors of the same names, shapes and types.
        """
        if _layout(self._copies) != _layout(tensors):
            self._copies.clear()  # gives back their memory first
            self._copies.update(_allocate(tensors))
        for name, tensor in tensors.items():
            self._copies[name].copy_(tensor, non_blocking=True)
        if any(tensor.is_cuda for tensor in tensors.values()):
            torch.cuda.synchronize()
        return self._copies


def _layout(tensors: dict[str, Tensor]) -> list[tuple]:
    return [(name, tensor.shape, tensor.dtype) for name, tensor in tensors.items()]


def _allocate(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Contiguous CPU tensors of the same names, shapes and types side by side; locked memory if one of them is on a GPU."""
    sizes = [-(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT for tensor in tensors.values()]
    on_gpu = any(tensor.is_cuda for tensor in tensors.values())
    places = torch.empty(sum(sizes), dtype=torch.uint8, pin_memory=on_gpu).split(sizes) if sizes else ()
    return {
        name: place[: tensor.nbytes].view(tensor.dtype).view(tensor.shape)
        for place, (name, tensor) in zip(places, tensors.items())
    }
