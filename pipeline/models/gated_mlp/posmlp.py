"""PosMLP-T/S/B (Wang et al., "Parameterization of Cross-Token Relations with Relative Positional Encoding for Vision MLP",
ACM MM 2022; layout: Table 11).

A four-stage pyramid of gated blocks on windows. Probes of every block: ``position`` and, with ``mixing: ggqpe``,
``covariance`` (:mod:`pipeline.models.gated_mlp.token_mixing`). Token grids are channels-last. Stems: (B, 3, H, W) -> (B, H / 4, W / 4, width).
Merging: (B, rows, columns, width) -> (B, rows / 2, columns / 2, 2 * width). Position: (B, rows, columns, width) -> the same shape.
"""

from functools import partial
from typing import Annotated, Any, Literal

import torch
from pydantic import Field, PositiveInt
from torch import Tensor, nn
from torch.nn import functional as F

from pipeline.errors import UserError
from pipeline.models.common.base import ModelOptions, VisionModel, dropout_factors, linear_drop_path
from pipeline.models.common.layers import NORM_EPS, ModuleList, check_sides, check_size, init_linear, resample_grid
from pipeline.models.common.windows import Tiling, relative_index
from pipeline.models.gated_mlp.gating import GROUPED, POSMLP_CODE, GatedBlock, GatingSwitches, run_in_windows
from pipeline.models.gated_mlp.token_mixing import GaussianMap, quadratic_terms
from pipeline.models.registry import register

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


STRIDE = 32  # of the last stage
DEPTHS = (2, 2, 18, 2)  # blocks per stage, Table 11
RATIOS = (4, 4, 4, 2)  # γ of Table 11
GROUPS = (8, 16, 32, 64)  # s of Table 4

Dropout = Annotated[float, Field(ge=0, lt=1)]
PerStage = tuple[PositiveInt, PositiveInt, PositiveInt, PositiveInt]


class PosMLPSwitches(GatingSwitches):
    """Ablations of PosMLP's Tables 1, 3 to 7, 10 and Figure 3."""

    groups: PerStage | None = None
    """Table 4: channel groups of glrpe and ggqpe in each stage. null: 8, 16, 32, 64."""
    windows: PerStage | None = None
    """Table 5: side of the windows in each stage. null: image_size / 16, and image_size / 32 in the last; so 14, 14, 14, 7."""
    shift_windows: bool = False
    """Section 5.5: every second block shifts its windows by half a window (off for classification)."""
    absolute_position: bool = False
    """Table 7: add a learned absolute position embedding to the patch embedding."""
    patch_embedding: Literal["convolution", "linear"] = "convolution"
    """Table 10: three convolutions, or one linear layer on 4x4 patches."""
    patch_merging: Literal["convolution", "linear"] = "convolution"
    """Table 10: between stages a depthwise 3x3 convolution, or a linear layer on 2x2 tokens."""
    block_dropout: Dropout = 0.02333
    """Dropout rate on every block's residual branch; default of the published configurations."""
    head_dropout: Dropout = 0.02333
    """Dropout rate before the classifier; default of the published configurations."""


class Stage(nn.Module):
    """The modules of one stage; :class:`PosMLP` runs them."""

    def __init__(self, merging: nn.Module, blocks: list[GatedBlock], window: int) -> None:
        super().__init__()
        self.merging = merging
        self.blocks = ModuleList(blocks)
        self.window = window


# (authors' name, our name), see VisionModel.reference_names.
_NAMES = (
    ("patch_embed.projs.", "stem.convolutions."),
    ("patch_embed.norms.", "stem.norms."),
    ("levels.*.pool.", "stages.*.merging."),
    ("levels.*.encoder.*.proj_c_e.", "stages.*.blocks.*.fc1."),
    ("levels.*.encoder.*.proj_c_s.", "stages.*.blocks.*.fc2."),
    ("levels.*.encoder.*.norm.", "stages.*.blocks.*.norm."),
)
_SGU_NAMES = (
    ("levels.*.encoder.*.gate_unit.norm_list.0.", "stages.*.blocks.*.gate.norm."),
    ("levels.*.encoder.*.gate_unit.proj_list.0.weight", "stages.*.blocks.*.gate.mixing.weight"),
    ("levels.*.encoder.*.gate_unit.proj_list.0.bias", "stages.*.blocks.*.gate.bias"),
)
_POSGU_NAMES = (
    ("levels.*.encoder.*.gate_unit.pos.token_proj_n_bias", "stages.*.blocks.*.gate.bias"),
    ("levels.*.encoder.*.gate_unit.pos.attention_centers", "stages.*.blocks.*.gate.mixing.centers"),
    ("levels.*.encoder.*.gate_unit.pos.attention_spreads", "stages.*.blocks.*.gate.mixing.spreads"),
    ("levels.*.encoder.*.gate_unit.pos.window_relative_position_bias_table", "stages.*.blocks.*.gate.mixing.table"),
)


