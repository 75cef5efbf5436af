"""Exponential moving average of the weights, under any ZeRO stage."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from pipeline.optim.engine import Engine


class WeightAverage:
    """``average = decay * average + (1 - decay) * weights`` after every step (Polyak & Juditsky, 1992).

    Each rank averages the weights that it holds: all of them, or its shard of each under ZeRO-3. Buffers of floating point, such
    as BatchNorm's running statistics, are averaged likewise, in full on every rank; integer ones are the model's own. timm's
    ``ModelEma``, which the papers' code uses, averages all buffers too.

    Args:
        engine: the DeepSpeed engine.
        decay: such as 0.9999; DeiT's is 0.99996.

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
