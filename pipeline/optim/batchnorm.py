"""BatchNorm running statistics that are independent of how a step is split over ranks and micro-batches.

PyTorch updates them in every forward pass, on each rank from its own images. Here they change once per optimizer step, by
``momentum``, towards the mean over all micro-batches of all ranks. So they are equal on all ranks, independent of the world
size (up to rounding), and a skipped step leaves them unchanged.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from pipeline.distributed.world import World


class StepStatistics:
    """Accumulates the BatchNorm statistics of an optimizer step.

    Args:
        model: its BatchNorm layers that track running statistics.
        world: all ranks.
    """

    def __init__(self, model: nn.Module, world: World) -> None:
        self._world = world
        self._norms = [m for m in model.modules() if isinstance(m, _BatchNorm) and m.track_running_stats]
        self._momentum = [norm.momentum for norm in self._norms]
        self._running: list[tuple[Tensor, Tensor, Tensor]] = []  # as they were before the step

    def __len__(self) -> int:
        return len(self._norms)

    def begin(self) -> None:
        """Call before the first micro-batch of a step."""
        self._running = self._copies()

    def micro_batch(self, number: int) -> None:
        """Call before micro-batch ``number`` (from 0): with momentum 1 / (number + 1) the buffers hold the mean so far."""
        for norm in self._norms:
            norm.momentum = 1 / (number + 1)

    @torch.no_grad()
    def end(self, taken: bool) -> None:
        """Call after the last micro-batch of a step. Collective.

        Args:
            taken: False if the step was skipped: the statistics are restored.
        """
        if not self._norms:
            return
        if taken:
            mean = torch.cat([buffer for pair in self._buffers() for buffer in pair])  # (F,), all statistics concatenated
            self._world.sum(mean).div_(self._world.size)
            parts = iter(mean.split([len(buffer) for pair in self._buffers() for buffer in pair]))
        for norm, kept, momentum in zip(self._norms, self._running, self._momentum):
            assert momentum is not None  # it is with a cumulative average, which no model has
            for buffer, before in zip(_statistics(norm), kept[:2]):
                buffer.copy_(before.lerp_(next(parts), momentum) if taken else before)
            _batches(norm).copy_(kept[2] + taken)
            norm.momentum = momentum

    def _buffers(self) -> list[tuple[Tensor, Tensor]]:
        return [_statistics(norm) for norm in self._norms]

    def _copies(self) -> list[tuple[Tensor, Tensor, Tensor]]:
        pairs = [(_statistics(norm), _batches(norm)) for norm in self._norms]
        return [(mean.clone(), variance.clone(), batches.clone()) for (mean, variance), batches in pairs]


def _statistics(norm: _BatchNorm) -> tuple[Tensor, Tensor]:
    """Running mean and variance, (channels,) each."""
    assert norm.running_mean is not None and norm.running_var is not None  # with track_running_stats
    return norm.running_mean, norm.running_var


def _batches(norm: _BatchNorm) -> Tensor:
    """How many batches the norm has seen, ()."""
    assert norm.num_batches_tracked is not None  # with track_running_stats
    return norm.num_batches_tracked
