"""Give a model's functions the form in which the planned device runs them, for a trace, whose tensors are on the CPU.

PyTorch builds without CUDA know no tensors of a GPU. Three things differ there: attention runs in a fused kernel, with a learned bias
too, Φp of all layers is one network, and CUDA's autocast computes norms, softmax and sums in float32, which the CPU's leaves in bf16.
On a CPU, what :mod:`pipeline.kernels.chunked` does in a loop counts as the one operator that it is to the model.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from pipeline.kernels import chunked
from pipeline.kernels.peripheral import biased_attention
from pipeline.models import convit
from pipeline.models.common import vit
from pipeline.models.common.base import VisionModel
from pipeline.planning.trace import Trace, product_flops, score_count

_GROUPS = 8  # of images whose gradients of the bias the Triton kernel keeps apart (pipeline.kernels.fused.GROUPS)
# What CUDA's autocast computes in float32: "CUDA Ops that can autocast to float32" in PyTorch's documentation of torch.amp.
_FLOAT32 = frozenset(
    "acos asin binary_cross_entropy_with_logits cdist cosh cosine_embedding_loss cosine_similarity cross_entropy dist erfinv exp expm1 "
    "group_norm hinge_embedding_loss kl_div l1_loss layer_norm log log10 log1p log2 log_softmax margin_ranking_loss mse_loss "
    "multi_margin_loss multilabel_margin_loss nll_loss norm pdist poisson_nll_loss pow reciprocal renorm rsqrt sinh smooth_l1_loss "
    "soft_margin_loss softmax softmin softplus tan triplet_margin_loss".split()
)
_FLOAT32_SUMS = frozenset("cumprod cumsum prod sum".split())  # which read bf16, without a copy


@contextmanager
def forms_of(trace: Trace, model: VisionModel, on_gpu: bool, stage: int, kernels: bool) -> Iterator[None]:
    """In the block, the model's functions keep in memory and run what they do on the planned device.

    Args:
        trace: gets attention as one operator.
        on_gpu: the device is a GPU, else a CPU.
        stage: of ZeRO; 3 computes Φp layer by layer.
        kernels: whether the Triton kernels run there; else PyTorch's attention, which writes the bias's gradient for every image.
    """
    with ExitStack() as stack:
        if on_gpu:
            model.groups_phi = stage < 3
            stack.enter_context(patch.object(vit, "suits_chunks", lambda qkv, bias: False))
            if kernels:
                for module in (vit, convit):
                    stack.enter_context(patch.object(module, "peripheral_attention", _kernel_of(trace)))
            stack.enter_context(_CudaFunctions(trace))
        else:
            stack.enter_context(patch.object(chunked, "_InChunks", _chunks_of(trace)))
        yield


def _kernel_of(trace: Trace) -> Any:
    """:func:`pipeline.kernels.peripheral_attention` on a GPU that runs the Triton kernels."""

    def attention(q: Tensor, k: Tensor, v: Tensor, log_phi: Tensor | None) -> Tensor:
        if log_phi is None:
            return biased_attention(q, k, v, None)
        if torch.is_autocast_enabled("cpu"):
            q, k, v = (tensor.to(torch.bfloat16) for tensor in (q, k, v))
        out: Tensor = _Fused.apply(trace, q, k, v, log_phi, True)
        return out

    return attention


class _CudaFunctions(TorchFunctionMode):
    """CUDA's autocast beyond that of the CPU, and its fused attention."""

    def __init__(self, trace: Trace) -> None:
        super().__init__()
        self._trace = trace

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, name = kwargs or {}, getattr(func, "__name__", "").strip("_")
        casts = torch.is_autocast_enabled("cpu")
        if func is F.scaled_dot_product_attention:
            return self._attention(*args, **kwargs)
        if casts and name in _FLOAT32:
            args = tuple(_float32(value) for value in args)
        elif casts and name in _FLOAT32_SUMS and isinstance(args[0], Tensor) and args[0].dtype is torch.bfloat16:
            kwargs = {"dtype": torch.float32, **kwargs}
        return func(*args, **kwargs)

    def _attention(
        self, q: Tensor, k: Tensor, v: Tensor, attn_mask: Tensor | None = None, *rest: Any, **options: Any
    ) -> Tensor:
        given = [q, k, v] if attn_mask is None else [q, k, v, attn_mask]
        if torch.is_autocast_enabled("cpu"):
            given = [tensor.to(torch.bfloat16) if tensor.is_floating_point() else tensor for tensor in given]
        q, k, v, *masks = given
        bias = masks[0].expand(*q.shape[:-1], k.shape[-2]) if masks else None
        out: Tensor = _Fused.apply(self._trace, q, k, v, bias, False)
        return out


