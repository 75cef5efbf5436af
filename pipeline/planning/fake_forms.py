"""A model's functions as its step runs them, on tensors without values: attention as one operator, and autocast, which knows no ``meta``
tensors, by its lists."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

_LOWER: frozenset[Any] = frozenset({
    F.linear, F.conv1d, F.conv2d, F.conv3d, torch.matmul, Tensor.matmul, Tensor.__matmul__, Tensor.__rmatmul__, torch.mm, Tensor.mm,
    torch.bmm, Tensor.bmm, torch.baddbmm, Tensor.baddbmm, torch.addmm, Tensor.addmm, torch.einsum, F.scaled_dot_product_attention,
})  # fmt: skip
# Autocast on GPUs computes these in float32; on CPUs they take what they are given.
_FULL: frozenset[Any] = frozenset({
    F.layer_norm, torch.layer_norm, F.group_norm, torch.group_norm, F.softmax, torch.softmax, Tensor.softmax, F.log_softmax,
    torch.log_softmax, Tensor.log_softmax, torch.exp, Tensor.exp, torch.log, Tensor.log, torch.pow, Tensor.pow, torch.sum, Tensor.sum,
    F.cross_entropy,
})  # fmt: skip


class Recorder(Protocol):
    """What writes the operators down.

    Attributes:
        recomputing: whether one of the model's functions is being called.
    """

    recomputing: bool

    def attention(self, flops: float, scores: int, given: list[Tensor], made: list[Tensor], kernels: int) -> None:
        """Add attention, or its gradients, of so many scores."""


class Forms(TorchFunctionMode):
    """Attention as one operator, and autocast."""

    def __init__(self, recorder: Recorder, precision: str, on_gpu: bool, fused_attention: bool) -> None:
        super().__init__()
        self._recorder, self._fused, self._on_gpu = recorder, fused_attention, on_gpu
        self._full = _FULL if on_gpu else frozenset()
        self._dtype = torch.bfloat16 if precision == "bf16" else None
        self._cast: dict[int, Tensor] = {}  # parameters are cast once for a step
        self.casts = True

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        with self._recomputing():
            if self._dtype is not None and self.casts:
                if func in _LOWER:
                    args, kwargs = self._to((args, kwargs), self._dtype)
                elif func in self._full:
                    args, kwargs = self._to((args, kwargs), torch.float32)
            if func is F.scaled_dot_product_attention:
                return self._attention(*args, **kwargs)
            return func(*args, **kwargs)

    @contextmanager
    def _recomputing(self) -> Iterator[None]:
        """In a backward pass, only activation checkpointing calls the model's functions."""
        before, self._recorder.recomputing = self._recorder.recomputing, True
        try:
            yield
        finally:
            self._recorder.recomputing = before

    def _to(self, values: Any, dtype: torch.dtype) -> Any:
        def cast(value: Any) -> Any:
            if not isinstance(value, Tensor) or not value.is_floating_point() or value.dtype in (dtype, torch.float64):
                return value
            if not isinstance(value, nn.Parameter):
                return value.to(dtype)
            if id(value) not in self._cast:
                self._cast[id(value)] = value.to(dtype)
            return self._cast[id(value)]

        return torch.utils._pytree.tree_map(cast, values)

    def _attention(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        attn_mask: Tensor | None = None,
        *rest: Any,
        scale: float | None = None,
        **options: Any,
    ) -> Tensor:
        if not self._fused:
            scores = q @ k.transpose(-1, -2) * (scale or 1.0)
            scores = scores if attn_mask is None else scores + attn_mask
            return (scores.float() if self._full else scores).softmax(-1).to(v.dtype) @ v
        return _Attention.apply(self._recorder, q, k, v, attn_mask, self._on_gpu)


@contextmanager
def autocast_by(forms: Forms) -> Iterator[None]:
    """Make ``torch.autocast``, which knows no ``meta`` tensors, switch the casts of ``forms`` in the block."""

    @contextmanager
    def autocast(device_type: str, dtype: torch.dtype | None = None, enabled: bool = True, **options: Any) -> Iterator[None]:
        before, forms.casts = forms.casts, enabled
        try:
            yield
        finally:
            forms.casts = before

    own, torch.autocast = torch.autocast, autocast  # type: ignore[assignment, misc]
    try:
        yield
    finally:
        torch.autocast = own  # type: ignore[misc]


class _Attention(torch.autograd.Function):
    """softmax(q kᵀ / sqrt(head_dim) + bias) v, as its fused kernels do it: no map of N x N in memory, and the scores once more backward."""

    @staticmethod
    def forward(ctx: Any, recorder: Recorder, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, on_gpu: bool) -> Tensor:
        out = q.new_empty(*q.shape[:-1], v.shape[-1])
        ctx.recorder, ctx.on_gpu = recorder, on_gpu
        ctx.save_for_backward(q, k, v, out, *([] if bias is None else [bias]))
        given = [q, k, v] if bias is None else [q, k, v, bias]
        recorder.attention(_products(q, k, v), _scores(q, k), given, [out], 1)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        q, k, v, out, *bias = ctx.saved_tensors
        made = [torch.empty_like(t) for t in (q, k, v, *bias)]
        # Five products instead of two; with a learned bias on a CPU four, as the weights are kept (pipeline.kernels.chunked).
        times = 2.0 if bias and not ctx.on_gpu else 2.5
        given = [q, k, v, out, *bias, grad]
        ctx.recorder.attention(times * _products(q, k, v), _scores(q, k), given, made, 2 + len(bias))
        return None, *made, *([] if bias else [None]), None


def _products(q: Tensor, k: Tensor, v: Tensor) -> float:
    """Floating-point operations of q kᵀ and of the weights times v."""
    return 2.0 * q.shape[:-1].numel() * k.shape[-2] * (q.shape[-1] + v.shape[-1])


def _scores(q: Tensor, k: Tensor) -> int:
    """Elements of q kᵀ."""
    return q.shape[:-1].numel() * k.shape[-2]
