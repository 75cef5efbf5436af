"""Attention of LSAT (Sheynin et al., 2021, Sec. 3.2): within groups of tokens, with keys and values per head or shared."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional as F

from pipeline.models.common.probe import probe


class GroupedAttention(nn.Module):
    """Multi-head attention within groups of tokens (Eq. 1 to 4).

    A patch and its variants are a group of local attention, all patches the one group of global attention.
    Offers the probe ``attention``, (B, heads, groups, queries, keys).

    Args:
        kv_heads: as many as ``heads``, or 1: keys and values that all heads of the queries share. Then the heads are
            just more queries of one head, so that the keys need no copies.

    ``forward``: queries (B, groups, L, width), context (B, groups, S, width) -> (B, groups, L, width).
    """

    def __init__(self, width: int, heads: int, kv_heads: int) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.head_dim = heads, kv_heads, width // heads
        self.query = nn.Linear(width, width)
        self.key_value = nn.Linear(width, 2 * kv_heads * self.head_dim)
        self.proj = nn.Linear(width, width)

    def forward(self, queries: Tensor, context: Tensor) -> Tensor:
        batch, groups, length, width = queries.shape
        per_kv = self.heads // self.kv_heads  # heads of the queries that share a head of the keys
        q = self.query(queries).view(batch, groups, length, self.kv_heads, per_kv, self.head_dim)
        q = q.permute(0, 1, 3, 4, 2, 5).flatten(3, 4).flatten(1, 2)  # (B, groups * kv_heads, per_kv * L, head_dim)
        kv = self.key_value(context).unflatten(-1, (2, self.kv_heads, self.head_dim))
        k, v = kv.permute(3, 0, 1, 4, 2, 5).flatten(2, 3)  # (B, groups * kv_heads, S, head_dim) each
        # Groups count as heads, not as samples: CUDA's kernels take at most 65535 of either.
        out = F.scaled_dot_product_attention(q, k, v)  # (B, groups * kv_heads, per_kv * L, head_dim)
        probe("attention", lambda: self._attention(q, k, groups, length))
        out = out.view(batch, groups, self.kv_heads, per_kv, length, self.head_dim)
        return self.proj(out.permute(0, 1, 4, 2, 3, 5).reshape(batch, groups, length, width))

    def _attention(self, q: Tensor, k: Tensor, groups: int, length: int) -> Tensor:
        weights = (q @ k.transpose(-1, -2) * self.head_dim**-0.5).softmax(-1)  # (B, groups * kv_heads, per_kv * L, S)
        return weights.reshape(len(q), groups, self.heads, length, -1).transpose(1, 2)
