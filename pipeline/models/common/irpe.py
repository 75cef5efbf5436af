"""Image relative position encoding, iRPE (Wu et al., "Rethinking and Improving Relative Position Encoding for Vision
Transformer", ICCV 2021), in the form of its authors' DeiT: product method, contextual, on keys, shared by the heads of a layer.

The score of query i and key j gets the product of query i with a learned vector of the bucket of (i, j). A bucket is a pair of
indices, of the offsets in rows and in columns, which are exact nearby and grow like the logarithm far away.
"""

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from pipeline.models.common.layers import constant_table, key_offsets
from pipeline.models.common.probe import probe
from pipeline.models.common.vit import SelfAttention, attention_weights, merge_heads, split_heads

# α : β : γ = 1 : 2 : 8 (Sec. 4.1); with α = 1.9 indices go from -3 to 3, the "50 buckets" of the paper with the class token's.
ALPHA, BETA, GAMMA = 1.9, 3.8, 15.2
SIDE = 2 * int(BETA) + 1
BUCKETS = SIDE**2 + 1


def piecewise_index(offset: Tensor) -> Tensor:
    """Index of integer offsets along one axis, in patches (Eq. 18), from -int(β) to int(β): the offset itself up to α, beyond it the
    logarithm of offset / α, scaled so that it would be β at γ, and rounded; odd in the offset."""
    size = offset.abs()
    far = ALPHA + (BETA - ALPHA) * (size.clamp(min=1).double() / ALPHA).log() / math.log(GAMMA / ALPHA)
    index = torch.where(size <= ALPHA, size, far.round().long().clamp(max=int(BETA)))
    return offset.sign() * index


@constant_table
def bucket_table(rows: int, columns: int, device: torch.device) -> Tensor:
    """Bucket of every query and key (Eq. 25), class token first, and N = rows * columns patches in row-major order. Returns
    (N + 1, N + 1) int64: [q, k] = SIDE * (index of the row offset + int(β)) + (that of the column offset + int(β)), offsets
    from key to query; the last bucket to and from the class token."""
    by_row, by_column = (piecewise_index(-offsets) + int(BETA) for offsets in key_offsets(rows, columns))  # (N, N)
    return F.pad(SIDE * by_row + by_column, (1, 0, 1, 0), value=BUCKETS - 1).to(device)


@constant_table
def bucket_indicator(rows: int, columns: int, device: torch.device, dtype: torch.dtype) -> Tensor:
    """:func:`bucket_table` as zeros and ones: (N + 1, N + 1, BUCKETS)."""
    return F.one_hot(bucket_table(rows, columns, device), BUCKETS).to(dtype)


class _Select(torch.autograd.Function):
    """``values[b, h, q, buckets[q, k]]``, whose gradient is a matrix product: PyTorch would add it up atomically on GPUs, slowly and
    in another order each time."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, buckets: Tensor, indicator: Tensor) -> Tensor:
        ctx.save_for_backward(indicator)
        return values.gather(-1, buckets.expand(*values.shape[:2], -1, -1))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (indicator,) = ctx.saved_tensors
        by_query = grad.flatten(0, 1).transpose(0, 1)  # (N + 1, B * heads, N + 1)
        summed = torch.bmm(by_query, indicator.to(grad.dtype))  # (N + 1, B * heads, BUCKETS)
        return summed.transpose(0, 1).unflatten(0, grad.shape[:2]), None, None


class KeyPositions(nn.Module):
    """iRPE's scores of one layer: qᵀ p / sqrt(head_dim) with the vector p of each query's and key's bucket (Eq. 15, 27 and 28).

    ``forward``: q (B, heads, N + 1, head_dim), class token first, grid (rows, columns) with N = rows * columns
    -> (B, heads, N + 1, N + 1).
    """

    def __init__(self, head_dim: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1, head_dim, BUCKETS))  # 1: shared by the heads

    def forward(self, q: Tensor, grid: tuple[int, int]) -> Tensor:
        values = q @ self.weight[0] * q.shape[-1] ** -0.5  # (B, heads, N + 1, BUCKETS)
        buckets = bucket_table(*grid, values.device)  # (N + 1, N + 1)
        if torch.jit.is_tracing():  # of fvcore, which looks into no function of our own
            return values.gather(-1, buckets.expand(*values.shape[:2], -1, -1))
        selected: Tensor = _Select.apply(values, buckets, bucket_indicator(*grid, values.device, values.dtype))
        return selected


class RelativeSelfAttention(SelfAttention):
    """Multi-head self-attention with iRPE on keys.

    Probes: ``phi_p`` (B, heads, N + 1, N + 1), exp of iRPE's scores, which depend on the queries; ``attention``, of that shape.

    ``forward``: x (B, N + 1, width), class token first, grid (rows, columns) with N = rows * columns -> (B, N + 1, width).
    """

    def __init__(self, width: int, heads: int, qkv_bias: bool = True) -> None:
        super().__init__(width, heads, qkv_bias)
        self.relative_position = KeyPositions(width // heads)

    def forward(self, x: Tensor, grid: tuple[int, int]) -> Tensor:  # type: ignore[override]  # the block hands on what it gets
        q, k, v = split_heads(self.qkv(x), 3, self.heads)  # (B, heads, N + 1, head_dim) each
        bias = self.relative_position(q, grid)  # (B, heads, N + 1, N + 1)
        probe("phi_p", lambda: bias.float().exp())
        probe("attention", lambda: attention_weights(q, k, bias))
        return self.proj(merge_heads(F.scaled_dot_product_attention(q, k, v, attn_mask=bias)))
