"""PerViT's ablations as config switches (``model.switches``). Tables of Min et al., NeurIPS 2022, and its supplement.

What replaces a part that is switched off is in each docstring; where the paper leaves that open, so is our reading.
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
    """Content-based attention Φc (Table 1 c). false: Φc = 1, so there are no queries and keys and Φp alone weighs the values."""
    conv_stem: bool = True
    """Convolutional stem (Tables 1, 3). false: DeiT's, one 16x16 convolution of stride 16 to the first width."""
    cpe: bool = True
    """Convolutional position encoding before the first norm (Tables 1, 3). false: nothing in its place."""
    position_embedding: bool = False
    """Add a learned absolute embedding to the tokens, as DeiT does; Table 1 does not say whether its rows have one. Ties the model to its image size."""
    widths: tuple[PositiveInt, PositiveInt, PositiveInt, PositiveInt] | None = None
    """Channels of the four stages; null: Table S5's. Table 1's rows c, f, h, i are wider to cost the same, by how much is not said."""
    phi_p_distance: Literal["euclidean", "learned"] = "euclidean"
    """Table 5, Euc and Lrn. learned: distances between learned vectors, one per position, shared by the layers; ties the model to its image size."""
    phi_p_neighbours: bool = True
    """Table 5, with N and without. false: Φp's projections are 1x1 instead of 3x3 over the key's neighbours."""
    phi_p_layers: Literal[1, 2] = 2
    """Table 5, with ML (2) and without (1: one projection to the heads, then the norm)."""
    phi_p_init: Literal["peripheral", "conv", "random"] = "peripheral"
    """Table 5, top. conv: every layer starts as local as the first. random: all of Φp's parameters start at random."""
    phi_p_frozen: bool = False
    """Table S3, fixed: Φp's parameters keep their initial values."""

    @model_validator(mode="after")
    def _something_weighs_the_values(self) -> PerViTSwitches:
        if not self.phi_p and not self.phi_c:
            raise ValueError("needs phi_p or phi_c: without both, attention is a plain mean; set one of them to true")
        return self

    @model_validator(mode="after")
    def _phi_p_is_there_to_be_varied(self) -> PerViTSwitches:
        if not self.phi_p:
            for name, field in type(self).model_fields.items():
                if name.startswith("phi_p_") and getattr(self, name) != field.default:
                    raise ValueError(
                        f"has {name} = {getattr(self, name)!r} for a Φp that phi_p = false removes; drop one of the two"
                    )
        return self

    @property
    def phi_design(self) -> PhiDesign | None:
        """The network Φp, or None where there is none."""
        if not self.phi_p:
            return None
        return PhiDesign(self.phi_p_distance, self.phi_p_neighbours, self.phi_p_layers, self.phi_p_init)
