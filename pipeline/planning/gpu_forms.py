"""A model's operators as they are on a GPU, for fake tensors, which are on the CPU: PyTorch builds without CUDA know no others.

Three things differ: attention with a learned bias runs in a fused kernel, Φp of all layers is one network, and CUDA's autocast
computes norms and softmax in float32, which the CPU's leaves in bf16.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from pipeline.kernels.peripheral import peripheral_attention
from pipeline.models import convit
from pipeline.models.common import vit
from pipeline.models.common.base import VisionModel

_GROUPS = 8  # of images whose gradients of the bias the Triton kernel keeps apart (pipeline.kernels.fused.GROUPS)
# Of the operators that CUDA's autocast computes in float32, those that models have; see "CUDA Ops that can autocast to float32" in
# PyTorch's documentation of torch.amp.
_FLOAT32 = ("layer_norm", "group_norm", "softmax", "log_softmax", "exp", "log", "pow", "norm", "cumsum", "cosine_similarity")


@contextmanager
def as_on_gpu(model: VisionModel, stage: int, kernels: bool) -> Iterator[None]:
    """In the block, the model's operators keep in memory what they keep on a GPU.

    Args:
        stage: of ZeRO; 3 computes Φp layer by layer.
        kernels: whether the Triton kernels run there; else PyTorch's attention, which writes the bias's gradient for every image.
    """
    attention = partial(_attention, kernels=kernels)
    with ExitStack() as stack:
        stack.enter_context(patch.object(vit, "suits_chunks", lambda qkv, bias: False))
        for module in (vit, convit):
            stack.enter_context(patch.object(module, "peripheral_attention", attention))
        model.groups_phi = stage < 3
        stack.enter_context(_CudaAutocast())
        yield


def _attention(q: Tensor, k: Tensor, v: Tensor, log_phi: Tensor | None, kernels: bool) -> Tensor:
    if log_phi is None:
        return peripheral_attention(q, k, v, None)
    if torch.is_autocast_enabled("cpu"):
        q, k, v = (each.to(torch.bfloat16) for each in (q, k, v))
    out: Tensor = _Fused.apply(q, k, v, log_phi, kernels)
    return out


class _Fused(torch.autograd.Function):
    """Allocates and keeps what :mod:`pipeline.kernels.fused` does, or PyTorch's memory-efficient attention."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, log_phi: Tensor, kernels: bool) -> Tensor:
        batch, heads, tokens, width = q.shape
        out = q.new_empty(batch, tokens, heads, width).transpose(1, 2)
        ctx.save_for_backward(q, k, v, log_phi, out, q.new_empty(batch, heads, tokens, dtype=torch.float32))
        ctx.kernels = kernels
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, log_phi, _, log_sums = ctx.saved_tensors
        gradients = [torch.empty_like(each) for each in (q, k, v)]
        groups = min(_GROUPS, len(q)) if ctx.kernels else len(q)
        sums = q.new_empty(groups, *log_phi.shape, dtype=log_phi.dtype if ctx.kernels else q.dtype)
        torch.empty_like(log_sums)
        return *gradients, sums.sum(0).to(log_phi.dtype), None


class _CudaAutocast(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__name__", "") in _FLOAT32 and torch.is_autocast_enabled("cpu"):
            args = tuple(each.float() if isinstance(each, Tensor) and each.dtype is torch.bfloat16 else each for each in args)
        return func(*args, **(kwargs or {}))
