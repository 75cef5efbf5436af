"""Multi-head peripheral attention of PerViT (Min et al., NeurIPS 2022, Sec. 3.1, Eq. 1 to 5)."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from pipeline.models.layers import biased_attention
from pipeline.models.probe import probe


class PeripheralAttention(nn.Module):
    """Multi-head peripheral attention (Eq. 1 to 5).

    Normalize[exp(τ Q Kᵀ) ⊙ Φp] V is computed in its identical, cheaper form softmax(τ Q Kᵀ + log Φp) V,
    which runs on the fused attention kernels.

    ``forward``: x (B, N, width), log_phi (heads, N, N) or None for Φp = 1 -> (B, N, width).

    Probes: ``phi_p`` (heads, N, N), if there is a Φp; ``phi_c`` (B, heads, N, N), exp(τ Q Kᵀ - row maximum), as the
    authors' code has it: the rows' factors cancel; ``attention`` (B, heads, N, N), their normalized product.
    """

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.proj = nn.Linear(width, width)

    def forward(self, x: Tensor, log_phi: Tensor | None) -> Tensor:
        batch, tokens, width = x.shape
        qkv = self.qkv(x).view(batch, tokens, 3, self.heads, width // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)  # (B, heads, N, head_dim) each
        offer_probes(q, k, log_phi)
        out = biased_attention(q, k, v, log_phi)  # (B, heads, N, head_dim)
        return self.proj(out.transpose(1, 2).reshape(batch, tokens, width))


def offer_probes(q: Tensor, k: Tensor, log_phi: Tensor | None) -> None:
    """The probes of :class:`PeripheralAttention`, from q, k (B, heads, N, head_dim) and log Φp."""

    def scores() -> Tensor:
        with torch.autocast(q.device.type, enabled=False):  # analyses want more than bf16's three digits
            wide = torch.promote_types(q.dtype, torch.float32)
            return q.to(wide) @ k.to(wide).transpose(-1, -2) * q.shape[-1] ** -0.5  # (B, heads, N, N)

    if log_phi is not None:
        probe("phi_p", lambda: log_phi.exp())
    probe("phi_c", lambda: (scores() - scores().amax(-1, keepdim=True)).exp())
    probe("attention", lambda: (scores() + (0.0 if log_phi is None else log_phi)).softmax(-1))


class StaticAttention(nn.Module):
    """Peripheral attention without content (Φc = 1): Normalize[Φp] V (Table 1 c).

    Queries and keys have no use, so there are none. ``forward``: as :class:`PeripheralAttention`; the probes are ``phi_p``
    and ``attention`` (1, heads, N, N), which is the same for all images.
    """

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.v = nn.Linear(width, width, bias=False)
        self.proj = nn.Linear(width, width)

    def forward(self, x: Tensor, log_phi: Tensor) -> Tensor:
        batch, tokens, width = x.shape
        v = self.v(x).view(batch, tokens, self.heads, width // self.heads).transpose(1, 2)  # (B, heads, N, head_dim)
        weights = log_phi.softmax(-1)[None]  # (1, heads, N, N)
        probe("phi_p", lambda: log_phi.exp())
        probe("attention", lambda: weights)
        out = weights.to(v.dtype) @ v  # (B, heads, N, head_dim)
        return self.proj(out.transpose(1, 2).reshape(batch, tokens, width))
