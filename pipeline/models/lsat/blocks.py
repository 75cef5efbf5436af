"""LSAT's block of attention and MLP, and its downsampling (Sheynin et al., 2021, Sec. 3.2)."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional as F

from pipeline.models.common.base import scale_branch
from pipeline.models.common.layers import MLP
from pipeline.models.common.module_list import ModuleList
from pipeline.models.lsat.cvt import CvTBlock
from pipeline.models.lsat.grouped_attention import GroupedAttention
from pipeline.models.lsat.shifts import PositionEmbedding
from pipeline.models.lsat.swin import SwinBlock

LAYER_NORM_EPS = 1e-6
MLP_RATIO = 4


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
        self.norm = nn.LayerNorm(out_width, eps=LAYER_NORM_EPS)

    def forward(self, x: Tensor, grid: tuple[int, int]) -> Tensor:
        image = x.squeeze(2).transpose(1, 2).unflatten(2, grid)  # (B, width, rows, columns)
        image = self.norm(self.conv(image).permute(0, 2, 3, 1)).permute(0, 3, 1, 2)
        image = F.max_pool2d(image, 3, stride=2, padding=1)  # (B, out_width, rows', columns')
        return image.flatten(2).transpose(1, 2).unsqueeze(2)  # (B, N', 1, out_width)


AnyBlock = Block | SwinBlock | CvTBlock


class Level(nn.Module):
    """The modules of one level: position embedding, blocks and their shared norms; :class:`LSAT` runs them."""

    def __init__(self, position: PositionEmbedding, blocks: list[AnyBlock], width: int) -> None:
        super().__init__()
        self.position = position
        self.norm1 = nn.LayerNorm(width, eps=LAYER_NORM_EPS)
        self.blocks = ModuleList(blocks)
        self.norm2 = nn.LayerNorm(width, eps=LAYER_NORM_EPS)
