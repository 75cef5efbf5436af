"""Parts of CvT (Wu et al., "CvT: Introducing Convolutions to Vision Transformers", ICCV 2021), for variant II of LSAT's Table 6:
convolutional token embedding (Sec. 3.1) and convolutional projection (Sec. 3.2), as in CvT's published code.

The projection's BatchNorms are not part of the block: activation checkpointing would update their statistics twice, and
compiled code would be made again for the momentum of each micro-batch.
"""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional as F

from pipeline.models.common.base import scale_branch
from pipeline.models.common.layers import MLP
from pipeline.models.common.probe import probe

MLP_RATIO = 4
LAYER_NORM_EPS = 1e-5  # of CvT's published code
KERNEL = 3  # of the projections, as in all of CvT's models
KEY_VALUE_STRIDE = 2  # likewise: a quarter of the keys and values


class TokenEmbedding(nn.Module):
    """Convolution and LayerNorm. ``forward``: (B, 3, H, W) -> (B, N, 1, width), N tokens in row-major order."""

    def __init__(self, conv: nn.Conv2d) -> None:
        super().__init__()
        self.conv = conv
        self.norm = nn.LayerNorm(conv.out_channels, eps=LAYER_NORM_EPS)

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
    """Multi-head attention of tokens that :class:`ConvolutionalProjection` made; keys and values per head.

    Scores are scaled by width**-0.5, not head_dim**-0.5, as in CvT's published code.

    Probe: ``attention`` (B, heads, 1, N, S).

    ``forward``: queries (B, N, width), keys, values (B, S, width) -> (B, N, width).
    """

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads, self.scale = heads, width**-0.5
        self.query = nn.Linear(width, width)
        self.key = nn.Linear(width, width)
        self.value = nn.Linear(width, width)
        self.proj = nn.Linear(width, width)

    def forward(self, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        q, k, v = (
            each.unflatten(2, (self.heads, -1)).transpose(1, 2)  # (B, heads, N or S, head_dim)
            for each in (self.query(queries), self.key(keys), self.value(values))
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
