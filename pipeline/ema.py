"""Exponential moving average of the weights, under any ZeRO stage."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn


class WeightAverage:
    """``average = decay * average + (1 - decay) * weights`` after every step (Polyak & Juditsky, 1992).

    Each process averages the weights that it holds: all of them, or under ZeRO-3 its shard of each.

    Args:
        model: the engine's module.
        decay: 0.9999 and the like.
    """

    def __init__(self, model: nn.Module, decay: float) -> None:
        self.decay = decay
        self._model = model
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
        self._model.train(self._model.training)  # forget what was computed from other weights

    def _held(self) -> Iterator[tuple[str, Tensor]]:
        for name, parameter in self._model.named_parameters():
            yield name, getattr(parameter, "ds_tensor", parameter).data