def _float32(value: Any) -> Any:
    return value.float() if isinstance(value, Tensor) and value.dtype is torch.bfloat16 else value


class _Fused(torch.autograd.Function):
    """Attention as its fused kernels do it, :mod:`pipeline.kernels.fused` or PyTorch's: what they allocate and keep, and one operator.

    q, k, v (..., N, head_dim); bias (heads, N, N) with the Triton kernels, (..., N, N) without.
    """

    @staticmethod
    def forward(ctx: Any, trace: Trace, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, kernels: bool) -> Tensor:
        with trace.recording(False):
            *batch, heads, tokens, _ = q.shape
            # The heads of a token are side by side, so that merging them needs no copy.
            out = q.new_empty(*batch, tokens, heads, v.shape[-1]).transpose(-3, -2)
            ctx.save_for_backward(q, k, v, bias, out, q.new_empty(q.shape[:-1], dtype=torch.float32))
        ctx.trace, ctx.kernels = trace, kernels
        read = [q, k, v] if bias is None else [q, k, v, bias]
        trace.attention(product_flops(q, k, v), score_count(q, k), read, [out], backward=False)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, bias, out, log_sums = ctx.saved_tensors
        learned = bias is not None and ctx.needs_input_grad[4]
        with ctx.trace.recording(False):
            gradients = [torch.empty_like(tensor) for tensor in (q, k, v)]
            if learned and ctx.kernels:
                sums = q.new_empty(min(_GROUPS, len(q)), *bias.shape, dtype=bias.dtype)
                torch.empty_like(log_sums)
                gradients.append(sums.sum(0))
            elif learned:
                gradients.append(q.new_empty(bias.shape))
        read = [q, k, v, out, grad] if bias is None else [q, k, v, out, bias, grad]
        # Five products instead of two.
        flops, scores = 2.5 * product_flops(q, k, v), score_count(q, k)
        ctx.trace.attention(flops, scores, read, gradients, backward=True, kernels=2 + learned)
        return None, *gradients, *([] if learned else [None]), None


def _chunks_of(trace: Trace) -> Any:
    """:mod:`pipeline.kernels.chunked`, which is traced for its memory, as one operator."""
    computed = chunked._InChunks

    class InChunks(computed):  # type: ignore[misc, valid-type]
        @staticmethod
        def forward(ctx: Any, qkv: Tensor, bias: Tensor, heads: int) -> Tensor:
            with trace.recording(False):
                out: Tensor = computed.forward(ctx, qkv, bias, heads)
            _record(qkv, heads, [qkv, bias], [out], backward=False)
            return out

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
            qkv, weights = saved = ctx.saved_tensors  # which may be asked for once
            known = SimpleNamespace(saved_tensors=saved, heads=ctx.heads, chunk=ctx.chunk, bias_dtype=ctx.bias_dtype)
            with trace.recording(False):
                grad_qkv, grad_bias, _ = computed.backward(known, grad)
            _record(qkv, ctx.heads, [qkv, weights, grad], [grad_qkv, grad_bias], backward=True)
            return grad_qkv, grad_bias, None

    def _record(qkv: Tensor, heads: int, read: list[Tensor], written: list[Tensor], backward: bool) -> None:
        batch, tokens, packed = qkv.shape
        scores = batch * heads * tokens**2
        # Two products, and backward four, as the weights are kept.
        products = 2.0 * scores * 2 * packed // 3 // heads
        trace.attention(2 * products if backward else products, scores, read, written, backward)

    return InChunks
