"""BatchNorm running statistics in a run of several processes.

Each process updates its own from its own images and nothing keeps them equal. What is evaluated and what is saved
for use is their average; what training goes on with is each process's own, so that looking at the model, or saving
it, never changes the run.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from pipeline.distributed import World


def statistics(model: nn.Module) -> dict[str, Tensor]:
    """Copies of running mean, variance and step count of every BatchNorm, by buffer name, on the CPU."""
    return {name: buffer.detach().cpu().clone() for name, buffer in _buffers(model).items()}


def load_statistics(model: nn.Module, values: dict[str, Tensor]) -> None:
    """Put statistics back that :func:`statistics` returned."""
    with torch.no_grad():
        for name, buffer in _buffers(model).items():
            buffer.copy_(values[name])


@contextmanager
def averaged_statistics(model: nn.Module, world: World) -> Iterator[None]:
    """Within the block the statistics are the average over processes; afterwards they are what they were."""
    own = statistics(model)
    with torch.no_grad():
        for buffer in _buffers(model).values():
            if buffer.is_floating_point():
                world.sum(buffer).div_(world.size)
    try:
        yield
    finally:
        load_statistics(model, own)


def _buffers(model: nn.Module) -> dict[str, Tensor]:
    return {
        f"{module_name}.{name}": buffer
        for module_name, module in model.named_modules()
        if isinstance(module, nn.modules.batchnorm._BatchNorm)
        for name, buffer in module.named_buffers(recurse=False)
    }
