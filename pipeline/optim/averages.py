"""Average weights over steps, and BatchNorm's statistics over the ranks and micro-batches of a step.

PyTorch updates BatchNorm's running statistics in every forward pass, on each rank from its own images. Here they change once per
optimizer step, by ``momentum``, towards the mean over all micro-batches of all ranks. So they are equal on all ranks, independent of
the world size (up to rounding), and a skipped step leaves them unchanged.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from pipeline.cluster.world import World
from pipeline.optim.engine import Engine


class WeightAverage:
    """Exponential moving average, under any ZeRO stage: ``average = decay * average + (1 - decay) * weights`` after every step
    (Polyak & Juditsky, 1992).

    Each rank averages the weights that it holds: all of them, or its shard of each under ZeRO-3. Buffers of floating point, such
    as BatchNorm's running statistics, are averaged likewise, in full on every rank; integer ones are the model's own. timm's
    ``ModelEma``, which the papers' code uses, averages all buffers too.

    Attributes:
        averages: by parameter name, each with the shape of this rank's share of the parameter.
        buffers: averaged buffers by name; those of floating point that are in the model's state dict.
    """

    def __init__(self, engine: Engine, decay: float) -> None:
        self.decay = decay
        self._engine = engine
        self.averages = {name: weight.clone() for name, weight in self._held()}
        saved = engine.module.state_dict().keys()  # without buffers that are derived from others
        floating = (name for name, buffer in engine.module.named_buffers() if buffer.is_floating_point() and name in saved)
        self.buffers = {name: engine.module.get_buffer(name).clone() for name in floating}

    @torch.no_grad()
    def update(self) -> None:
        """Update the average with the model's current weights."""
        held = dict(self._held())
        # One kernel for all tensors on a GPU, as torch.optim.swa_utils does; one call per tensor takes 1 to 2 ms of a step.
        torch._foreach_lerp_([self.averages[name] for name in held], list(held.values()), 1 - self.decay)
        if self.buffers:
            torch._foreach_lerp_(list(self.buffers.values()), list(self.models_buffers().values()), 1 - self.decay)

    def models_buffers(self) -> dict[str, Tensor]:
        """The model's own buffers with the names of ``buffers``: not copies."""
        return {name: self._engine.module.get_buffer(name) for name in self.buffers}

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Swap in the averaged weights and buffers for the block; the model's own return after it, bit for bit."""
        own = {name: weight.clone() for name, weight in self._held()}
        own_buffers = {name: buffer.clone() for name, buffer in self.models_buffers().items()}
        self._load(self.averages, self.buffers)
        try:
            yield
        finally:
            self._load(own, own_buffers)

    @torch.no_grad()
    def _load(self, values: dict[str, Tensor], buffers: dict[str, Tensor]) -> None:
        for name, weight in self._held():
            weight.copy_(values[name])
        for name, buffer in self.models_buffers().items():
            buffer.copy_(buffers[name])
        # Drop what was derived from the other weights: parameters that ZeRO-3 keeps gathered after an evaluation because it
        # expects to need them soon, and the model's caches.
        self._engine.empty_partition_cache()
        self._engine.module.train(self._engine.module.training)

    def _held(self) -> Iterator[tuple[str, Tensor]]:
        for name, parameter in self._engine.module.named_parameters():
            yield name, getattr(parameter, "ds_tensor", parameter).data


class StepStatistics:
    """Accumulates the statistics of an optimizer step in a model's BatchNorm layers that track running statistics."""

    def __init__(self, model: nn.Module, world: World) -> None:
        self._world = world
        self._norms = [m for m in model.modules() if isinstance(m, _BatchNorm) and m.track_running_stats]
        self._momentum = [norm.momentum for norm in self._norms]
        self._before: list[list[Tensor]] = []  # the buffers as they were before the step
        self._mean = torch.empty(0)  # (F,), all statistics concatenated: over the micro-batches before the last
        self._number = 0  # of the last micro-batch

    def __len__(self) -> int:
        return len(self._norms)

    def begin(self) -> None:
        """Call before the first micro-batch of a step, for whose length the buffers hold the statistics of one micro-batch."""
        self._before = [[buffer.clone() for buffer in _buffers(norm)] for norm in self._norms]
        for norm in self._norms:
            norm.momentum = 1.0  # not one for each micro-batch: a compiled model has it as a constant

    def micro_batch(self, number: int) -> None:
        """Call before micro-batch ``number`` (from 0)."""
        if number and self._norms:
            self._mean = self._mean_so_far()
        self._number = number

    @torch.no_grad()
    def _mean_so_far(self) -> Tensor:
        own = torch.cat([buffer for norm in self._norms for buffer in _buffers(norm)[:2]])
        return self._mean.lerp_(own, 1 / (self._number + 1)) if self._number else own

    @torch.no_grad()
    def end(self, taken: bool) -> None:
        """Call after the last micro-batch of a step; one that was not ``taken`` restores the statistics. Collective."""
        if not self._norms:
            return
        if taken:
            mean = self._world.sum(self._mean_so_far()).div_(self._world.size)
            parts = iter(mean.split([norm.num_features for norm in self._norms for _ in range(2)]))
        for norm, kept, momentum in zip(self._norms, self._before, self._momentum):
            assert momentum is not None  # it is with a cumulative average, which no model has
            *running, batches = _buffers(norm)
            for buffer, before in zip(running, kept):
                buffer.copy_(before.lerp_(next(parts), momentum) if taken else before)
            batches.copy_(kept[2] + taken)
            norm.momentum = momentum


def _buffers(norm: _BatchNorm) -> list[Tensor]:
    """Running mean and variance, (channels,) each, and how many batches the norm has seen, ()."""
    buffers = (norm.running_mean, norm.running_var, norm.num_batches_tracked)
    return [buffer for buffer in buffers if buffer is not None]  # none is with track_running_stats
