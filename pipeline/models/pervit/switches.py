"""PerViT's ablation switches (``model.switches``). Tables are those of Min et al., NeurIPS 2022, and its supplement.

The description of a switch says what replaces a disabled part and, where the paper does not specify it, how we read it.
"""

from __future__ import annotations

from typing import Literal

from pydantic import model_validator

from pipeline.config import PositiveInt
from pipeline.models.common.base import Switches
from pipeline.models.pervit.position import PhiDesign


class PerViTSwitches(Switches):
    """Tables 1, 2, 3, 5 and S3. Defaults: the published model."""

    phi_p: bool = True
    """Position-based attention Φp (Tables 1, 3). false: Φp = 1, which is plain self-attention."""
    phi_c: bool = True
    """Content-based attention Φc (Table 1 c). false: Φc = 1, without query and key projections."""
    conv_stem: bool = True
    """Convolutional stem (Tables 1, 3). false: DeiT's patch embedding, a 16x16 convolution with stride 16."""
    cpe: bool = True
    """Convolutional position encoding before the first norm (Tables 1, 3). false: nothing in its place."""
    position_embedding: bool = False
    """Add a learned absolute position embedding, as in DeiT; Table 1 does not say whether its rows have one. Fixes the image size."""
    widths: tuple[PositiveInt, PositiveInt, PositiveInt, PositiveInt] | None = None
    """Channels of the four stages; null: Table S5. Rows c, f, h, i of Table 1 are widened to equal cost; the paper does not give the widths."""
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

    @model_validator(mode="after")
    def _something_weighs_the_values(self) -> PerViTSwitches:
        if not self.phi_p and not self.phi_c:
            raise ValueError("needs phi_p or phi_c: without both, attention averages the values; set one of them to true")
        return self

    @model_validator(mode="after")
    def _phi_p_is_there_to_be_varied(self) -> PerViTSwitches:
        if not self.phi_p:
            for name, field in type(self).model_fields.items():
                if name.startswith("phi_p_") and getattr(self, name) != field.default:
                    raise ValueError(f"has {name} = {getattr(self, name)!r}, but phi_p = false removes Φp; drop one of the two")
        return self

    @property
    def phi_design(self) -> PhiDesign | None:
        """Architecture and initialization of Φp; None without Φp."""
        if not self.phi_p:
            return None
        return PhiDesign(self.phi_p_distance, self.phi_p_neighbours, self.phi_p_layers, self.phi_p_init)
