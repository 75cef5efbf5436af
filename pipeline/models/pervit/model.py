"""PerViT-T/S/M (Min et al., "Peripheral Vision Transformer", NeurIPS 2022; layout: Supplement Table S5)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import prod
from typing import Annotated, Any, Literal

import torch
from pydantic import Field
from torch import Tensor, nn

from pipeline.config import PositiveInt
from pipeline.errors import UserError
from pipeline.models.common.base import ModelOptions, Switches, linear_drop_path, scale_branch
from pipeline.models.common.layers import MLP, NORM_EPS, AlignedLinear, ModuleList, check_sides, check_size, init_linear
from pipeline.models.common.probe import probe
from pipeline.models.common.vit import PositionEmbedding, SelfAttention, merge_heads, split_heads
from pipeline.models.pervit.phi_model import PhiModel
from pipeline.models.pervit.position import PeripheralPosition, PhiDesign
from pipeline.models.registry import register

Stride = Literal[1, 2]


class PerViTSwitches(Switches):
    """Tables 1, 2, 3, 5 and S3 of the paper and its supplement; the defaults are the published model."""

    phi_p: bool = True
    """Position-based attention Φp (Tables 1, 3). false: Φp = 1, which is plain self-attention."""
    phi_c: bool = True
    """Content-based attention Φc (Table 1 c). false: Φc = 1, without query and key projections."""
    conv_stem: bool = True
    """Convolutional stem (Tables 1, 3). false: DeiT's patch embedding, a convolution of a patch's size with its stride, 16."""
    cpe: bool = True
    """Convolutional position encoding before the first norm (Tables 1, 3). false: nothing in its place."""
    position_embedding: bool = False
    """Add a learned absolute position embedding, as in DeiT; Table 1 does not say whether its rows have one. Fixes the image size."""
    widths: tuple[PositiveInt, PositiveInt, PositiveInt, PositiveInt] | None = None
    """Channels of the four stages; null: Table S5. Rows c, f, h, i of Table 1 are widened to equal cost; the paper does not give the widths."""
    depths: tuple[PositiveInt, PositiveInt, PositiveInt, PositiveInt] | None = None
    """Blocks of the four stages; null: Table S5."""
    stem_widths: Annotated[tuple[PositiveInt, ...], Field(min_length=1)] | None = None
    """Channels of the stem's convolutions before the last, which has those of the first stage; null: Table S5, three."""
    stem_strides: tuple[Stride, ...] = (2, 2, 2, 2)
    """Strides of the stem's convolutions; their product is the side of a patch, without a stem too. [1, 2, 2, 1]: images of 32 pixels have 8 x 8 patches."""
    phi_p_distance: Literal["euclidean", "learned"] = "euclidean"
    """Table 5, Euc and Lrn. learned: distances between learned vectors, one per position, shared by the layers. Fixes the image size."""
    phi_p_neighbours: bool = True
    """Table 5, with and without N. false: Φp's projections are 1x1 instead of 3x3 over the key's neighbours."""
    phi_p_layers: Literal[1, 2] = 2
    """Table 5, with ML (2) and without (1: a single projection to the heads, then the norm)."""
    phi_p_init: Literal["peripheral", "conv", "random"] = "peripheral"
    """Table 5, top. conv: every layer is initialized like the first, local one. random: all parameters of Φp are random."""
    phi_p_frozen: bool = False
    """Table S3, fixed: the parameters of Φp are frozen at their initial values."""

    def misfits(self) -> Iterator[str]:
        if not self.phi_p and not self.phi_c:
            yield "must have phi_p or phi_c, without which attention averages the values: set one of them to true"
        for name, field in type(self).model_fields.items():
            if not self.phi_p and name.startswith("phi_p_") and getattr(self, name) != field.default:
                yield f"has {name} = {getattr(self, name)!r}, but phi_p = false removes Φp; drop one of the two"
        if self.stem_widths and not self.conv_stem:
            yield "has stem_widths, but conv_stem = false removes the convolutions that have them; drop one of the two"
        if (strides := len(self.stem_strides)) != (convolutions := len(self.stem_widths or (1, 1, 1)) + 1):
            yield f"has {strides} stem_strides for {convolutions} convolutions; give a stride for each of stem_widths and one for the last"

    @property
    def phi_design(self) -> PhiDesign | None:
        """Architecture and initialization of Φp; None without Φp."""
        return PhiDesign(self.phi_p_distance, self.phi_p_neighbours, self.phi_p_layers, self.phi_p_init) if self.phi_p else None


