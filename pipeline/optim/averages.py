"""Average weights over steps, and BatchNorm's statistics over the ranks and micro-batches of a step.

PyTorch updates BatchNorm's running statistics in every forward pass, on each rank from its own images. Here they change once per
optimizer step, by ``momentum``, towards the mean over all micro-batches of all ranks. So they are equal on all ranks, independent of
the world size (up to rounding), and a skipped step leaves them unchanged. Whether a step was taken may be known to the device only.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from pipeline.cluster.world import World
from pipeline.optim.engine import Engine, PlainEngine


class WeightAverage:
    """Exponential moving average, under any ZeRO stage: ``average = decay * average + (1 - decay) * weights`` after every step
    (Polyak & Juditsky, 1992).

    Each rank averages the weights that it holds: all of them, or its shard of each under ZeRO-3. Buffers of floating point, such
    as BatchNorm's running statistics, are averaged likewise, in full on every rank; integer ones are the model's own. timm's
    ``ModelEma``, which the papers' code uses, averages all buffers too.
    """

    def __init__(self, engine: Engine, decay: float) -> None:
        self.decay = decay
        self._engine = engine
        self.averages = {name: weight.clone() for name, weight in self._held()}  # by name, each as large as this rank's share
        self._flat: tuple[Tensor, Tensor] | None = None  # all averages and all weights that change
        if isinstance(engine, PlainEngine):
            flat = engine.flat
            self._flat = flat.weights.clone(), flat.weights
            views = dict(zip(flat.parameters, flat.views(self._flat[0])))
            self.averages |= {name: views[p] for name, p in engine.module.named_parameters() if p in views}
        saved = engine.module.state_dict().keys()  # without buffers that are derived from others
        floating = (name for name, buffer in engine.module.named_buffers() if buffer.is_floating_point() and name in saved)
        self.buffers = {name: engine.module.get_buffer(name).clone() for name in floating}

    @torch.no_grad()
    def update(self, taken: Tensor | bool) -> None:
        """Update the average with the model's current weights, if the step was ``taken``; a tensor is () on their device."""
        averages, values = list(self.buffers.values()), list(self.models_buffers().values())
        rate = (1 - self.decay) * taken  # 0: every number stays as it is
        if self._flat and isinstance(rate, Tensor):
            self._flat[0].lerp_(self._flat[1], rate)
        else:
            held = dict(self._held())
            averages += [self.averages[name] for name in held]
            values += held.values()
        if isinstance(rate, Tensor):
            if averages:  # which no foreach operation does with a rate on the device
                changes = torch._foreach_sub(values, averages)
                torch._foreach_mul_(changes, rate)
                torch._foreach_add_(averages, changes)
        elif taken:
            # One kernel for all tensors on a GPU, as torch.optim.swa_utils does; one call per tensor takes 1 to 2 ms of a step.
            torch._foreach_lerp_(averages, values, rate)

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
        frozen = getattr(model, "frozen_norms", ())
        self._norms = [m for m in model.modules() if isinstance(m, _BatchNorm) and m.track_running_stats and m not in frozen]
        self._momentum = [norm.momentum for norm in self._norms]
        if not self._norms:
            return
        # All running statistics become views of one tensor, (F,), and all counts of batches of another, (norms,).
        own = [_buffers(norm) for norm in self._norms]
        self._now = [_joined([each for buffers in own for each in buffers[:2]]), _joined([buffers[2] for buffers in own])]
        self._before = [now.clone() for now in self._now]  # as they were before the step
        # (F,); no model has None, which is a cumulative average
        self._rates = torch.cat([torch.full_like(b, norm.momentum or 0.0) for norm in self._norms for b in _buffers(norm)[:2]])
        self._mean = torch.empty(0)  # (F,): over the micro-batches before the last
        self._number = 0  # of the last micro-batch

    def __len__(self) -> int:
        return len(self._norms)

    def begin(self) -> None:
        """Call before the first micro-batch of a step, for whose length the buffers hold the statistics of one micro-batch."""
        if self._norms:
            torch._foreach_copy_(self._before, self._now)
        for norm in self._norms:
            norm.momentum = 1.0  # not one for each micro-batch: a compiled model has it as a constant

    def micro_batch(self, number: int) -> None:
        """Call before micro-batch ``number`` (from 0)."""
        if number and self._norms:
            self._mean = self._mean_so_far()
        self._number = number

    @torch.no_grad()
    def _mean_so_far(self) -> Tensor:
        own = self._now[0].clone()
        return self._mean.lerp_(own, 1 / (self._number + 1)) if self._number else own

    @torch.no_grad()
    def end(self, taken: Tensor | bool) -> None:
        """Call after the last micro-batch of a step; one that was not ``taken`` restores the statistics. Collective."""
        if not self._norms:
            return
        (statistics, counts), (before, counted) = self._now, self._before
        mean = self._world.sum(self._mean_so_far()).div_(self._world.size)  # (F,)
        if not isinstance(taken, Tensor):
            taken = torch.full((), taken, device=mean.device)  # which no copy has to wait for
        torch.where(taken, before.lerp(mean, self._rates), before, out=statistics)
        torch.add(counted, taken, out=counts)
        for norm, momentum in zip(self._norms, self._momentum):
            norm.momentum = momentum

    def restore(self) -> None:
        """Go back to before the step."""
        if self._norms:
            torch._foreach_copy_(self._now, self._before)


def _joined(buffers: list[Tensor]) -> Tensor:
    """Make buffers views of one tensor, their numbers one after the other: (n,)."""
    flat = torch.cat([buffer.reshape(-1) for buffer in buffers])
    for buffer, values in zip(buffers, flat.split([buffer.numel() for buffer in buffers])):
        buffer.data = values.view(buffer.shape)
    return flat


def _buffers(norm: _BatchNorm) -> list[Tensor]:
    """Running mean and variance, (channels,) each, and how many batches the norm has seen, ()."""
    buffers = (norm.running_mean, norm.running_var, norm.num_batches_tracked)
    return [buffer for buffer in buffers if buffer is not None]  # none is with track_running_stats
