"""Swin's transformer block (Liu et al., "Swin Transformer", ICCV 2021, Sec. 3.2), for variant I of LSAT's Table 6.

A block of its own in everything, norms and epsilon included, as in Swin's published code.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from pipeline.models.common.base import scale_branch
from pipeline.models.common.layers import MLP
from pipeline.models.common.probe import probe
from pipeline.models.common.windows import connected_tokens, from_windows, relative_index, to_windows

# Swin's 7 does not divide LSAT's first grid (32 x 32, at 32 pixels and for LSAT-T at 224), and its code takes no other; 8 is the
# nearest side that does. It divides LSAT-S's 56 x 56 too. The paper does not say what it took.
WINDOW = 8
MLP_RATIO = 4
LAYER_NORM_EPS = 1e-5  # of Swin's published code
BIAS_STD = 0.02


class RelativeBias(nn.Module):
    """A learned bias for each relative position in a window and each head (Eq. 4).

    A module of its own, so that ZeRO-3 gathers the table. ``forward``: () -> (heads, N, N), N = window².
    """

    def __init__(self, window: int, heads: int) -> None:
        super().__init__()
        self.window = window
        self.table = nn.Parameter(nn.init.trunc_normal_(torch.empty((2 * window - 1) ** 2, heads), std=BIAS_STD))

    def forward(self) -> Tensor:
        return self.table[relative_index(self.window, self.table.device)].permute(2, 0, 1)


class WindowAttention(nn.Module):
    """Multi-head attention within windows, with relative position bias.

    Probe: ``attention`` (B, heads, windows, N, N).

    ``forward``: x (B, windows, N, width), connected (windows, N, N) bool or None, the pairs that attend to each other -> like x.
    """

    def __init__(self, width: int, heads: int, window: int) -> None:
        super().__init__()
        self.heads = heads
        self.bias = RelativeBias(window, heads)
        self.qkv = nn.Linear(width, 3 * width)
        self.proj = nn.Linear(width, width)

    def forward(self, x: Tensor, connected: Tensor | None) -> Tensor:
        batch, windows, tokens, width = x.shape
        qkv = self.qkv(x).view(batch, windows, tokens, 3, self.heads, width // self.heads)
        # Windows are folded into the heads, not the batch: CUDA kernels limit each of the two to 65535.
        q, k, v = qkv.permute(3, 0, 1, 4, 2, 5).flatten(2, 3)  # (B, windows * heads, N, head_dim) each
        bias = self.bias().to(q.dtype).expand(windows, -1, -1, -1)  # (windows, heads, N, N)
        if connected is not None:
            bias = torch.where(connected[:, None], bias, float("-inf"))
        bias = bias.flatten(0, 1)  # (windows * heads, N, N)
        out = F.scaled_dot_product_attention(q, k, v, bias)  # (B, windows * heads, N, head_dim)
        probe("attention", lambda: self._attention(q, k, bias, windows))
        out = out.unflatten(1, (windows, self.heads)).transpose(2, 3)  # (B, windows, N, heads, head_dim)
        return self.proj(out.flatten(3))

    def _attention(self, q: Tensor, k: Tensor, bias: Tensor, windows: int) -> Tensor:
        """The attention weights: (B, heads, windows, N, N)."""
        weights = (q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5 + bias).softmax(-1)  # (B, windows * heads, N, N)
        return weights.unflatten(1, (windows, self.heads)).transpose(1, 2)


class SwinBlock(nn.Module):
    """Window attention and MLP, each behind a LayerNorm and with a residual connection (Eq. 3).

    A grid that the windows do not tile is padded at the bottom and right with zeros, which no token of the image attends to.
    Swin's code for classification refuses such grids.

    Args:
        width: channels of a token.
        heads: attention heads.
        side: of the token grid; windows are no larger, and not shifted if one holds the whole grid.
        shifted: shift the windows by half their side, as in every second block of Swin.

    ``forward``: x (B, N, 1, width), grid (rows, columns), branch_scales (B, 2) or None -> like x.
    """

    def __init__(self, width: int, heads: int, side: int, shifted: bool) -> None:
        super().__init__()
        self.window = min(WINDOW, side)
        self.shift = self.window // 2 if shifted and side > self.window else 0
        self.norm1 = nn.LayerNorm(width, eps=LAYER_NORM_EPS)
        self.attention = WindowAttention(width, heads, self.window)
        self.norm2 = nn.LayerNorm(width, eps=LAYER_NORM_EPS)
        self.mlp = MLP(width, MLP_RATIO * width, width)

    def forward(self, x: Tensor, grid: tuple[int, int], branch_scales: Tensor | None) -> Tensor:
        x = x + scale_branch(self._attend(self.norm1(x), grid), branch_scales, 0)
        return x + scale_branch(self.mlp(self.norm2(x)), branch_scales, 1)

    def _attend(self, x: Tensor, grid: tuple[int, int]) -> Tensor:
        (rows, columns), window, shift = grid, self.window, self.shift
        bottom, right = -rows % window, -columns % window
        image = x.squeeze(2).unflatten(1, grid)  # (B, rows, columns, width)
        if bottom or right:
            image = F.pad(image, (0, 0, 0, right, 0, bottom))  # (B, rows', columns', width)
        connected = connected_tokens(grid, window, shift, x.device) if shift or bottom or right else None
        windows = self.attention(to_windows(image, window, shift), connected)  # (B, windows, window², width)
        image = from_windows(windows, window, (rows + bottom, columns + right), shift)[:, :rows, :columns]
        return image.flatten(1, 2).unsqueeze(2)  # (B, N, 1, width)
