"""Define what LSAT's Table 6 has instead of the local block: Swin's block (Liu et al., ICCV 2021), and of CvT (Wu et al., "CvT:
Introducing Convolutions to Vision Transformers", ICCV 2021) the convolutional token embedding (Sec. 3.1) and convolutional projection
(Sec. 3.2), as in CvT's published code.

The projection's BatchNorms are not part of the block: activation checkpointing would update their statistics twice, and
compiled code would be made again for the momentum of each micro-batch.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from pipeline.models.common.base import scale_branch
from pipeline.models.common.layers import MLP
from pipeline.models.common.probe import probe
from pipeline.models.common.vit import attention_weights
from pipeline.models.common.windows import Tiling, relative_index

MLP_RATIO = 4
NORM_EPS = 1e-5  # of CvT's and of Swin's published code
KERNEL = 3  # of the projections, as in all of CvT's models
KEY_VALUE_STRIDE = 2  # likewise: a quarter of the keys and values


class TokenEmbedding(nn.Module):
    """Convolution and LayerNorm. ``forward``: (B, 3, H, W) -> (B, N, 1, width), N tokens in row-major order."""

    def __init__(self, conv: nn.Conv2d) -> None:
        super().__init__()
        self.conv = conv
        self.norm = nn.LayerNorm(conv.out_channels, eps=NORM_EPS)

    def forward(self, images: Tensor) -> Tensor:
        return self.norm(self.conv(images).flatten(2).transpose(1, 2)).unsqueeze(2)


def overlapping(kernel: int, stride: int, padding: int) -> tuple[int, int, int]:
    """Kernel, stride and padding of overlapping patches with the same grid: as they are if they overlap, or as CvT's first stage
    (7, 4, 2) relates to its stride."""
    return (kernel, stride, padding) if kernel > stride else (2 * stride - 1, stride, stride // 2)


class DepthwiseProjection(nn.Module):
    """Depthwise 3x3 convolution and BatchNorm, the first half of a convolutional projection; the other is a linear layer.

    ``forward``: (B, width, rows, columns) -> (B, S, width), S = ceil(rows / stride) * ceil(columns / stride).
    """

    def __init__(self, width: int, stride: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(width, width, KERNEL, stride=stride, padding=KERNEL // 2, groups=width, bias=False)
        self.norm = nn.BatchNorm2d(width)

    def forward(self, image: Tensor) -> Tensor:
        return self.norm(self.conv(image)).flatten(2).transpose(1, 2)


class ConvolutionalProjection(nn.Module):
    """Depthwise convolutions for queries, keys and values; those of keys and values have stride 2.

    ``forward``: x (B, N, 1, width), grid (rows, columns) -> queries (B, N, width), keys and values (B, S, width).
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        self.query = DepthwiseProjection(width, stride=1)
        self.key = DepthwiseProjection(width, KEY_VALUE_STRIDE)
        self.value = DepthwiseProjection(width, KEY_VALUE_STRIDE)

    def forward(self, x: Tensor, grid: tuple[int, int]) -> tuple[Tensor, Tensor, Tensor]:
        image = x.squeeze(2).transpose(1, 2).unflatten(2, grid)  # (B, width, rows, columns)
        return self.query(image), self.key(image), self.value(image)


