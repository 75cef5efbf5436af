"""Multi-head peripheral attention of PerViT (Min et al., NeurIPS 2022, Sec. 3.1, Eq. 1 to 5)."""

from __future__ import annotations

from torch import Tensor, nn

from pipeline.models.common.probe import probe
from pipeline.models.common.vit import attention_weights, content_attention, merge_heads, packed_attention, split_heads


class PeripheralAttention(nn.Module):
    """Attention by content and position (Eq. 3).

    Normalize[exp(τ Q Kᵀ) ⊙ Φp] V equals softmax(τ Q Kᵀ + log Φp) V (:func:`~pipeline.kernels.peripheral_attention`).

    Probes: ``phi_p`` (heads, N, N), unless Φp = 1; ``phi_c`` (B, heads, N, N), exp(τ Q Kᵀ - row maximum) as in the authors'
    code (the normalization cancels the factor); ``attention`` (B, heads, N, N), their normalized product.

    ``forward``: x (B, N, width), log_phi (heads, N, N) or None for Φp = 1 -> (B, N, width).
    """

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.proj = nn.Linear(width, width)

    def forward(self, x: Tensor, log_phi: Tensor | None) -> Tensor:
        qkv = self.qkv(x)  # (B, N, 3 * width)
        q, k, _ = split_heads(qkv, 3, self.heads)  # (B, heads, N, head_dim) each
        if log_phi is not None:
            probe("phi_p", lambda: log_phi.exp())
        probe("phi_c", lambda: content_attention(q, k))
        probe("attention", lambda: attention_weights(q, k, log_phi))
        return self.proj(packed_attention(qkv, self.heads, log_phi))


class StaticAttention(nn.Module):
    """Attention by position only (Φc = 1): Normalize[Φp] V (Table 1 c). Has no query and key projections.

    Probes: ``phi_p`` (heads, N, N) and ``attention`` (1, heads, N, N), the same for all images.

    ``forward``: x (B, N, width), log_phi (heads, N, N) -> (B, N, width).
    """

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.v = nn.Linear(width, width, bias=False)
        self.proj = nn.Linear(width, width)

    def forward(self, x: Tensor, log_phi: Tensor) -> Tensor:
        (v,) = split_heads(self.v(x), 1, self.heads)  # (B, heads, N, head_dim)
        weights = log_phi.softmax(-1)[None]  # (1, heads, N, N)
        probe("phi_p", lambda: log_phi.exp())
        probe("attention", lambda: weights)
        return self.proj(merge_heads(weights.to(v.dtype) @ v))  # (B, N, width)