class PosMLP(VisionModel):
    """Vision MLP with positional spatial gating units. Raises UserError: ``image_size``, windows or groups do not fit.

    Args:
        width: channels of the first stage; each further stage doubles them.
        options: ``image_size``: a multiple of 32. ``forward`` takes other sizes too if the windows tile their tokens: with the
            default windows, multiples of ``image_size``. The feature form takes any multiple of 4. ``activation_checkpointing``:
            not of the stem, whose BatchNorm would update its statistics twice.
    """

    image_format = torch.contiguous_format
    switches: PosMLPSwitches
    reference_switches = frozenset("mixing covariance norm groups windows shift_windows block_dropout head_dropout".split())

    def __init__(self, width: int, switches: PosMLPSwitches | None = None, **options: Any) -> None:
        switches, settings = switches or PosMLPSwitches(), ModelOptions(**options)
        rates = linear_drop_path(settings.drop_path, sum(DEPTHS), branches=1)
        super().__init__(rates, settings.activation_checkpointing, switches)
        self.reference_names = (*(_SGU_NAMES if switches.mixing == "sgu" else _POSGU_NAMES), *_NAMES)
        self.image_size = image_size = settings.image_size
        check_sides([image_size], STRIDE)
        windows = switches.windows or (image_size // 16,) * 3 + (image_size // 32,)
        check_windows(windows, image_size, image_size)
        groups = (switches.groups or GROUPS) if switches.mixing in GROUPED else (1,) * len(DEPTHS)

        self.stem = (ConvStem if switches.patch_embedding == "convolution" else LinearStem)(width)
        side = image_size // STEM_STRIDE
        self.absolute_position = AbsolutePosition(side, width) if switches.absolute_position else nn.Identity()
        merging = ConvMerging if switches.patch_merging == "convolution" else LinearMerging
        self.stages: ModuleList[Stage] = ModuleList([])
        for i, (depth, ratio) in enumerate(zip(DEPTHS, RATIOS)):
            before, channels = merging(width * 2 ** (i - 1)) if i else nn.Identity(), width * 2**i
            block = partial(GatedBlock, channels, ratio, windows[i], groups[i], switches, POSMLP_CODE, switches.block_dropout)
            self.stages.append(Stage(before, [block() for _ in range(depth)], windows[i]))
        self.norm = nn.LayerNorm(channels, eps=NORM_EPS)
        self.head = nn.Linear(channels, settings.num_classes)
        self.apply(partial(init_linear, convolutions=True))

    def reference_tables(self) -> dict[str, Tensor]:
        """Per block: the quadratic terms of the relative positions (ggqpe), or the table index of each token pair (lrpe)."""
        tables = {}
        for i, stage in enumerate(self.stages):
            for j, block in enumerate(stage.blocks):
                unit, mixing = f"levels.{i}.encoder.{j}.gate_unit.pos.", block.gate.mixing
                # Cloned: the cached results are shared between blocks, and safetensors rejects shared memory.
                if isinstance(mixing, GaussianMap):
                    terms = quadratic_terms(stage.window, mixing.spreads.device, mixing.spreads.dtype)
                    tables[f"{unit}rel_indices"] = terms.clone()
                elif mixing.table is not None:
                    index = relative_index(stage.window, mixing.table.device)
                    tables[f"{unit}window_relative_position_index"] = index.clone()
        return tables

    def unpublished_switch(self) -> str | None:
        """See the base class. The published code norms only SGU, has other shapes for LRPE-M and another formula for αI."""
        switches = self.switches
        if switches.covariance == "isotropic":
            return "covariance"
        if switches.mixing == "lrpe_m" or switches.normalises != (switches.mixing == "sgu"):
            return "mixing" if switches.norm is None else "norm"
        return super().unpublished_switch()

    @property
    def noise_per_sample(self) -> int:
        """Uniform numbers per image: one per residual branch, per block with dropout, and per channel of the head's dropout."""
        return sum(self._noise_counts())

    def _noise_counts(self) -> tuple[int, int, int]:
        blocks = sum(DEPTHS) if self.switches.block_dropout else 0
        channels = self.head.in_features if self.switches.head_dropout and not self.strides else 0
        return super().noise_per_sample, blocks, channels

    def class_scores(self, images: Tensor, noise: Tensor | None = None) -> Tensor:
        """See the base class. H and W are multiples of 32 whose tokens the windows tile."""
        check_windows([stage.window for stage in self.stages], *images.shape[-2:])
        if self.switches.absolute_position:
            check_size(images, self.image_size)
        outputs, for_head = self._run_stages(self.stem(images), noise, self.switches.shift_windows)
        features = self.norm(outputs[-1]).mean(dim=(1, 2))  # (B, 8 * width)
        return self.head(self._dropout(features, for_head))

    def _dropout(self, features: Tensor, noise: Tensor) -> Tensor:
        """Dropout on features (B, width) by noise (B, width); (B, 0): no dropout."""
        if not noise.shape[1]:
            return features
        return features * dropout_factors(torch.full_like(noise, self.switches.head_dropout), noise).to(features.dtype)

    def feature_layout(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        strides = tuple(STEM_STRIDE * 2**stage for stage in range(len(DEPTHS)))
        return strides, tuple(stage.blocks[0].norm.normalized_shape[0] for stage in self.stages)

    def feature_maps(self, images: Tensor, noise: Tensor | None = None) -> list[Tensor]:
        """The outputs of the four stages, each normalized.

        The windows keep the size of the training; grids are padded to whole windows. On an image that is larger than
        ``image_size`` on a side, every second block shifts its windows by half a window (Sec. 5.5), so that they do not stay
        apart; at ``image_size`` the last map is what the classifier pools, unless the switch ``shift_windows`` is on.
        H and W are multiples of 4, or of 32 with the switches for linear embedding or merging.
        """
        height, width = images.shape[-2:]
        unit = STEM_STRIDE if isinstance(self.stages[1].merging, ConvMerging) else STRIDE
        check_sides((height, width), unit, of_images=True)
        shifts = self.switches.shift_windows or max(height, width) > self.image_size
        outputs, _ = self._run_stages(self.stem(images), noise, shifts)
        return [self.normed_map(x, stage) for stage, x in enumerate(outputs)]

    def _run_stages(self, x: Tensor, noise: Tensor | None, shifts: bool) -> tuple[list[Tensor], Tensor]:
        """From what the stem made: outputs (B, rows, columns, width) of all stages, and the head's part of the noise."""
        if noise is None:
            noise = torch.rand(x.shape[0], self.noise_per_sample if self.training else 0, device=x.device)
        counts = self._noise_counts() if self.training else (0, 0, 0)
        for_branches, for_blocks, for_head = noise[:, : sum(counts)].split(counts, dim=1)
        scales = self.block_scales(x.shape[0], for_branches, branches=1)  # (B, 1) each, or None
        dropout = iter(for_blocks.unbind(1))  # (B,) each; none without dropout
        x = self.absolute_position(x)  # (B, H / 4, W / 4, width)
        outputs: list[Tensor] = []
        for stage in self.stages:
            x = stage.merging(x)  # (B, rows, columns, width)
            grid = (int(x.shape[1]), int(x.shape[2]))
            for i, block in enumerate(stage.blocks):
                tiling = Tiling(grid, stage.window, self._shifts(grid, stage.window) if shifts and i % 2 else (0, 0))
                x = run_in_windows(self, block, x, tiling, next(scales), next(dropout, None))
            outputs.append(x)
        return outputs, for_head

    def _shifts(self, grid: tuple[int, int], window: int) -> tuple[int, int]:
        """Half a window along each axis of several windows; both axes go together in a classifier, as in the published code."""
        sizes = grid if self.strides else (max(grid),) * 2
        down, right = (window // 2 if size > window else 0 for size in sizes)
        return down, right


def check_windows(windows: list[int] | tuple[int, ...], height: int, width: int) -> None:
    """Raise a UserError unless the windows of each stage tile the tokens of an image."""
    for stage, window in enumerate(windows):
        stride = STEM_STRIDE * 2**stage
        if height % (stride * window) or width % (stride * window):
            windows_of = f"the windows of stage {stage + 1}, whose side is {window} tokens"
            remedy = f"change model.image_size or model.switches.windows: sides must be multiples of {stride * window} pixels"
            raise UserError(f"an image of {height}x{width} pixels does not divide into {windows_of}", remedy)


register(
    PosMLP,
    PosMLPSwitches,
    "PosMLP (ACM MM 2022), Table 2",
    posmlp_t=(96, "PosMLP Tiny, width 96", 21, 5.2, 82.1),
    posmlp_s=(128, "PosMLP Small, width 128", 37, 8.7, 83.0),
    posmlp_b=(192, "PosMLP Base, width 192", 82, 18.6, 83.6),
)
