"""Attention of LSAT within groups of tokens, with keys and values per head or shared (Sheynin et al., 2021, Sec. 3.2)."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional as F

from pipeline.models.common.probe import probe


class GroupedAttention(nn.Module):
    """Multi-head attention within groups of tokens (Eq. 1 to 4).

    In local attention each patch with its variants is a group; in global attention all patches are one group.

    Probe: ``attention`` (B, heads, groups, L, S).

    Args:
        width: channels of a token.
        heads: attention heads.
        kv_heads: ``heads``, or 1 for multi-query attention: all query heads share one head of keys and values. The query heads
            are then folded into the sequence, so that keys and values are not copied.

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
        per_kv = self.heads // self.kv_heads  # query heads per key-value head
        q = self.query(queries).view(batch, groups, length, self.kv_heads, per_kv, self.head_dim)
        q = q.permute(0, 1, 3, 4, 2, 5).flatten(3, 4).flatten(1, 2)  # (B, groups * kv_heads, per_kv * L, head_dim)
        kv = self.key_value(context).unflatten(-1, (2, self.kv_heads, self.head_dim))
        k, v = kv.permute(3, 0, 1, 4, 2, 5).flatten(2, 3)  # (B, groups * kv_heads, S, head_dim) each
        # Groups are folded into the heads, not the batch: CUDA kernels limit each of the two to 65535.
        out = F.scaled_dot_product_attention(q, k, v)  # (B, groups * kv_heads, per_kv * L, head_dim)
        probe("attention", lambda: self._attention(q, k, groups, length))
        out = out.view(batch, groups, self.kv_heads, per_kv, length, self.head_dim)
        return self.proj(out.permute(0, 1, 4, 2, 3, 5).reshape(batch, groups, length, width))

    def _attention(self, q: Tensor, k: Tensor, groups: int, length: int) -> Tensor:
        """The attention weights: (B, heads, groups, L, S)."""
        weights = (q @ k.transpose(-1, -2) * self.head_dim**-0.5).softmax(-1)  # (B, groups * kv_heads, per_kv * L, S)
        return weights.reshape(len(q), groups, self.heads, length, -1).transpose(1, 2)