@dataclass(frozen=True)
class PerViTLayout:
    """One row of Supplement Table S5."""

    heads: int
    widths: tuple[int, int, int, int]  # channels of each stage
    stem_widths: tuple[int, ...]
    depths: tuple[int, int, int, int] = (2, 2, 6, 2)
    mlp_ratio: int = 4

    def with_sizes(self, switches: PerViTSwitches) -> PerViTLayout:
        """The same layout with the switches' widths and depths. Raises UserError: a width is not a multiple of the heads."""
        for width in switches.widths or ():
            if width % self.heads:
                near = max(1, round(width / self.heads)) * self.heads
                problem = f"model.switches.widths has {width}, but a width must be a multiple of the {self.heads} heads"
                raise UserError(problem, f"set it to {near}")
        widths = switches.widths or self.widths
        stem_widths = (*(switches.stem_widths or self.stem_widths[:-1]), widths[0])
        return replace(self, widths=widths, stem_widths=stem_widths, depths=switches.depths or self.depths)


class ConvStem(nn.Module):
    """Convolutional patch embedding: 3x3 convolutions with BatchNorm and ReLU, four of stride 2 unless switches say otherwise, then
    a 1x1 convolution.

    ``forward``: (B, 3, H, W) -> (B, width, H / patch, W / patch), patch being the product of the strides, in channels_last layout.
    """

    def __init__(self, widths: tuple[int, ...], strides: tuple[int, ...]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Conv2d(inputs, width, 3, stride, padding=1), nn.BatchNorm2d(width), nn.ReLU(inplace=True))
            for inputs, width, stride in zip((3, *widths), widths, strides)
        )
        self.projection = nn.Conv2d(widths[-1], widths[-1], 1)

    def forward(self, x: Tensor) -> Tensor:
        x = x.contiguous(memory_format=torch.channels_last)  # faster on GPUs and CPUs; what follows keeps the layout
        for layer in self.layers:
            x = layer(x)  # by default each halves rows and columns
        return self.projection(x)


class PeripheralAttention(SelfAttention):
    """Attention by content and position (Eq. 3).

    Normalize[exp(τ Q Kᵀ) ⊙ Φp] V equals softmax(τ Q Kᵀ + log Φp) V (:func:`~pipeline.kernels.peripheral_attention`).

    Probes: those of the base class, ``phi_c`` as in the authors' code (normalization cancels the row maximum), and ``phi_p``
    (heads, N, N), unless Φp = 1.

    ``forward``: x (B, N, width), log_phi (heads, N, N) or None for Φp = 1 -> (B, N, width).
    """

    def __init__(self, width: int, heads: int) -> None:
        super().__init__(width, heads, qkv_bias=False)

    def forward(self, x: Tensor, log_phi: Tensor | None = None) -> Tensor:
        if log_phi is not None:
            probe("phi_p", lambda: log_phi.exp())
        return super().forward(x, log_phi)


class StaticAttention(nn.Module):
    """Attention by position only (Φc = 1): Normalize[Φp] V (Table 1 c). Has no query and key projections.

    Probes: ``phi_p`` (heads, N, N) and ``attention`` (1, heads, N, N), the same for all images.

    ``forward``: x (B, N, width), log_phi (heads, N, N) -> (B, N, width).
    """

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.v = nn.Linear(width, width, bias=False)
        self.proj = nn.Linear(width, width)

    def forward(self, x: Tensor, log_phi: Tensor) -> Tensor:
        (v,) = split_heads(self.v(x), 1, self.heads)  # (B, heads, N, head_dim)
        weights = log_phi.softmax(-1)[None]  # (1, heads, N, N)
        probe("phi_p", lambda: log_phi.exp())
        probe("attention", lambda: weights)
        return self.proj(merge_heads(weights.to(v.dtype) @ v))  # (B, N, width)


