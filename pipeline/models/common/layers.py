"""Layers shared by the model families."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class MLP(nn.Module):
    """Linear, GELU, Linear: the feed-forward part of a transformer block.

    ``forward``: (..., width) -> (..., out_width).
    """

    def __init__(self, width: int, hidden: int, out_width: int) -> None:
        super().__init__()
        self.fc1 = nn.Linear(width, hidden)
        self.fc2 = nn.Linear(hidden, out_width)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(F.gelu(self.fc1(x)))


def drop_path_scales(rates: Tensor, noise: Tensor) -> Tensor:
    """Stochastic-depth factors (Huang et al., ECCV 2016).

    Args:
        rates: (branches,) drop probabilities.
        noise: (B, branches) uniform numbers in [0, 1).

    Returns:
        (B, branches): 0 for dropped branches, ``1 / (1 - rate)`` for kept ones.
    """
    keep = 1.0 - rates
    return (noise >= rates).to(keep.dtype) / keep


def drop_elements(x: Tensor, rate: float, noise: Tensor) -> Tensor:
    """Dropout (Srivastava et al., JMLR 2014) whose mask is a hash of one random number per sample and the element's index.

    The mask of a sample is thus independent of its batch and reproduced by recomputation, without a random tensor as large as
    ``x``. Costs about a dozen integer operations per element.

    Args:
        x: (B, ...).
        rate: probability that an element becomes 0; the others are divided by ``1 - rate``.
        noise: (B,) uniform numbers in [0, 1), of which the leading 24 bits (float32's precision) are used.

    Returns:
        Same shape and dtype as ``x``.
    """
    with torch.no_grad():
        places = _hash(torch.arange(x[0].numel(), dtype=torch.int32, device=x.device))  # (elements,)
        seeds = _hash((noise * 2**24).to(torch.int32))  # (B,)
        words = _hash(places ^ seeds[:, None])  # (B, elements), uniform over int32
        dropped = (words < round((rate - 0.5) * 2**32)).view(x.shape)
    return x.masked_fill(dropped, 0.0) * (1 / (1 - rate))


def _hash(words: Tensor) -> Tensor:
    """Integer hash, bijective on int32, in place: xorshift-multiply with constants found by search (Wellons, lowbias32)."""
    for shift, factor in ((16, 0x21F0AAAD), (15, 0x735A2D97)):
        words ^= (words >> shift) & (2 ** (32 - shift) - 1)  # arithmetic shift, masked to a logical one
        words *= factor
    return words.bitwise_xor_((words >> 15) & 0x1FFFF)


def init_linear(module: nn.Module, std: float = 0.02) -> None:
    """ViT's and DeiT's initialization of a linear layer: truncated normal weight, zero bias. Other modules are left alone."""
    if isinstance(module, nn.Linear):
        nn.init.trunc_normal_(module.weight, std=std)
        if module.bias is not None:
            nn.init.zeros_(module.bias)
