"""Layers that the model families share."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

# CUDA's fused attention kernels want head widths that are multiples of 8; PerViT-M's are 26, 39, 45, 57.
CUDA_HEAD_ALIGNMENT = 8


class MLP(nn.Module):
    """Linear, GELU, Linear: the feed-forward half of a transformer block.

    ``forward``: (B, N, width) -> (B, N, out_width).
    """

    def __init__(self, width: int, hidden: int, out_width: int) -> None:
        super().__init__()
        self.fc1 = nn.Linear(width, hidden)
        self.fc2 = nn.Linear(hidden, out_width)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(F.gelu(self.fc1(x)))


def drop_path_scales(rates: Tensor, noise: Tensor) -> Tensor:
    """What stochastic depth multiplies each sample's residual branches by (Huang et al., 2016).

    Args:
        rates: (branches,) probability of dropping each branch.
        noise: (B, branches) uniform numbers in [0, 1), one per sample and branch.

    Returns:
        (B, branches): 0 where the branch is dropped, ``1 / (1 - rate)`` where it is kept.
    """
    keep = 1.0 - rates
    return (noise >= rates).to(keep.dtype) / keep


def drop_elements(x: Tensor, rate: float, noise: Tensor) -> Tensor:
    """Dropout (Srivastava et al., 2014) that makes all decisions for a sample from one random number and each element's place.

    So a sample's decisions do not depend on what else is in its batch, and recomputation makes the same again; nothing as large
    as ``x`` has to be drawn beforehand. Costs about a dozen integer operations per element.

    Args:
        x: (B, ...).
        rate: probability that an element becomes 0; the others are divided by ``1 - rate``.
        noise: (B,) uniform numbers in [0, 1), of which the first 24 bits count.

    Returns:
        As ``x``.
    """
    with torch.no_grad():
        places = _hash(torch.arange(x[0].numel(), dtype=torch.int32, device=x.device))  # (elements,)
        seeds = _hash((noise * 2**24).to(torch.int32))  # (B,)
        words = _hash(places ^ seeds[:, None])  # (B, elements), uniform on all 32-bit integers
        dropped = (words < round((rate - 0.5) * 2**32)).view(x.shape)
    return x.masked_fill(dropped, 0.0) * (1 / (1 - rate))


def _hash(words: Tensor) -> Tensor:
    """A bijection of int32 whose output bits each depend on all input bits (Wellons, "lowbias32"). In place."""
    for shift, factor in ((16, 0x21F0AAAD), (15, 0x735A2D97)):
        words ^= (words >> shift) & (2 ** (32 - shift) - 1)  # the mask makes the shift a logical one
        words *= factor
    return words.bitwise_xor_((words >> 15) & 0x1FFFF)


def biased_attention(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, alignment: int | None = None) -> Tensor:
    """softmax(q kᵀ / sqrt(head_dim) + bias) v through PyTorch's fused attention.

    Args:
        q, k, v: (B, heads, N, head_dim).
        bias: (heads, N, N), added to every image's scores; cast to ``q``'s dtype. None: nothing is added.
        alignment: pad head_dim with zeros to a multiple of this. Zeros change neither the scores nor the
            columns that are kept. Default: 8 on CUDA, where other widths fall off the fused kernels.

    Returns:
        (B, heads, N, head_dim).
    """
    head_dim = q.shape[-1]
    if alignment is None:
        alignment = CUDA_HEAD_ALIGNMENT if q.is_cuda else 1
    if padding := -head_dim % alignment:
        q, k, v = (F.pad(t, (0, padding)) for t in (q, k, v))
    mask = None if bias is None else bias.to(q.dtype)[None]  # (1, heads, N, N)
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=head_dim**-0.5)
    return out[..., :head_dim]  # (B, heads, N, head_dim)


def init_linear(module: nn.Module, std: float = 0.02) -> None:
    """Truncated normal weights and zero bias, as DeiT's and ViT's linear layers start."""
    if isinstance(module, nn.Linear):
        nn.init.trunc_normal_(module.weight, std=std)
        if module.bias is not None:
            nn.init.zeros_(module.bias)
