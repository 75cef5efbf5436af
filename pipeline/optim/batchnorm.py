"""BatchNorm running statistics that do not depend on how a step's images are split over processes and passes.

PyTorch updates them at every forward pass of every process, each from its own images. Here they change once per optimizer
step, by ``momentum``, towards the mean over all micro-batches of the step. So all processes have the same, any number of
processes gets the same (to rounding), and a step that is not taken leaves no trace.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from pipeline.distributed.world import World


class StepStatistics:
    """Collects the statistics of a step.

    Args:
        model: whose BatchNorms are meant, those that keep running statistics.
        world: all processes.
    """

    def __init__(self, model: nn.Module, world: World) -> None:
        self._world = world
        self._norms = [m for m in model.modules() if isinstance(m, _BatchNorm) and m.track_running_stats]
        self._momentum = [norm.momentum for norm in self._norms]
        self._running: list[tuple[Tensor, Tensor, Tensor]] = []  # as they were before the step

    def __len__(self) -> int:
        return len(self._norms)

    def begin(self) -> None:
        """Before the first micro-batch of a step."""
        self._running = self._copies()

    def micro_batch(self, number: int) -> None:
        """Before micro-batch ``number`` (from 0) of a step: with this momentum the buffers become a plain mean."""
        for norm in self._norms:
            norm.momentum = 1 / (number + 1)

    @torch.no_grad()
    def end(self, taken: bool) -> None:
        """After the last micro-batch of a step; every process must call.

        Args:
            taken: False if the step was skipped: then the statistics stay as they were.
        """
        if not self._norms:
            return
        if taken:
            mean = torch.cat([buffer for pair in self._buffers() for buffer in pair])  # (F,), all statistics in a row
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