class Block(nn.Module):
    """Convolutional position encoding (CPE) and peripheral attention, then an MLP that may change the width.

    As in the authors' code, the CPE (a depthwise 3x3 convolution) is inside the attention branch, before the norm, without a
    residual connection of its own; in the last block of a stage ``fc2`` changes the width and a linear layer projects the
    residual.

    ``forward``: x (B, N, width), log_phi (heads, N, N) of this layer or None for Φp = 1, grid (rows, columns) with
    N = rows * columns, branch_scales (B, 2) stochastic-depth factors of the two branches or None for 1 -> (B, N, out_width).
    """

    def __init__(self, width: int, out_width: int, layout: PerViTLayout, layer: int, switches: PerViTSwitches) -> None:
        super().__init__()
        heads, depth = layout.heads, sum(layout.depths)
        self.cpe = nn.Conv2d(width, width, 3, padding=1, groups=width) if switches.cpe else nn.Identity()
        self.norm1 = nn.LayerNorm(width, eps=NORM_EPS)
        if switches.phi_design:
            # Called by PhiModel, once per forward pass.
            self.position = PeripheralPosition(heads, layer, depth, switches.phi_design)
        self.attn = (PeripheralAttention if switches.phi_c else StaticAttention)(width, heads)
        self.norm2 = nn.LayerNorm(width, eps=NORM_EPS)
        self.mlp = MLP(width, layout.mlp_ratio * width, out_width)
        self.residual = nn.Identity() if width == out_width else AlignedLinear(width, out_width)

    def forward(self, x: Tensor, log_phi: Tensor | None, grid: tuple[int, int], branch_scales: Tensor | None) -> Tensor:
        image = x.transpose(1, 2).unflatten(2, grid)  # (B, width, rows, columns)
        position_aware = self.cpe(image).flatten(2).transpose(1, 2)  # (B, N, width)
        x = x + scale_branch(self.attn(self.norm1(position_aware), log_phi), branch_scales, 0)
        return self.residual(x) + scale_branch(self.mlp(self.norm2(x)), branch_scales, 1)


