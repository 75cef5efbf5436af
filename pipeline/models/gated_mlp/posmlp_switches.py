"""PosMLP's ablation switches (``model.switches``). Tables and figures are those of Wang et al., ACM MM 2022."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, PositiveInt, model_validator

from pipeline.models.gated_mlp.gating import GROUPED, GatingSwitches

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
