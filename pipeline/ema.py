"""Exponential moving average of the weights, under any ZeRO stage."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor


class WeightAverage:
    """``average = decay * average + (1 - decay) * weights`` after every step (Polyak & Juditsky, 1992).

    Each process averages the weights that it holds: all of them, or under ZeRO-3 its shard of each.

    Args:
        engine: the DeepSpeed engine.
        decay: 0.9999 and the like.
    """

    def __init__(self, engine, decay: float) -> None:
        self.decay = decay
        self._engine = engine
        self._average = {name: weight.clone() for name, weight in self._held()}

    @torch.no_grad()
    def update(self) -> None:
        """Take the model's current weights into the average."""
        for name, weight in self._held():
            self._average[name].lerp_(weight, 1 - self.decay)

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Within the block the model has the averaged weights; afterwards its own again, bit for bit."""
        own = {name: weight.clone() for name, weight in self._held()}
        self._load(self._average)
        try:
            yield
        finally:
            self._load(own)

    def state_dict(self) -> dict[str, Tensor]:
        """This process's averages, on the CPU."""
        return {name: value.cpu() for name, value in self._average.items()}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Put back what :meth:`state_dict` returned on the same process of the same world."""
        for name, value in state.items():
            self._average[name].copy_(value)

    @torch.no_grad()
    def _load(self, values: dict[str, Tensor]) -> None:
        for name, weight in self._held():
            weight.copy_(values[name])
        # Forget what was made from the other weights: parameters that ZeRO-3 keeps gathered after an evaluation because
        # it expects to need them again soon, and what the model has cached.
        self._engine.empty_partition_cache()
        self._engine.module.train(self._engine.module.training)

    def _held(self) -> Iterator[tuple[str, Tensor]]:
        for name, parameter in self._engine.module.named_parameters():
            yield name, getattr(parameter, "ds_tensor", parameter).data
