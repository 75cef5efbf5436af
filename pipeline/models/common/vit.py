"""Share the plain vision transformer (Dosovitskiy et al., ICLR 2021) in DeiT's form between DeiT, DeiT III and ConViT."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from pipeline.kernels.chunked import attention_in_chunks, suits_chunks
from pipeline.kernels.peripheral import packed_attention, uses_triton
from pipeline.models.common.base import ModelOptions, Switches, VisionModel, scale_branch
from pipeline.models.common.layers import (
    MLP,
    NORM_EPS,
    PATCH,
    HeadLinear,
    as_written,
    check_sides,
    check_size,
    init_linear,
    resample_grid,
)
from pipeline.models.common.probe import probe

# (authors' name, our name), see VisionModel.reference_names.
REFERENCE_NAMES = (
    ("cls_token", "class_token"),
    ("pos_embed", "position_embedding.weight"),
    ("patch_embed.proj.", "patch_embedding."),
)


@dataclass(frozen=True)
class ViTLayout:
    """Size of a plain ViT: all blocks have the same width."""

    heads: int
    width: int
    depth: int = 12
    mlp_ratio: int = 4


class PatchEmbedding(nn.Conv2d):
    """Linear patch embedding: a 16x16 convolution with stride 16.

    ``forward``: (B, 3, H, W) -> (B, N, width), N = (H / 16) * (W / 16) in row-major order.
    """

    def __init__(self, width: int) -> None:
        super().__init__(3, width, PATCH, stride=PATCH)  # keeps PyTorch's own initialization, as in DeiT's code

    def forward(self, images: Tensor) -> Tensor:
        return super().forward(images).flatten(2).transpose(1, 2)  # (B, N, width)


class PositionEmbedding(nn.Module):
    """Learned absolute position embedding, added to the tokens; resampled to grids other than that of ``image_size``.

    Args:
        extra_tokens: tokens before the patches (class token) that have an embedding too.
        masked_at_test: add nothing in eval mode (ConViT, Table 5).

    ``forward``: x (B, N, width), grid (rows, columns) of its patches -> (B, N, width).
    """

    def __init__(
        self, image_size: int, extra_tokens: int, width: int, masked_at_test: bool = False, patch: int = PATCH
    ) -> None:
        super().__init__()
        self.grid = patch_grid(image_size, image_size, patch)
        self.extra_tokens, self.masked_at_test = extra_tokens, masked_at_test
        self.weight = nn.Parameter(torch.empty(1, self.grid[0] * self.grid[1] + extra_tokens, width))
        nn.init.trunc_normal_(self.weight, std=0.02)

    def forward(self, x: Tensor, grid: tuple[int, int]) -> Tensor:
        if self.masked_at_test and not self.training:
            return x
        return x + resample_grid(self.weight, self.grid, grid, self.extra_tokens)


class SelfAttention(nn.Module):
    """Multi-head self-attention, optionally with a bias on the scores.

    Probes: ``phi_c`` (B, heads, N, N), exp(q kᵀ / sqrt(head_dim) - row maximum) without the bias; ``attention`` (B, heads, N, N).

    ``forward``: x (B, N, width), bias (heads, N, N) or None -> (B, N, width).
    """

    def __init__(self, width: int, heads: int, qkv_bias: bool = True) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = HeadLinear(width, 3 * width, bias=qkv_bias)
        self.proj = HeadLinear(width, width, axis=1)

    def forward(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        head_dim = self.proj.in_features // self.heads
        qkv = self.qkv(x, head_dim)  # (B, N, 3 * heads * head_dim), or more on a GPU: HeadLinear
        q, k = (part[..., :head_dim] for part in split_heads(qkv, 3, self.heads)[:2])  # (B, heads, N, head_dim) each
        probe("phi_c", lambda: content_attention(q, k))
        probe("attention", lambda: attention_weights(q, k, bias))
        return self.proj(merged_attention(qkv, self.heads, bias, head_dim), head_dim)


class Block(nn.Module):
    """Pre-norm transformer block: attention and MLP, each with a residual connection.

    ``forward``: x (B, N, width), branch_scales (B, 2) stochastic-depth factors of the two branches or None for 1, position, the
    second argument of ``attention``, or None -> (B, N, width).
    """

    def __init__(self, attention: nn.Module, layout: ViTLayout) -> None:
        super().__init__()
        width = layout.width
        self.norm1 = nn.LayerNorm(width, eps=NORM_EPS)
        self.attn = attention
        self.norm2 = nn.LayerNorm(width, eps=NORM_EPS)
        self.mlp = MLP(width, layout.mlp_ratio * width, width)
        self.apply(init_linear)

    def forward(self, x: Tensor, branch_scales: Tensor | None, position: Any = None) -> Tensor:
        x = x + scale_branch(self.attn(self.norm1(x), position), branch_scales, 0)
        return x + scale_branch(self.mlp(self.norm2(x)), branch_scales, 1)


def split_heads(x: Tensor, parts: int, heads: int) -> tuple[Tensor, ...]:
    """(B, N, parts * width) -> ``parts`` tensors (B, heads, N, width / heads)."""
    batch, tokens, _ = x.shape
    split = x.view(batch, tokens, parts, heads, -1).unbind(2)  # the gradients of the parts are put together with one copy
    return tuple(part.transpose(1, 2) for part in split)


def merge_heads(x: Tensor) -> Tensor:
    """(B, heads, N, head_dim) -> (B, N, heads * head_dim)."""
    return x.transpose(1, 2).flatten(2)


def merged_attention(qkv: Tensor, heads: int, bias: Tensor | None, head_dim: int | None = None) -> Tensor:
    """softmax(q kᵀ / sqrt(head_dim) + bias) v of all heads, in the form that suits device and arguments: qkv (B, N, 3 * width),
    bias (heads, N, N), added to the scores of every image, or None -> (B, N, width). ``head_dim``: of its heads, which are wider
    and zero from there on (:class:`HeadLinear`)."""
    packed = qkv.unflatten(2, (3, heads, -1))  # (B, N, 3, heads, width / heads)
    wider = head_dim is not None and head_dim < packed.shape[-1]
    if bias is not None and not wider and suits_chunks(qkv, bias) and not uses_triton(packed):
        return attention_in_chunks(qkv, heads, bias)
    return packed_attention(packed, bias, head_dim).flatten(2)


def attention_weights(q: Tensor, k: Tensor, bias: Tensor | None = None) -> Tensor:
    """softmax of :func:`content_scores` + bias (heads, N, N), which fused attention does not materialize: (B, heads, N, N)."""
    scores = content_scores(q, k)
    return (scores if bias is None else scores + bias).softmax(-1)


def content_scores(q: Tensor, k: Tensor) -> Tensor:
    """q kᵀ / sqrt(head_dim): (B, heads, N, head_dim) each -> (B, heads, N, N), at least float32; for probes."""
    with as_written(q):
        dtype = torch.promote_types(q.dtype, torch.float32)
        return q.to(dtype) @ k.to(dtype).transpose(-1, -2) * q.shape[-1] ** -0.5


def content_attention(q: Tensor, k: Tensor) -> Tensor:
    """exp(scores - row maximum) of :func:`content_scores`, without overflow: (B, heads, N, N); for probes."""
    scores = content_scores(q, k)
    return (scores - scores.amax(-1, keepdim=True)).exp()


def patch_grid(height: int, width: int, patch: int = PATCH) -> tuple[int, int]:
    """(rows, columns) of the patch grid of an image of ``height`` x ``width`` pixels, positive multiples of the patch size."""
    check_sides((height, width), patch)
    return int(height) // patch, int(width) // patch  # int: under tracing the sizes are tensors, which cannot be cache keys


class ClassTokenModel(VisionModel):
    """A plain ViT whose class token the head reads. A subclass creates its blocks, calls :meth:`add_classifier` last, and runs the
    blocks in :meth:`tokens`."""

    image_format = torch.contiguous_format

    def __init__(
        self,
        layout: ViTLayout,
        switches: Switches,
        settings: ModelOptions,
        drop_path_rates: list[float],
        position_embedding: PositionEmbedding | None,
    ) -> None:
        super().__init__(drop_path_rates, settings.activation_checkpointing, switches)
        self.image_size = settings.image_size
        self.position_embedding = position_embedding
        self.patch_embedding = PatchEmbedding(layout.width)
        self.class_token = nn.Parameter(torch.empty(1, 1, layout.width))

    def add_classifier(self, num_classes: int) -> None:
        """Create ``norm`` and ``head``, and draw the initial values of class token and head."""
        width = self.class_token.shape[-1]
        self.norm = nn.LayerNorm(width, eps=NORM_EPS)
        self.head = nn.Linear(width, num_classes)
        nn.init.trunc_normal_(self.class_token, std=0.02)
        init_linear(self.head)

    def with_class_token(self, x: Tensor) -> Tensor:
        """(B, N, width) -> (B, N + 1, width), class token first."""
        return torch.cat([self.class_token.expand(x.shape[0], -1, -1), x], dim=1)

    def no_weight_decay(self) -> set[str]:
        return super().no_weight_decay() | {"class_token", "position_embedding.weight"}

    def tokens(self, images: Tensor, noise: Tensor | None) -> Tensor:
        """(B, 3, H, W) -> (B, N + 1, width) after the last block, class token first."""
        raise NotImplementedError

    def class_scores(self, images: Tensor, noise: Tensor | None = None) -> Tensor:
        """See the base class. The size is ``image_size``; any multiples of 16 where no position embedding fixes it."""
        if self.position_embedding is not None:
            check_size(images, self.image_size)
        return self.head(self.norm(self.tokens(images, noise)[:, 0]))

    def feature_maps(self, images: Tensor, noise: Tensor | None = None) -> list[Tensor]:
        """The patches after the last block, normalized, one map of stride 16. H and W are multiples of 16."""
        patches = self.tokens(images, noise)[:, 1:]  # (B, N, width)
        return [self.normed_map(patches.unflatten(1, patch_grid(*images.shape[-2:])), 0)]
