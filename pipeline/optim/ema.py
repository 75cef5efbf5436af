"""Exponential moving average of the weights, under any ZeRO stage."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from pipeline.optim.engine import Engine


class WeightAverage:
    """``average = decay * average + (1 - decay) * weights`` after every step (Polyak & Juditsky, 1992).

    Each rank averages the weights that it holds: all of them, or its shard of each under ZeRO-3.

    Args:
        engine: the DeepSpeed engine.
        decay: such as 0.9999; DeiT's is 0.99996.

    Attributes:
        averages: by parameter name, each with the shape of this rank's share of the parameter.
    """

    def __init__(self, engine: Engine, decay: float) -> None:
        self.decay = decay
        self._engine = engine
        self.averages = {name: weight.clone() for name, weight in self._held()}

    @torch.no_grad()
    def update(self) -> None:
        """Update the average with the model's current weights."""
        held = dict(self._held())
        # One kernel for all tensors on a GPU, as torch.optim.swa_utils does; one call per tensor takes 1 to 2 ms of a step.
        torch._foreach_lerp_([self.averages[name] for name in held], list(held.values()), 1 - self.decay)

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Swap in the averaged weights for the block; the model's own return after it, bit for bit."""
        own = {name: weight.clone() for name, weight in self._held()}
        self._load(self.averages)
        try:
            yield
        finally:
            self._load(own)

    @torch.no_grad()
    def _load(self, values: dict[str, Tensor]) -> None:
        for name, weight in self._held():
            weight.copy_(values[name])
        # Drop what was derived from the other weights: parameters that ZeRO-3 keeps gathered after an evaluation because it
        # expects to need them soon, and the model's caches.
        self._engine.empty_partition_cache()
        self._engine.module.train(self._engine.module.training)

    def _held(self) -> Iterator[tuple[str, Tensor]]:
        for name, parameter in self._engine.module.named_parameters():
            yield name, getattr(parameter, "ds_tensor", parameter).data
