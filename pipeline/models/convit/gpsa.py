"""Positional self-attention of ConViT, plain and gated (d'Ascoli et al., ICML 2021, Sec. 2 and 3, Eq. 4 to 7).

A head's position scores are a linear function of (dx, dy, dx² + dy²), the offset from query to key in patches. With the weights
of Eq. 5 their softmax peaks at a fixed offset per head, so that a layer with h heads is initialized as a convolution with a
√h x √h kernel and can depart from it in training.
"""

from __future__ import annotations

from math import isqrt

import torch
from torch import Tensor, nn

from pipeline.kernels import peripheral_attention
from pipeline.models.common.probe import probe
from pipeline.models.common.tables import constant_table
from pipeline.models.common.vit import attention_weights, merge_heads, split_heads


@constant_table
def relative_positions(rows: int, columns: int, device: torch.device, dtype: torch.dtype) -> Tensor:
    """Offsets from every query to every key, in patches (r of Eq. 5).

    Returns:
        (N, N, 3), N = rows * columns in row-major order: [q, k] = (dx, dy, dx² + dy²) with dx = x_k - x_q, dy = y_k - y_q.
    """
    y, x = (axis.flatten() for axis in torch.meshgrid(torch.arange(rows), torch.arange(columns), indexing="ij"))  # (N,)
    dx, dy = x[None, :] - x[:, None], y[None, :] - y[:, None]  # (N, N)
    return torch.stack([dx, dy, dx**2 + dy**2], dim=-1).to(device, dtype)


class PositionalSelfAttention(nn.Module):
    """softmax(q kᵀ / sqrt(head_dim) + position scores) v: content and position summed before the softmax (Eq. 4).

    Follows the published code, which scales the content scores by 1 / sqrt(head_dim); Eq. 4 and 7 omit that factor.

    Probes: ``attention`` (B, heads, N, N); ``position`` (heads, N, N), the softmax of the position scores alone.

    ``forward``: x (B, N, width), offsets (N, N, 3) from :func:`relative_positions` -> (B, N, width).
    """

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qk = nn.Linear(width, 2 * width, bias=False)
        self.v = nn.Linear(width, width, bias=False)
        self.proj = nn.Linear(width, width)
        self.position_projection = nn.Linear(3, heads)  # the softmax cancels its bias, which the published weights have

    @torch.no_grad()
    def init_convolution(self, locality_strength: float) -> None:
        """Initialize as a convolution (Eq. 5): each head attends to one offset of a square kernel, values are the identity.

        Head ``row + column * side`` attends to offset Δ: its scores are -strength * (|δ - Δ|² - |Δ|²). As in the published
        code, Δ is relative to the kernel's centre: ±0.5 for the 2 x 2 kernel (Fig. 3 says ±1).
        """
        nn.init.eye_(self.v.weight)
        side = isqrt(self.heads)
        for head in range(side**2):
            dx, dy = head // side - (side - 1) / 2, head % side - (side - 1) / 2
            weights = torch.tensor([2 * dx, 2 * dy, -1.0])
            self.position_projection.weight[head] = locality_strength * weights

    def position_scores(self, offsets: Tensor) -> Tensor:
        """(N, N, 3) -> (heads, N, N), the same for all images.

        In full precision even under autocast: scores of distant keys are in the hundreds, where bfloat16 resolves steps of 1.
        """
        with torch.autocast(offsets.device.type, enabled=False):
            return self.position_projection(offsets).permute(2, 0, 1)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, position_scores: Tensor) -> Tensor:
        """(B, heads, N, head_dim) each and (heads, N, N) -> (B, heads, N, head_dim)."""
        probe("position", lambda: position_scores.softmax(-1))
        probe("attention", lambda: attention_weights(q, k, position_scores))
        return peripheral_attention(q, k, v, position_scores)

    def forward(self, x: Tensor, offsets: Tensor) -> Tensor:
        q, k = split_heads(self.qk(x), 2, self.heads)  # (B, heads, N, head_dim) each
        (v,) = split_heads(self.v(x), 1, self.heads)  # (B, heads, N, head_dim)
        return self.proj(merge_heads(self.attend(q, k, v, self.position_scores(offsets))))


class GatedPositionalSelfAttention(PositionalSelfAttention):
    """GPSA: (1 - s) softmax(q kᵀ / sqrt(head_dim)) v + s softmax(position scores) v, with s = σ(λ) per head (Eq. 6 and 7).

    A sum of two softmaxes is not a softmax, so fused attention cannot compute it directly; the two terms are computed
    separately. The first is fused attention. The second has one (N, N) matrix per head for the whole batch, and these are the
    only (N, N) matrices kept for the backward pass: a factor B fewer than the attention maps of B images. The cost is a second
    product with v: 2 % more multiply-accumulates for ConViT-B, 6 % for ConViT-Ti. The normalization of Eq. 6 is omitted because
    the rows of both terms, and so of their weighted sum, add up to 1.

    Probes: ``attention`` (B, heads, N, N); ``position`` (heads, N, N); ``gate`` (heads,), s as applied.

    Attributes:
        test_gate: replaces σ(λ) in eval mode: 1 masks content, 0 masks position (Table 6); None: σ(λ).
    """

    def __init__(self, width: int, heads: int) -> None:
        super().__init__(width, heads)
        self.gating = nn.Parameter(torch.ones(heads))  # λ
        self.test_gate: float | None = None

    def gate(self) -> Tensor:
        """The gate s: (heads,)."""
        if self.test_gate is not None and not self.training:
            return torch.full_like(self.gating, self.test_gate)
        return self.gating.sigmoid()

    def attend(self, q: Tensor, k: Tensor, v: Tensor, position_scores: Tensor) -> Tensor:
        gate, position = self.gate(), position_scores.softmax(-1)  # (heads,), (heads, N, N)
        probe("gate", lambda: gate)
        probe("position", lambda: position)
        probe("attention", lambda: torch.lerp(attention_weights(q, k), position, gate[:, None, None]))
        by_content = peripheral_attention(q, k, v, None)  # (B, heads, N, head_dim)
        by_position = torch.einsum("hqk,bhkd->bhqd", position.to(v.dtype), v)  # (B, heads, N, head_dim)
        return torch.lerp(by_content, by_position, gate[:, None, None].to(v.dtype))
