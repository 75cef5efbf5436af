"""Define LSAT's attention within groups of tokens, its block and its downsampling (Sheynin et al., 2021, Sec. 3.2)."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional as F

from pipeline.models.common.base import scale_branch
from pipeline.models.common.layers import MLP, ModuleList
from pipeline.models.common.probe import probe
from pipeline.models.lsat.shifts import PositionEmbedding
from pipeline.models.lsat.table6 import CvTBlock, SwinBlock


class GroupedAttention(nn.Module):
    """Multi-head attention within groups of tokens (Eq. 1 to 4).

    In local attention each patch with its variants is a group; in global attention all patches are one group.

    Probe: ``attention`` (B, heads, groups, L, S).

    Args:
        width: channels of a token.
        heads: attention heads.
        kv_heads: ``heads``, or 1 for multi-query attention: all query heads share one head of keys and values. The query heads
            are then folded into the sequence, so that keys and values are not copied.

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
        probe("attention", lambda: self._attention(q, k, groups, length))
        out = out.view(batch, groups, self.kv_heads, per_kv, length, self.head_dim)
        return self.proj(out.permute(0, 1, 4, 2, 3, 5).reshape(batch, groups, length, width))

    def _attention(self, q: Tensor, k: Tensor, groups: int, length: int) -> Tensor:
        """The attention weights: (B, heads, groups, L, S)."""
        weights = (q @ k.transpose(-1, -2) * self.head_dim**-0.5).softmax(-1)  # (B, groups * kv_heads, per_kv * L, S)
        return weights.reshape(len(q), groups, self.heads, length, -1).transpose(1, 2)


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
