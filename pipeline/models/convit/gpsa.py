"""Positional self-attention of ConViT, plain and gated (d'Ascoli et al., ICML 2021, Sec. 2 and 3, Eq. 4 to 7).

A head's scores for positions are a linear function of (dx, dy, dx² + dy²), the offset in patches from a query to a key. With
the weights of Eq. 5 they are a bump around a fixed offset, so that a layer with h heads starts as a convolution with a
√h x √h kernel, and can leave it in training.
"""

from __future__ import annotations

from functools import lru_cache
from math import isqrt

import torch
from torch import Tensor, nn

from pipeline.models.common.layers import biased_attention
from pipeline.models.common.probe import probe
from pipeline.models.common.vit import attention_weights, merge_heads, split_heads


@lru_cache(maxsize=8)
def relative_positions(rows: int, columns: int, device: torch.device, dtype: torch.dtype) -> Tensor:
    """Offsets from every query to every key.

    Returns:
        (N, N, 3), N = rows * columns in row-major order: entry [q, k] = (x_k - x_q, y_k - y_q, their squares' sum), in patches.
    """
    with torch.inference_mode(False):  # a cached tensor must also serve a later training step
        y, x = (axis.flatten() for axis in torch.meshgrid(torch.arange(rows), torch.arange(columns), indexing="ij"))  # (N,)
        dx, dy = x[None, :] - x[:, None], y[None, :] - y[:, None]  # (N, N)
        return torch.stack([dx, dy, dx**2 + dy**2], dim=-1).to(device, dtype)


class PositionalSelfAttention(nn.Module):
    """softmax(q kᵀ / sqrt(head_dim) + position scores) v: content and position summed before the softmax (Eq. 4).

    The published code scales the content scores by 1 / sqrt(head_dim), which Eq. 4 and 7 leave out.

    Offers the probes ``attention`` (B, heads, N, N) and ``position`` (heads, N, N), the softmax of the position scores alone.

    ``forward``: x (B, N, width), offsets (N, N, 3) from :func:`relative_positions` -> (B, N, width).
    """

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qk = nn.Linear(width, 2 * width, bias=False)
        self.v = nn.Linear(width, width, bias=False)
        self.proj = nn.Linear(width, width)
        self.position_projection = nn.Linear(3, heads)  # its bias changes nothing: softmax takes it out again

    @torch.no_grad()
    def init_convolution(self, locality_strength: float) -> None:
        """Start as a convolution (Eq. 5): heads look at the offsets of a square kernel, values are passed on as they are.

        Head ``row + column * side`` of the kernel looks at offset Δ, the scores are -strength * (|δ - Δ|² - |Δ|²).
        As in the published code, Δ is counted from the kernel's middle: ±0.5 for the 2 x 2 kernel (Fig. 3 says ±1).
        """
        nn.init.eye_(self.v.weight)
        side = isqrt(self.heads)
        for head in range(side**2):
            dx, dy = head // side - (side - 1) / 2, head % side - (side - 1) / 2
            weights = torch.tensor([2 * dx, 2 * dy, -1.0])
            self.position_projection.weight[head] = locality_strength * weights

    def position_scores(self, offsets: Tensor) -> Tensor:
        """(N, N, 3) -> (heads, N, N), the same for all images.

        In full precision also under autocast: far keys' scores are in the hundreds, where bfloat16 counts in ones.
        """
        with torch.autocast(offsets.device.type, enabled=False):
            return self.position_projection(offsets).permute(2, 0, 1)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, position_scores: Tensor) -> Tensor:
        """(B, heads, N, head_dim) each and (heads, N, N) -> (B, heads, N, head_dim)."""
        probe("position", lambda: position_scores.softmax(-1))
        probe("attention", lambda: attention_weights(q, k, position_scores))
        return biased_attention(q, k, v, position_scores)

    def forward(self, x: Tensor, offsets: Tensor) -> Tensor:
        q, k = split_heads(self.qk(x), 2, self.heads)
        (v,) = split_heads(self.v(x), 1, self.heads)
        return self.proj(merge_heads(self.attend(q, k, v, self.position_scores(offsets))))


class GatedPositionalSelfAttention(PositionalSelfAttention):
    """GPSA: (1 - s) softmax(q kᵀ / sqrt(head_dim)) v + s softmax(position scores) v, with s = σ(λ) of each head (Eq. 6 and 7).

    The sum of two softmaxes is no softmax, so no fused attention computes it in one go; each of the two terms is cheap, though.
    The first is fused attention. The second has one (N, N) matrix per head for the whole batch: one matrix product per head, and
    the only (N, N) matrices that are kept for the backward pass, B times fewer than B images' attention. The price is that v
    is multiplied twice: 2 % more multiply-accumulates for ConViT-B, 6 % for ConViT-Ti. The normalization of Eq. 6 is left out:
    both terms' rows sum to 1, so do those of the weighted sum.

    Offers the probes ``attention`` (B, heads, N, N), ``position`` (heads, N, N) and ``gate`` (heads,), s as it is applied.

    Attributes:
        test_gate: s in eval mode in place of σ(λ): 1 masks the content, 0 the position (Table 6); None: σ(λ).
    """

    def __init__(self, width: int, heads: int) -> None:
        super().__init__(width, heads)
        self.gating = nn.Parameter(torch.ones(heads))  # λ
        self.test_gate: float | None = None

    def gate(self) -> Tensor:
        """s, (heads,)."""
        if self.test_gate is not None and not self.training:
            return torch.full_like(self.gating, self.test_gate)
        return self.gating.sigmoid()

    def attend(self, q: Tensor, k: Tensor, v: Tensor, position_scores: Tensor) -> Tensor:
        gate, position = self.gate(), position_scores.softmax(-1)  # (heads,), (heads, N, N)
        probe("gate", lambda: gate)
        probe("position", lambda: position)
        probe("attention", lambda: torch.lerp(attention_weights(q, k), position, gate[:, None, None]))
        by_content = biased_attention(q, k, v, None)  # (B, heads, N, head_dim)
        by_position = torch.einsum("hqk,bhkd->bhqd", position.to(v.dtype), v)
        return torch.lerp(by_content, by_position, gate[:, None, None].to(v.dtype))
