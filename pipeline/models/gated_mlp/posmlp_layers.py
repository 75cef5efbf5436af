"""Embed and merge patches as PosMLP does (Wang et al., ACM MM 2022, Figure 2b and c, Table 10), and embed their absolute position.

Token grids are channels-last. Stems: (B, 3, H, W) -> (B, H / 4, W / 4, width). Merging: (B, rows, columns, width) ->
(B, rows / 2, columns / 2, 2 * width). Position: (B, rows, columns, width) -> the same shape.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from pipeline.models.common.layers import NORM_EPS, ModuleList, resample_grid

STEM_STRIDE = 4  # pixels per token of the first stage
BATCH_NORM_EPS = 1e-6  # of the published code


class ConvStem(nn.Module):
    """Convolutional patch embedding (Figure 2b): 3x3 stride 2, 3x3 stride 2, 1x1, each with BatchNorm, GELU in between."""

    def __init__(self, width: int) -> None:
        super().__init__()
        halving = [nn.Conv2d(into, out, 3, stride=2, padding=1) for into, out in ((3, width // 2), (width // 2, width))]
        self.convolutions = ModuleList([*halving, nn.Conv2d(width, width, 1)])
        self.norms = nn.ModuleList(nn.BatchNorm2d(c.out_channels, eps=BATCH_NORM_EPS) for c in self.convolutions)

    def forward(self, x: Tensor) -> Tensor:
        for i, (convolution, norm) in enumerate(zip(self.convolutions, self.norms)):
            x = norm(convolution(F.gelu(x) if i else x))  # (B, channels, rows, columns)
        return x.permute(0, 2, 3, 1)  # (B, H / 4, W / 4, width)


class LinearStem(nn.Module):
    """Linear patch embedding of 4x4 patches and LayerNorm."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.projection = nn.Conv2d(3, width, STEM_STRIDE, stride=STEM_STRIDE)
        self.norm = nn.LayerNorm(width, eps=NORM_EPS)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.projection(x).permute(0, 2, 3, 1))  # (B, H / 4, W / 4, width)


class ConvMerging(nn.Module):
    """Depthwise 3x3 convolution with stride 2 that doubles the channels, then LayerNorm (Figure 2c)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(width, 2 * width, 3, stride=2, padding=1, groups=width)
        self.norm = nn.LayerNorm(2 * width, eps=NORM_EPS)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.conv(x.permute(0, 3, 1, 2)).permute(0, 2, 3, 1))


class LinearMerging(nn.Module):
    """Patch merging of Swin (Liu et al., ICCV 2021): concatenate 2x2 tokens, LayerNorm, linear layer."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(4 * width, eps=NORM_EPS)
        self.reduction = nn.Linear(4 * width, 2 * width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        batch, rows, columns, width = x.shape
        x = x.reshape(batch, rows // 2, 2, columns // 2, 2, width).transpose(2, 3)  # (B, rows / 2, columns / 2, 2, 2, width)
        return self.reduction(self.norm(x.reshape(batch, rows // 2, columns // 2, 4 * width)))


class AbsolutePosition(nn.Module):
    """Learned absolute position embedding (Table 7, "APE")."""

    def __init__(self, side: int, width: int) -> None:
        super().__init__()
        self.embedding = nn.Parameter(torch.empty(side, side, width))
        nn.init.trunc_normal_(self.embedding, std=0.02)

    def forward(self, x: Tensor) -> Tensor:
        own, grid = (len(self.embedding), self.embedding.shape[1]), (int(x.shape[1]), int(x.shape[2]))
        return x + resample_grid(self.embedding.flatten(0, 1), own, grid).unflatten(0, grid)
