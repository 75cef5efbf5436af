"""What a timm model draws in a forward pass: stochastic depth from the stream of samples, all else from a seeded generator."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode


class StreamDropPath(nn.Module):
    """Stochastic depth as ``timm.layers.DropPath`` applies it, with factors that are given instead of drawn.

    A module may be called several times in a forward pass (ConViT's blocks use one for both branches), and again in the backward
    pass where activations are recomputed: call i takes column i modulo ``calls``.

    Args:
        drop_prob: probability of dropping the branch.
        scale_by_keep: divide kept branches by ``1 - drop_prob``.
        calls: per forward pass.

    ``forward``: (B, ...) -> (B, ...).
    """

    def __init__(self, drop_prob: float, scale_by_keep: bool, calls: int) -> None:
        super().__init__()
        self.drop_prob, self.scale_by_keep, self.calls = drop_prob, scale_by_keep, calls
        self.scales: Tensor | None = None
        self._call = 0

    def take(self, scales: Tensor | None) -> None:
        """The factors of the next forward pass: (B, calls), 0 or ``1 / (1 - drop_prob)``; None: nothing is dropped."""
        self.scales, self._call = scales, 0

    def forward(self, x: Tensor) -> Tensor:
        scales = self.scales
        if scales is None or not self.training:
            return x
        if not self.scale_by_keep:
            scales = scales * (1 - self.drop_prob)
        column = 0
        if self.calls > 1:
            column = self._call % self.calls
            self._call += 1
        return x * scales[:, column].view(-1, *[1] * (x.ndim - 1)).to(x.dtype)

    def extra_repr(self) -> str:
        return f"drop_prob={self.drop_prob:.3f}, calls={self.calls}"


class Draws(TorchDispatchMode):
    """Within the ``with`` block, notes the operators that draw from PyTorch's generator. Works on the meta device too.

    Attributes:
        names: of these operators.
        ignored: above 0, nothing is noted.
    """

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()
        self.ignored = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not self.ignored and torch.Tag.nondeterministic_seeded in func.tags and _draws(func, args, kwargs or {}):
            self.names.add(func.overloadpacket.__name__.strip("_"))
        return func(*args, **(kwargs or {}))


def _draws(func: Any, args: Any, kwargs: Any) -> bool:
    """Fused attention has the tag whatever its dropout."""
    places = {argument.name: place for place, argument in enumerate(func._schema.arguments)}
    if "dropout_p" not in places:
        return True
    place = places["dropout_p"]
    return bool(args[place] if place < len(args) else kwargs.get("dropout_p", 0.0))


@contextmanager
def seeded(seed: int | None, device: torch.device) -> Iterator[None]:
    """PyTorch's generators of the CPU and of ``device`` start from ``seed`` in the block, and are as before after it.

    Args:
        seed: 0 to 2**63 - 1; None: they are left alone.
        device: of the forward pass.
    """
    if seed is None:
        yield
        return
    gpus = [torch.cuda.current_device() if device.index is None else device.index] if device.type == "cuda" else []
    with torch.random.fork_rng(devices=gpus):
        torch.default_generator.manual_seed(seed)
        for index in gpus:
            torch.cuda.default_generators[index].manual_seed(seed)
        yield