class PerViT(PhiModel):
    """Peripheral Vision Transformer.

    Args:
        options: ``image_size``: a multiple of the patch's side, 16 unless ``stem_strides`` say otherwise, and at least twice as
            much. ``forward`` takes other sizes too: Φp is computed for the grid of the image. ``activation_checkpointing``: neither of
            the stem, whose BatchNorm would update its statistics twice, nor of Φp, whose activations do not grow with the batch.

    Probes of every layer: ``phi_p``, ``phi_c`` and ``attention``, see :class:`PeripheralAttention`. Raises UserError:
    ``image_size`` does not fit the stem, or a width the heads.
    """

    reference_names = (
        ("conv_layers.conv_layers.*.*.", "stem.layers.*.*."),
        ("conv_layers.conv1x1.", "stem.projection."),
        ("rpe_proj.", "distance_scales."),
        ("blocks.*.attn.activation.conv*.", "blocks.*.position.projection*."),
        ("blocks.*.attn.activation.gn*.", "blocks.*.position.norm*."),
        ("blocks.*.attn.to_qkv.", "blocks.*.attn.qkv."),
        ("blocks.*.conv.proj.", "blocks.*.cpe."),
        ("blocks.*.res_path.", "blocks.*.residual."),
    )
    blocks: ModuleList[Block]
    switches: PerViTSwitches
    reference_switches = frozenset({"widths", "depths", "stem_widths", "stem_strides", "phi_p_init", "phi_p_frozen"})

    def __init__(self, layout: PerViTLayout, switches: PerViTSwitches | None = None, **options: Any) -> None:
        switches, settings = switches or PerViTSwitches(), ModelOptions(**options)
        layout = layout.with_sizes(switches)
        depth = sum(layout.depths)
        super().__init__(linear_drop_path(settings.drop_path, depth), settings.activation_checkpointing, switches)
        self.image_size = image_size = settings.image_size
        self.patch = prod(switches.stem_strides)
        check_sides([image_size], self.patch, 2 * self.patch)  # Φp needs two tokens along an axis
        widths = [width for width, blocks in zip(layout.widths, layout.depths) for _ in range(blocks)]
        stem = layout.stem_widths, switches.stem_strides
        self.stem = ConvStem(*stem) if switches.conv_stem else nn.Conv2d(3, widths[0], self.patch, self.patch)
        self.image_format = torch.channels_last if switches.conv_stem else torch.contiguous_format
        if switches.position_embedding:
            self.position_embedding = PositionEmbedding(image_size, extra_tokens=0, width=widths[0], patch=self.patch)
        if switches.phi_design:
            self.add_phi_inputs(layout.heads, image_size // self.patch, switches.phi_design)
        self.blocks = ModuleList(Block(widths[i], widths[min(i + 1, depth - 1)], layout, i, switches) for i in range(depth))
        self.norm = nn.LayerNorm(widths[-1], eps=NORM_EPS)
        self.head = nn.Linear(widths[-1], settings.num_classes)
        # Residual linears, stem and CPE keep PyTorch's own initialization, as in the authors' code.
        for block in self.blocks:
            block.attn.apply(init_linear)
            block.mlp.apply(init_linear)
        init_linear(self.head)
        if switches.phi_p_frozen:
            for parameter in self.phi_parameters():
                parameter.requires_grad_(False)

    def class_scores(self, images: Tensor, noise: Tensor | None = None) -> Tensor:
        """See the base class. H and W are multiples of the patch and at least two."""
        check_sides(images.shape[-2:], self.patch, 2 * self.patch, of_images=True)
        if self.switches.position_embedding:
            check_size(images, self.image_size)
        x = self._tokens(self.stem(images), noise)  # (B, N, width)
        return self.head(self.norm(x).mean(dim=1))  # (B, num_classes)

    def feature_maps(self, images: Tensor, noise: Tensor | None = None) -> list[Tensor]:
        """The tokens after the last block, normalized, one map of the patch's stride: all four stages have one resolution.

        Φp is computed for the grid of the images: its coordinates go from -1 to 1 on each axis whatever the number of tokens, so
        that a head sees the same part of a larger image, not the same number of tokens. H and W are multiples of the patch, at
        least two; the switch ``phi_p_distance=learned`` allows no other grid than that of ``image_size``.
        """
        check_sides(images.shape[-2:], self.patch, 2 * self.patch, of_images=True)
        x = self._tokens(self.stem(images), noise)  # (B, N, width)
        grid = (images.shape[-2] // self.patch, images.shape[-1] // self.patch)
        return [self.normed_map(x.unflatten(1, grid), 0)]

    def _tokens(self, x: Tensor, noise: Tensor | None) -> Tensor:
        """The stem's result (B, width, rows, columns) -> (B, N, width of the last stage) after the last block."""
        grid = (int(x.shape[2]), int(x.shape[3]))  # int: under tracing the sizes are tensors
        x = x.flatten(2).transpose(1, 2)  # (B, N, width)
        if self.switches.position_embedding:
            x = self.position_embedding(x, grid)
        for block, scales, log_phi in zip(self.blocks, self.block_scales(x.shape[0], noise), self.log_phi(grid)):
            x = self.run_block(block, x, log_phi, grid, scales)
        return x

    def no_weight_decay(self) -> set[str]:  # DeiT's rule
        return super().no_weight_decay() | {"position_embedding.weight"}


_TINY = PerViTLayout(4, (128, 192, 224, 280), (48, 64, 96, 128))
# The supplement says 262 for the stem's last width of the Small; the published code has 272, the width of the first stage.
_SMALL = PerViTLayout(8, (272, 320, 368, 464), (64, 128, 192, 272))
_MEDIUM = PerViTLayout(12, (312, 468, 540, 684), (64, 192, 256, 312))
register(
    PerViT,
    PerViTSwitches,
    "Peripheral Vision Transformer (NeurIPS 2022), Supplement Table S5",
    pervit_t=(_TINY, "PerViT Tiny, 4 heads", 7.6, 1.6, 78.8),
    pervit_s=(_SMALL, "PerViT Small, 8 heads", 21.3, 4.4, 82.1),
    pervit_m=(_MEDIUM, "PerViT Medium, 12 heads", 43.7, 9.0, 82.9),
)
