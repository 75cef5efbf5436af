"""Attention with a learned bias on a CPU, from packed queries, keys and values to merged heads.

PyTorch has no fused kernel for a CPU whose bias takes a gradient: its plain form goes through every (N, N) matrix of the whole
batch about ten times, from memory. :class:`_InChunks` computes the same a few images at a time, whose matrices stay in a cache,
and reads and writes the packed layout as it is.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

# Scores of so many bytes are computed together: they stay in the second-level cache of a core, 1 MiB on servers of these years.
_CHUNK_BYTES = 2**20
# Products whose rows are not a multiple of this are slow in MKL: 48 columns at 87 GFLOP/s, 45 at 56 (one core of a Xeon or EPYC).
_ALIGNMENT = 8


def suits_chunks(qkv: Tensor, bias: Tensor | None) -> bool:
    """Whether :func:`attention_in_chunks` is the form to take: in training on a CPU, unless a compiler makes its own."""
    learned = bias is not None and bias.requires_grad and torch.is_grad_enabled()
    return learned and qkv.device.type == "cpu" and not torch.compiler.is_compiling() and not torch.jit.is_tracing()


def attention_in_chunks(qkv: Tensor, heads: int, bias: Tensor) -> Tensor:
    """softmax(q kᵀ / sqrt(head_dim) + bias) v: qkv (B, N, 3 * width), bias (heads, N, N) for every image -> (B, N, width)."""
    out: Tensor = _InChunks.apply(qkv, bias, heads)
    return out


class _InChunks(torch.autograd.Function):
    """Scores and their softmax in float32 at least, as PyTorch's plain form computes them under autocast too.

    A query whose scores are all -inf gets zeros, and its scores no gradient.
    """

    @staticmethod
    def forward(ctx: Any, qkv: Tensor, bias: Tensor, heads: int) -> Tensor:
        batch, tokens, packed = qkv.shape
        head_dim, dtype = packed // 3 // heads, torch.promote_types(qkv.dtype, torch.float32)
        # As many images as fit, and at least one matrix for each thread.
        chunk = min(batch, max(_CHUNK_BYTES // (4 * heads * tokens**2), -(-torch.get_num_threads() // heads), 1))
        weights = bias.new_empty(batch, heads, tokens, tokens, dtype=dtype)
        out = qkv.new_empty(batch, tokens, heads, head_dim)
        aligned = _aligner(chunk, heads, tokens, head_dim, dtype)
        lost = bias.amax(-1, keepdim=True) == -math.inf  # (heads, N, 1)
        bias = bias.masked_fill(lost, 0.0)  # not 0 / 0; the result is masked instead, and its gradient
        parts = qkv.view(batch, tokens, 3, heads, head_dim).permute(2, 0, 3, 1, 4)  # (3, B, heads, N, head_dim)
        with torch.autocast("cpu", enabled=False):
            for part, maps, into in zip(parts.split(chunk, 1), weights.split(chunk), out.transpose(1, 2).split(chunk)):
                q, k, v = part.to(dtype)  # (images, heads, N, head_dim) each
                maps.copy_(bias)
                maps = maps.flatten(0, 1)  # (images * heads, N, N), in place from here on
                torch.baddbmm(maps, q.flatten(0, 1), k.flatten(0, 1).mT, alpha=head_dim**-0.5, out=maps)
                torch.softmax(maps, -1, out=maps)
                _store(into, torch.bmm(maps, aligned(v)))
        out.masked_fill_(lost.transpose(0, 1), 0.0)
        ctx.save_for_backward(qkv, weights, lost)
        ctx.heads, ctx.chunk, ctx.bias_dtype = heads, chunk, bias.dtype
        return out.flatten(2)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        qkv, weights, lost = ctx.saved_tensors
        heads, chunk, dtype = ctx.heads, ctx.chunk, weights.dtype
        batch, tokens, packed = qkv.shape
        head_dim = packed // 3 // heads
        scale, layout = head_dim**-0.5, (batch, tokens, 3, heads, head_dim)
        grad_qkv, grad_bias = torch.empty_like(qkv), torch.zeros_like(weights[0])
        scores = torch.empty_like(weights[:chunk])
        aligned = _aligner(chunk, heads, tokens, head_dim, dtype)
        unused = weights.new_empty(())  # what baddbmm adds, times 0
        parts, grads = (t.view(layout).permute(2, 0, 3, 1, 4).split(chunk, 1) for t in (qkv, grad_qkv))
        outs = grad.view(batch, tokens, heads, head_dim).transpose(1, 2).masked_fill(lost, 0.0).split(chunk)
        with torch.autocast("cpu", enabled=False):
            for part, (grad_q, grad_k, grad_v), out, maps in zip(parts, grads, outs, weights.split(chunk)):
                (q, k, v), out = part.to(dtype), out.to(dtype)  # (images, heads, N, head_dim) each
                maps, grad_maps = maps.flatten(0, 1), scores[: len(maps)].flatten(0, 1)  # (images * heads, N, N)
                _store(grad_v, torch.bmm(maps.mT, aligned(out)))
                torch.bmm(out.flatten(0, 1), v.flatten(0, 1).mT, out=grad_maps)
                torch._softmax_backward_data(grad_maps, maps, -1, dtype, grad_input=grad_maps)
                grad_bias += grad_maps if len(out) == 1 else grad_maps.unflatten(0, (-1, heads)).sum(0)
                _store(grad_q, torch.baddbmm(unused, grad_maps, aligned(k), beta=0, alpha=scale))
                _store(grad_k, torch.baddbmm(unused, grad_maps.mT, aligned(q), beta=0, alpha=scale))
        return grad_qkv, grad_bias.to(ctx.bias_dtype), None


def _store(into: Tensor, values: Tensor) -> None:
    """(images * heads, N, head_dim or more) -> ``into`` (images, heads, N, head_dim)."""
    into.copy_(values.view(*into.shape[:3], -1)[..., : into.shape[-1]])


def _aligner(images: int, heads: int, tokens: int, head_dim: int, dtype: torch.dtype) -> Callable[[Tensor], Tensor]:
    """(images, heads, N, head_dim) -> (images * heads, N, head_dim or more): zeros up to a multiple of ``_ALIGNMENT``."""
    room = torch.zeros(images, heads, tokens, head_dim + -head_dim % _ALIGNMENT, dtype=dtype)

    def aligned(values: Tensor) -> Tensor:
        room[: len(values), ..., :head_dim] = values
        return room[: len(values)].flatten(0, 1)  # overwritten by the next call

    return aligned if head_dim % _ALIGNMENT else lambda values: values.flatten(0, 1)
