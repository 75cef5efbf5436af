"""Define what PosMLP is put together from (Wang et al., "PosMLP", ACM MM 2022): patch embedding, patch merging and absolute position
embedding (Figure 2b and c, Tables 7 and 10), the layout of Table 11 with the sizes that suit it, and the ablation switches.

Token grids are channels-last: (B, rows, columns, width).
"""

from __future__ import annotations

from typing import Annotated, Literal

import torch
from pydantic import Field, PositiveInt, model_validator
from torch import Tensor, nn
from torch.nn import functional as F

from pipeline.errors import UserError
from pipeline.models.common.features import GridEmbedding, resample_grid
from pipeline.models.common.layers import ModuleList
from pipeline.models.gated_mlp.gating import GROUPED, LAYER_NORM_EPS, GatingSwitches

STEM_STRIDE = 4  # pixels per token of the first stage
BATCH_NORM_EPS = 1e-6  # of the published code


class ConvStem(nn.Module):
    """Convolutional patch embedding (Figure 2b): 3x3 stride 2, 3x3 stride 2, 1x1, each with BatchNorm, GELU in between.

    ``forward``: (B, 3, H, W) -> (B, H / 4, W / 4, width).
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        self.convolutions = ModuleList(
            [
                nn.Conv2d(3, width // 2, 3, stride=2, padding=1),
                nn.Conv2d(width // 2, width, 3, stride=2, padding=1),
                nn.Conv2d(width, width, 1),
            ]
        )
        self.norms = nn.ModuleList(nn.BatchNorm2d(c.out_channels, eps=BATCH_NORM_EPS) for c in self.convolutions)

    def forward(self, x: Tensor) -> Tensor:
        for i, (convolution, norm) in enumerate(zip(self.convolutions, self.norms)):
            x = norm(convolution(F.gelu(x) if i else x))  # (B, channels, rows, columns)
        return x.permute(0, 2, 3, 1)  # (B, H / 4, W / 4, width)


class LinearStem(nn.Module):
    """Linear patch embedding of 4x4 patches and LayerNorm. ``forward``: (B, 3, H, W) -> (B, H / 4, W / 4, width)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.projection = nn.Conv2d(3, width, STEM_STRIDE, stride=STEM_STRIDE)
        self.norm = nn.LayerNorm(width, eps=LAYER_NORM_EPS)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.projection(x).permute(0, 2, 3, 1))  # (B, H / 4, W / 4, width)


class ConvMerging(nn.Module):
    """Depthwise 3x3 convolution with stride 2 that doubles the channels, then LayerNorm (Figure 2c).

    ``forward``: (B, rows, columns, width) -> (B, rows / 2, columns / 2, 2 * width).
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(width, 2 * width, 3, stride=2, padding=1, groups=width)
        self.norm = nn.LayerNorm(2 * width, eps=LAYER_NORM_EPS)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.conv(x.permute(0, 3, 1, 2)).permute(0, 2, 3, 1))


class LinearMerging(nn.Module):
    """Patch merging of Swin (Liu et al., ICCV 2021): concatenate 2x2 tokens, LayerNorm, linear layer.

    ``forward``: (B, rows, columns, width) -> (B, rows / 2, columns / 2, 2 * width).
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(4 * width, eps=LAYER_NORM_EPS)
        self.reduction = nn.Linear(4 * width, 2 * width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        batch, rows, columns, width = x.shape
        x = x.reshape(batch, rows // 2, 2, columns // 2, 2, width).transpose(2, 3)  # (B, rows / 2, columns / 2, 2, 2, width)
        return self.reduction(self.norm(x.reshape(batch, rows // 2, columns // 2, 4 * width)))


class AbsolutePosition(GridEmbedding):
    """Learned absolute position embedding (Table 7, "APE"). ``forward``: (B, rows, columns, width) -> the same shape.

    Raises:
        UserError: ``forward`` got another grid, without ``any_grid``.
    """

    def __init__(self, side: int, width: int) -> None:
        super().__init__()
        self.embedding = nn.Parameter(torch.empty(side, side, width))
        nn.init.trunc_normal_(self.embedding, std=0.02)

    def forward(self, x: Tensor) -> Tensor:
        if self.any_grid:
            own, grid = self.embedding.shape[:2], (x.shape[1], x.shape[2])
            return x + resample_grid(self.embedding.flatten(0, 1), (own[0], own[1]), grid).unflatten(0, grid)
        if x.shape[1:3] != self.embedding.shape[:2]:
            raise UserError(
                f"the images give {x.shape[1]}x{x.shape[2]} tokens, but model.switches.absolute_position has an embedding for "
                f"{self.embedding.shape[0]}x{self.embedding.shape[1]}",
                "use images of model.image_size, or set it to false",
            )
        return x + self.embedding


STRIDE = 32  # of the last stage
DEPTHS = (2, 2, 18, 2)  # blocks per stage, Table 11
RATIOS = (4, 4, 4, 2)  # γ of Table 11
GROUPS = (8, 16, 32, 64)  # s of Table 4


def check_windows(windows: list[int] | tuple[int, ...], height: int, width: int) -> None:
    """Raise a UserError unless the windows of each stage tile the tokens of an image."""
    for stage, window in enumerate(windows):
        stride = STEM_STRIDE * 2**stage
        if height % (stride * window) or width % (stride * window):
            raise UserError(
                f"an image of {height}x{width} pixels does not divide into the windows of stage {stage + 1}, whose side is "
                f"{window} tokens",
                f"change model.image_size or model.switches.windows: sides must be multiples of {stride * window} pixels",
            )


def check_groups(groups: tuple[int, ...], widths: list[int], split: bool) -> None:
    """Raise a UserError unless the channel groups divide the mixed channels of each stage."""
    for stage, (count, width, ratio) in enumerate(zip(groups, widths, RATIOS)):
        channels = width * ratio // 2 if split else width * ratio
        if channels % count:
            raise UserError(
                f"model.switches.groups must divide the {channels} mixed channels of stage {stage + 1}, got {count}",
                f"set it to a power of two, for example {GROUPS[stage]}",
            )


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

    @model_validator(mode="after")
    def _groups_need_a_grouped_map(self) -> PosMLPSwitches:
        if self.groups and self.mixing not in GROUPED:
            raise ValueError(f"must leave groups alone unless mixing is one of {', '.join(GROUPED)}")
        return self
