"""LSAT-T/S at 224 and LSAT-T/S/B at 32 pixels (Sheynin et al., "Locally Shifted Attention With Early Global
Integration", 2021; layouts: Table 2).

Every patch is embedded T times, each time from a slightly shifted image. In the first block each patch attends to its own T
variants (local attention); the others are ordinary transformer blocks over the patches (global attention), on levels of
decreasing resolution. Tokens have shape (B, N, T, width) throughout; T = 1 after the local block, which pools the variants.

Table 6 (Sec. 4.1) has neither published code nor parameter counts. Variant I replaces the local block as a whole by one of Swin's,
without shifted windows, which only every second block of Swin has. Variant II changes in LSAT's block what the paper names,
embedding and projection, and keeps norms, MLP and position embedding. In both a patch has no shifted variants, which neither block
takes, and the global blocks are LSAT's.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

from torch import Tensor, nn

from pipeline.config import PositiveInt
from pipeline.errors import UserError
from pipeline.models.common.base import ModelOptions, Switches, VisionModel
from pipeline.models.common.layers import NORM_EPS, ModuleList, check_sides, check_size, init_linear
from pipeline.models.lsat.blocks import (
    SHIFTS_32,
    SHIFTS_224,
    Block,
    Downsampling,
    PositionEmbedding,
    ShiftEmbedding,
    ShiftSet,
    translate,
)
from pipeline.models.lsat.table6 import ConvolutionalProjection, CvTBlock, SwinBlock, TokenEmbedding, overlapping
from pipeline.models.registry import register

AnyBlock = Block | SwinBlock | CvTBlock


class LSATSwitches(Switches):
    """Ablations of Tables 5 and 6, and the paper's variant where the published code differs."""

    shifts: Literal["all", "axes", "none"] = "all"
    """Table 5, #Shifting. all: the paper's set (18 at 32 pixels, 10 at 224). axes: those along one axis (9 and 7; variant
    B). none: the image itself only, and the local block attends globally (variant A, inferred from its 6.8 M parameters)."""
    shift_by: Literal["convolutions", "translation"] = "convolutions"
    """Table 5, Conv. Variations. convolutions: each variant has its own convolution, of the circularly shifted image.
    translation: one convolution for all images, which are translated with reflection padding (C, D)."""
    position: Literal["per_variant", "shared"] = "per_variant"
    """Table 5, Pos. Embed. A learned embedding for each patch and variant, or one per patch for all its variants (C, E)."""
    kv_heads: Literal["shared", "per_head"] | None = None
    """Eq. 2 has keys and values per head; in the published code at 32 pixels all query heads share one key-value head.
    null: as published (shared at 32 pixels, per_head at 224)."""
    heads: PositiveInt | None = None
    """Attention heads on every level; null: as published. Table 2 has 3 for lsat_t_32, the published script 4."""
    local: Literal["lsa", "swin", "swin_pair", "cvt"] = "lsa"
    """Table 6. lsa: the paper's local block over shifted variants. Of the unshifted image alone: swin: one block of Swin (variant
    I); swin_pair: two, the second with shifted windows; cvt: CvT's token embedding and convolutional projection (II)."""

    def misfits(self) -> Iterator[str]:
        if self.local != "lsa" and (self.shifts, self.shift_by, self.position) != ("all", "convolutions", "per_variant"):
            yield f"must leave shifts, shift_by and position alone with local {self.local!r}, which has no variants"


@dataclass(frozen=True)
class LSATLayout:
    """A column of Table 2: width, heads and depth per level; the first level's depth includes the local block."""

    widths: tuple[int, ...]
    heads: tuple[int, ...]
    depths: tuple[int, ...]
    kernel: int  # of the patch embedding, as stride and padding
    stride: int
    padding: int
    shifts: ShiftSet
    kv_heads: Literal["shared", "per_head"]


class Level(nn.Module):
    """The modules of one level: position embedding, blocks and their shared norms."""

    def __init__(self, position: PositionEmbedding, blocks: list[AnyBlock], width: int) -> None:
        super().__init__()
        self.position = position
        self.norm1 = nn.LayerNorm(width, eps=NORM_EPS)
        self.blocks = ModuleList(blocks)
        self.norm2 = nn.LayerNorm(width, eps=NORM_EPS)