class ProjectedAttention(nn.Module):
    """Multi-head attention of tokens that :class:`ConvolutionalProjection` made; keys and values per head. Scores are scaled by
    width**-0.5, not head_dim**-0.5, as in CvT's published code. Probe: ``attention`` (B, heads, 1, N, S).

    ``forward``: queries (B, N, width), keys, values (B, S, width) -> (B, N, width).
    """

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads, self.scale = heads, width**-0.5
        self.query, self.key, self.value, self.proj = (nn.Linear(width, width) for _ in range(4))

    def forward(self, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        q, k, v = (
            part.unflatten(2, (self.heads, -1)).transpose(1, 2)  # (B, heads, N or S, head_dim)
            for part in (self.query(queries), self.key(keys), self.value(values))
        )
        out = F.scaled_dot_product_attention(q, k, v, scale=self.scale)  # (B, heads, N, head_dim)
        probe("attention", lambda: (q @ k.transpose(-1, -2) * self.scale).softmax(-1).unsqueeze(2))
        return self.proj(out.transpose(1, 2).flatten(2))


class CvTBlock(nn.Module):
    """LSAT's block with CvT's attention.

    ``forward``: x (B, N, 1, width), what :class:`ConvolutionalProjection` made of the normed x, norm2 (a LayerNorm, which the
    blocks of a level share), branch_scales (B, 2) or None -> (B, N, 1, width).
    """

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.attention = ProjectedAttention(width, heads)
        self.mlp = MLP(width, MLP_RATIO * width, width)

    def forward(
        self, x: Tensor, projected: tuple[Tensor, Tensor, Tensor], norm2: nn.Module, branch_scales: Tensor | None
    ) -> Tensor:
        x = x + scale_branch(self.attention(*projected).unsqueeze(2), branch_scales, 0)
        return x + scale_branch(self.mlp(norm2(x)), branch_scales, 1)


# Swin's 7 does not divide LSAT's first grid (32 x 32, at 32 pixels and for LSAT-T at 224), and its code takes no other; 8 is the
# nearest side that does. It divides LSAT-S's 56 x 56 too. The paper does not say what it took.
WINDOW = 8
BIAS_STD = 0.02


class RelativeBias(nn.Module):
    """A learned bias for each relative position in a window and each head (Eq. 4), a module so that ZeRO-3 gathers the table.

    ``forward``: () -> (heads, N, N), N = window².
    """

    def __init__(self, window: int, heads: int) -> None:
        super().__init__()
        self.window = window
        self.table = nn.Parameter(nn.init.trunc_normal_(torch.empty((2 * window - 1) ** 2, heads), std=BIAS_STD))

    def forward(self) -> Tensor:
        return self.table[relative_index(self.window, self.table.device)].permute(2, 0, 1)


class WindowAttention(nn.Module):
    """Multi-head attention within windows, with relative position bias. Probe: ``attention`` (B, heads, windows, N, N).

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
        split = (windows, self.heads)
        probe("attention", lambda: attention_weights(q, k, bias).unflatten(1, split).transpose(1, 2))
        out = out.unflatten(1, split).transpose(2, 3)  # (B, windows, N, heads, head_dim)
        return self.proj(out.flatten(3))


class SwinBlock(nn.Module):
    """Window attention and MLP, each behind a LayerNorm and with a residual connection (Eq. 3).

    A grid that the windows do not tile is padded at the bottom and right with zeros, which no token of the image attends to.
    Swin's code for classification refuses such grids. Windows are no larger than ``side``, that of the grid in training.
    ``shifted``: by half their side, as in every second block of Swin, unless one holds the whole grid.

    ``forward``: x (B, N, 1, width), grid (rows, columns), branch_scales (B, 2) or None -> like x.
    """

    def __init__(self, width: int, heads: int, side: int, shifted: bool) -> None:
        super().__init__()
        self.window = min(WINDOW, side)
        self.shift = self.window // 2 if shifted and side > self.window else 0
        self.norm1 = nn.LayerNorm(width, eps=NORM_EPS)
        self.attention = WindowAttention(width, heads, self.window)
        self.norm2 = nn.LayerNorm(width, eps=NORM_EPS)
        self.mlp = MLP(width, MLP_RATIO * width, width)

    def forward(self, x: Tensor, grid: tuple[int, int], branch_scales: Tensor | None) -> Tensor:
        x = x + scale_branch(self._attend(self.norm1(x), grid), branch_scales, 0)
        return x + scale_branch(self.mlp(self.norm2(x)), branch_scales, 1)

    def _attend(self, x: Tensor, grid: tuple[int, int]) -> Tensor:
        tiling = Tiling(grid, self.window, (self.shift, self.shift))
        image = x.squeeze(2).unflatten(1, grid)  # (B, rows, columns, width)
        windows = self.attention(tiling.split(image), tiling.connected(x.device))  # (B, windows, window², width)
        return tiling.join(windows).flatten(1, 2).unsqueeze(2)  # (B, N, 1, width)
