"""Peripheral attention in plain PyTorch: the reference, and the form for every device that the Triton kernels are not for."""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional as F

# PyTorch's fused attention kernels on CUDA need a head_dim that is a multiple of 8; PerViT-M's are 26, 39, 45 and 57.
CUDA_HEAD_ALIGNMENT = 8


def biased_attention(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, alignment: int | None = None) -> Tensor:
    """softmax(q kᵀ / sqrt(head_dim) + bias) v with PyTorch's fused attention.

    Args:
        q, k, v: (B, heads, N, head_dim).
        bias: (heads, N, N), added to the scores of every image; cast to ``q``'s dtype. None: no bias.
        alignment: zero-pad head_dim to a multiple of this, which changes neither the scores nor the columns that are kept.
            Default: 8 on CUDA, where other sizes cannot use the fused kernels, else 1.

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