class LSAT(VisionModel):
    """Locally shifted attention transformer. Raises UserError: ``image_size`` or ``switches.heads`` does not suit the layout.

    Args:
        options: ``image_size``: a multiple of the patch embedding's stride, large enough for a token on the last level.
            ``forward`` takes no other size, because of the position embeddings, except in the feature form. ``drop_path``: of
            every branch (0.1 in the published code).
    """

    switches: LSATSwitches
    reference_names = (
        ("to_patch_embedding.", "embedding."),
        ("layers.0.0.layers.0.0.Wq_even.", "levels.0.blocks.0.attention.query."),  # the local block
        ("layers.0.0.layers.0.0.Wkv_even.", "levels.0.blocks.0.attention.key_value."),
        ("layers.*.0.layers.*.0.Wq_odd.", "levels.*.blocks.*.attention.query."),
        ("layers.*.0.layers.*.0.Wkv_odd.", "levels.*.blocks.*.attention.key_value."),
        ("layers.*.0.layers.*.0.proj.", "levels.*.blocks.*.attention.proj."),
        ("layers.*.0.layers.*.1.", "levels.*.blocks.*.mlp."),
        ("layers.*.0.pos_emb", "levels.*.position.table"),
        ("layers.*.0.norm*.", "levels.*.norm*."),
        ("layers.*.1.", "downsamplings.*."),
        ("mlp_head.", "head."),
    )
    reference_switches = frozenset({"heads"})

    def __init__(self, layout: LSATLayout, switches: LSATSwitches | None = None, **options: Any) -> None:
        switches, settings = switches or LSATSwitches(), ModelOptions(**options)
        if switches.kv_heads == layout.kv_heads:  # the published setting, stated explicitly
            switches = switches.model_copy(update={"kv_heads": None})
        depth = sum(layout.depths) + (switches.local == "swin_pair")
        super().__init__([settings.drop_path] * 2 * depth, settings.activation_checkpointing, switches)
        self.image_size, self.stride = settings.image_size, layout.stride
        self.least_side = layout.stride * 2 ** (len(layout.widths) - 1)  # a token on the coarsest level
        check_sides([self.image_size], layout.stride, self.least_side)
        self.embedding = _build_embedding(layout, switches)
        variants = len(self.embedding.shift_set.shifts) if isinstance(self.embedding, ShiftEmbedding) else 1
        self.projection = ConvolutionalProjection(layout.widths[0]) if switches.local == "cvt" else None
        self.levels = ModuleList(_make_level(layout, i, self.image_size, variants, switches) for i in range(len(layout.widths)))
        self.downsamplings = nn.ModuleList(map(Downsampling, layout.widths, layout.widths[1:]))
        self.norm = nn.LayerNorm(layout.widths[-1], eps=NORM_EPS)
        self.head = nn.Linear(layout.widths[-1], settings.num_classes)
        self.apply(partial(init_linear, convolutions=True))

    def layer_of(self, name: str) -> int:
        """See the base class. A downsampling belongs to the level that it leads to; CvT's projection is part of the local block."""
        list_name, _, rest = name.partition(".")
        if list_name == "downsamplings":
            return super().layer_of(f"levels.{1 + int(rest.partition('.')[0])}.")
        return 1 if list_name == "projection" else super().layer_of(name)

    def class_scores(self, images: Tensor, noise: Tensor | None = None) -> Tensor:
        """See the base class. The size is ``image_size``."""
        check_size(images, self.image_size)
        return self.head(self.norm(self._run_levels(images, noise)[-1].squeeze(2)).mean(dim=1))  # (B, num_classes)

    def feature_layout(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        levels = range(len(self.levels))
        return tuple(self.stride * 2**i for i in levels), tuple(level.norm1.normalized_shape[0] for level in self.levels)

    def feature_maps(self, images: Tensor, noise: Tensor | None = None) -> list[Tensor]:
        """The patches of each level i after its last block, each normalized: stride ``stride * 2^i``, sides rounded up. H and W are
        as ``image_size`` may be, not necessarily equal; the position embeddings are resampled."""
        check_sides(images.shape[-2:], self.stride, self.least_side, of_images=True)
        maps = self._run_levels(images, noise)
        return [self.normed_map(x.squeeze(2).unflatten(1, self.grid(i, images)), i) for i, x in enumerate(maps)]

    def _run_levels(self, images: Tensor, noise: Tensor | None) -> list[Tensor]:
        """(B, 3, H, W) -> (B, N, 1, width) of each level."""
        scales = self.block_scales(images.shape[0], noise)  # (B, 2) each, or None
        x = self.embedding(images)  # (B, N, T, width)
        outputs: list[Tensor] = []
        for i, level in enumerate(self.levels):
            grid = self.grid(i, images)
            if i > 0:
                x = self.downsamplings[i - 1](x, self.grid(i - 1, images))  # (B, N of this level, 1, width of this level)
            x = level.position(x, grid)
            for block in level.blocks:
                x = self._run(block, x, level, grid, next(scales))  # (B, N, 1, width)
            outputs.append(x)
        return outputs

    def grid(self, level: int, images: Tensor) -> tuple[int, int]:
        """(rows, columns) of the patch grid that images (B, 3, H, W) have on a level."""
        height, width = images.shape[-2:]
        return grid_side(int(height) // self.stride, level), grid_side(int(width) // self.stride, level)

    def _run(self, block: AnyBlock, x: Tensor, level: Level, grid: tuple[int, int], branch_scales: Tensor | None) -> Tensor:
        if isinstance(block, SwinBlock):
            return self.run_block(block, x, grid, branch_scales)
        if isinstance(block, CvTBlock):
            assert self.projection is not None  # it comes with the block
            return self.run_block(block, x, self.projection(level.norm1(x), grid), level.norm2, branch_scales)
        return self.run_block(block, x, (level.norm1, level.norm2), branch_scales)


def _build_embedding(layout: LSATLayout, switches: LSATSwitches) -> ShiftEmbedding | TokenEmbedding:
    width, shape = layout.widths[0], (layout.kernel, layout.stride, layout.padding)
    if switches.local == "cvt":
        return TokenEmbedding(nn.Conv2d(3, width, *overlapping(*shape)))
    shifts, shift_image = layout.shifts
    if switches.local != "lsa" or switches.shifts == "none":
        shifts = shifts[:1]
    elif switches.shifts == "axes":
        shifts = tuple(shift for shift in shifts if 0 in shift)
    convolutions = len(shifts)
    if switches.shift_by == "translation":
        shift_image, convolutions = translate, 1
    return ShiftEmbedding(ShiftSet(shifts, shift_image), [nn.Conv2d(3, width, *shape) for _ in range(convolutions)])


def _make_level(layout: LSATLayout, level: int, image_size: int, variants: int, switches: LSATSwitches) -> Level:
    width, heads = layout.widths[level], switches.heads or layout.heads[level]
    if width % heads:
        problem = f"model.switches.heads must divide the width of level {level + 1}, {width}, got {heads}"
        raise UserError(problem, f"set it to {max(n for n in range(1, heads) if width % n == 0)}")
    kv_heads = heads if (switches.kv_heads or layout.kv_heads) == "per_head" else 1
    local, side = level == 0 and variants > 1, image_size // layout.stride
    tokens = grid_side(side, level) ** 2
    shape = (variants, tokens, width) if local and switches.position == "per_variant" else (tokens, width)
    blocks: list[AnyBlock] = [Block(width, heads, kv_heads, local and i == 0) for i in range(layout.depths[level])]
    if level == 0 and switches.local == "cvt":
        blocks[:1] = [CvTBlock(width, heads)]
    elif level == 0 and switches.local != "lsa":
        blocks[:1] = [SwinBlock(width, heads, side, shift) for shift in (False, True)[: 1 + (switches.local == "swin_pair")]]
    return Level(PositionEmbedding(*shape), blocks, width)


def grid_side(side: int, halvings: int) -> int:
    """Side of the token grid after ``halvings`` of a grid of side ``side``."""
    return -(-side // 2**halvings)  # rounds up, like the padded max pooling


def _at_32(width: int, heads: int, depths: tuple[int, ...]) -> LSATLayout:
    return LSATLayout((width,) * 4, (heads,) * 4, depths, 3, 1, 1, SHIFTS_32, kv_heads="shared")


# The paper's GMACs include the matrix products of attention but not the shift embeddings (0.48 of 3.63 and 0.10 of 7.72 GMACs).
_PAPER = "Locally Shifted Attention With Early Global Integration (2021)"
# Table 2 says kernel 7 without padding for the Tiny; the published code's kernel 9 gives the 9.9 M parameters of Table 4.
_TINY = LSATLayout((192,) * 4, (4,) * 4, (2, 4, 4, 4), 9, 7, 1, SHIFTS_224, kv_heads="per_head")
_SMALL = LSATLayout((64, 192, 384), (2, 6, 12), (2, 2, 10), 4, 4, 0, SHIFTS_224, kv_heads="per_head")
register(
    LSAT,
    LSATSwitches,
    f"{_PAPER}, Tables 2 and 4",
    lsat_t_224=(_TINY, "LSAT Tiny, 224 pixels, 10 shifts", 9.9, 3.1, 76.0, 797.2),
    lsat_s_224=(_SMALL, "LSAT Small, 224 pixels, 10 shifts", 22.0, 7.6, 82.2, 298.9),
)
# The paper's parameter counts at 32 pixels are for other head layouts: see LSATSwitches.kv_heads and heads.
register(
    LSAT,
    LSATSwitches,
    f"{_PAPER}, Tables 2 and 3 (CIFAR-10)",
    data=(32, 10),
    lsat_t_32=(_at_32(192, 4, (2, 4, 4, 4)), "LSAT Tiny, 32 pixels, 18 shifts", 10.2, None, 97.0, 1700.2),
    lsat_s_32=(_at_32(384, 6, (2, 4, 4, 4)), "LSAT Small, 32 pixels, 18 shifts", 36.2, None, 97.64, 807.6),
    lsat_b_32=(_at_32(768, 12, (3, 3, 3, 3)), "LSAT Base, 32 pixels, 18 shifts", 115.8, None, 97.75, 276.8),
)
