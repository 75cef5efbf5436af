"""Define LSAT's layers (Sheynin et al., 2021): shift embeddings of every patch from T slightly shifted images (Sec. 3.1); attention
within groups of tokens, the block and the downsampling (Sec. 3.2)."""

from collections.abc import Callable, Sequence
from itertools import cycle
from math import isqrt
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from pipeline.models.common.base import scale_branch
from pipeline.models.common.layers import MLP, NORM_EPS, resample_grid
from pipeline.models.common.probe import probe
from pipeline.models.common.vit import attention_weights

MLP_RATIO = 4
Shift = tuple[int, int]  # pixels (down, right) by which the image's content moves


def roll(image: Tensor, shift: Shift) -> Tensor:
    """(B, 3, H, W) shifted circularly."""
    return image.roll(shift, dims=(2, 3))


def pad_circularly(image: Tensor, shift: Shift) -> Tensor:
    """Shifted circularly, keeping what moves past the bottom and right borders: (B, 3, H, W) -> (B, 3, H + down, W + right).

    A convolution without padding sees the same as with :func:`roll`. A padded one sees the image's last rows and columns, not
    zeros, as in the published code at 224 pixels.
    """
    down, right = shift
    return F.pad(image, (right, 0, down, 0), mode="circular") if down or right else image


def translate(image: Tensor, shift: Shift) -> Tensor:
    """(B, 3, H, W) shifted with reflection padding (Sec. 4.1)."""
    (down, right), (height, width) = shift, image.shape[2:]
    padded = F.pad(image, (max(right, 0), max(-right, 0), max(down, 0), max(-down, 0)), mode="reflect")
    top, left = max(-down, 0), max(-right, 0)
    return padded[:, :, top : top + height, left : left + width]


class ShiftSet(NamedTuple):
    """A list of shifts and the way an image is shifted."""

    shifts: tuple[Shift, ...]  # the first is (0, 0), the image itself
    shift_image: Callable[[Tensor, Shift], Tensor]


# The paper's sets (Sec. 4), in the published code's order and with its padding.
SHIFTS_224 = ShiftSet(((0, 0), (0, 1), (0, 2), (0, 3), (1, 0), (2, 0), (3, 0), (1, 1), (2, 2), (3, 3)), pad_circularly)
SHIFTS_32 = ShiftSet(
    (
        *((0, 0), (1, 0), (0, 1), (-1, 0), (0, -1), (2, 0), (0, 2), (-2, 0), (0, -2)),
        *((1, 1), (1, 2), (1, -1), (-1, 1), (-1, 2), (-1, -1), (2, 1), (2, 2), (2, -1)),
    ),
    roll,
)


class ShiftEmbedding(nn.Module):
    """Patch embeddings of T shifted images (Sec. 3.1), with a convolution per shift or a shared one.

    ``forward``: (B, 3, H, W) -> (B, N, T, width), N patches in row-major order.
    """

    def __init__(self, shift_set: ShiftSet, projections: Sequence[nn.Conv2d]) -> None:
        super().__init__()
        self.shift_set = shift_set
        self.projections = nn.ModuleList(projections)

    def forward(self, images: Tensor) -> Tensor:
        maps = [
            projection(self.shift_set.shift_image(images, shift)).flatten(2).transpose(1, 2)  # (B, N, width)
            for shift, projection in zip(self.shift_set.shifts, cycle(self.projections))
        ]
        return torch.stack(maps, dim=2)  # (B, N, T, width)


class PositionEmbedding(nn.Module):
    """Learned position embedding of shape (T, N, width), or (N, width) shared by the variants.

    A module of its own, so that ZeRO-3 gathers the table. N is a square number: images are square, but in the feature form.
    ``forward``: x (B, N, T, width), grid (rows, columns) of its patches -> the same shape.
    """

    def __init__(self, *shape: int) -> None:
        super().__init__()
        self.table = nn.Parameter(nn.init.trunc_normal_(torch.empty(shape), std=0.02))

    def forward(self, x: Tensor, grid: tuple[int, int]) -> Tensor:
        table = self.table if self.table.ndim == 3 else self.table[None]  # (T or 1, N, D)
        side = isqrt(table.shape[1])
        return x + resample_grid(table, (side, side), grid).transpose(0, 1)


class GroupedAttention(nn.Module):
    """Multi-head attention within groups of tokens (Eq. 1 to 4).

    In local attention each patch with its variants is a group; in global attention all patches are one group. ``kv_heads`` is
    ``heads``, or 1 for multi-query attention: all query heads share one head of keys and values, and are folded into the
    sequence, so that keys and values are not copied.

    Probe: ``attention`` (B, heads, groups, L, S).

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
        split = (batch, groups, self.heads, length, -1)
        probe("attention", lambda: attention_weights(q, k).reshape(split).transpose(1, 2))
        out = out.view(batch, groups, self.kv_heads, per_kv, length, self.head_dim)
        return self.proj(out.permute(0, 1, 4, 2, 3, 5).reshape(batch, groups, length, width))


class Block(nn.Module):
    """Attention and MLP, each with a residual connection. All blocks of a level share its norms (published code).

    ``forward``: x (B, N, T, width), norms (two LayerNorms), branch_scales (B, 2) or None -> (B, N, 1, width). The local block
    pools the T variants: the first, unshifted one is query and residual. A global block takes T = 1.
    """

    def __init__(self, width: int, heads: int, kv_heads: int, local: bool) -> None:
        super().__init__()
        self.local = local
        self.attention = GroupedAttention(width, heads, kv_heads)
        self.mlp = MLP(width, MLP_RATIO * width, width)

    def forward(self, x: Tensor, norms: tuple[nn.Module, nn.Module], branch_scales: Tensor | None) -> Tensor:
        normed = norms[0](x)  # (B, N, T, width)
        if self.local:
            attended = self.attention(normed[:, :, :1], normed)  # (B, N, 1, width): N groups
        else:
            patches = normed.transpose(1, 2)  # (B, 1, N, width): one group
            attended = self.attention(patches, patches).transpose(1, 2)
        x = x[:, :, :1] + scale_branch(attended, branch_scales, 0)
        return x + scale_branch(self.mlp(norms[1](x)), branch_scales, 1)


class Downsampling(nn.Module):
    """3x3 convolution, LayerNorm (published code only), and 3x3 max pooling with stride 2 (Sec. 3.2).

    ``forward``: (B, N, 1, width), grid (rows, columns) -> (B, N', 1, out_width); an odd side is rounded up.
    """

    def __init__(self, width: int, out_width: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(width, out_width, 3, padding=1)
        self.norm = nn.LayerNorm(out_width, eps=NORM_EPS)

    def forward(self, x: Tensor, grid: tuple[int, int]) -> Tensor:
        image = x.squeeze(2).transpose(1, 2).unflatten(2, grid)  # (B, width, rows, columns)
        image = self.norm(self.conv(image).permute(0, 2, 3, 1)).permute(0, 3, 1, 2)
        image = F.max_pool2d(image, 3, stride=2, padding=1)  # (B, out_width, rows', columns')
        return image.flatten(2).transpose(1, 2).unsqueeze(2)  # (B, N', 1, out_width)
