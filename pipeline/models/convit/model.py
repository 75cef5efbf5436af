"""ConViT-Ti/S/B and their "+" variants (d'Ascoli et al., "ConViT: Improving Vision Transformers with Soft Convolutional Inductive
Biases", ICML 2021; layouts: Table 1).

A DeiT whose first ten blocks use gated positional self-attention, initialized as a convolution
(:mod:`pipeline.models.convit.gpsa`); the class token is appended to the patches after them. Where paper and published code
differ, this follows the code, so that ``load_reference_state_dict`` can load the authors' weights.
"""

from __future__ import annotations

from typing import Annotated

import torch
from pydantic import Field, model_validator
from torch import Tensor, nn
from typing_extensions import Unpack

from pipeline.config import Positive, section_from_dict
from pipeline.models.common.base import ModelOptions, Switches, linear_drop_path, scales_of_block, settle
from pipeline.models.common.module_list import ModuleList
from pipeline.models.common.vit import (
    REFERENCE_NAMES,
    Block,
    ClassTokenModel,
    PatchEmbedding,
    PositionEmbedding,
    SelfAttention,
    ViTLayout,
    patch_grid,
)
from pipeline.models.convit.gpsa import GatedPositionalSelfAttention, PositionalSelfAttention, relative_positions
from pipeline.models.entry import register

DEPTH = 12

# The class token needs at least one self-attention block to attend to the patches.
LayerCount = Annotated[int, Field(ge=0, le=DEPTH - 1)]


class ConViTSwitches(Switches):
    """Ablations of Table 3, Fig. 8, Fig. 9 and, in eval mode only, Tables 5 and 6."""

    gpsa_layers: LayerCount = 10
    """Number of leading blocks with GPSA (Fig. 8); 0: a plain ViT (Table 3, e)."""
    conv_init: bool = True
    """Convolutional initialization (Eq. 5); false: random values and positions (Table 3, c, d and g)."""
    locality_strength: Positive = 1.0
    """α of Eq. 5 (Fig. 8): how sharply a head attends to its offset in the convolutional initialization."""
    train_gating: bool = True
    """false: the gating parameters are frozen at λ = 0, equal weights for content and position (Table 3, b and d)."""
    train_gpsa: bool = True
    """false: all parameters of the GPSA layers are frozen at their initial values (Table 3, f and g)."""
    positional_gating: bool = True
    """false: content and position are summed before the softmax, without a gate (Eq. 4, Fig. 9)."""
    mask_content_layers: LayerCount = 0
    """In eval mode the first n GPSA layers attend by position only (Table 6: 3, 5 and 10). Training is not affected."""
    mask_position_layers: LayerCount = 0
    """In eval mode the first n GPSA layers attend by content only (Table 6: 3, 5 and 10). Training is not affected."""
    mask_position_embedding: bool = False
    """Omit the absolute position embedding in eval mode (Table 5). Training is not affected."""

    @model_validator(mode="after")
    def _switches_do_something(self) -> ConViTSwitches:
        masked = max(self.mask_content_layers, self.mask_position_layers)
        if self.mask_content_layers and self.mask_position_layers:
            raise ValueError("must not mask content and position at once: set one of the two to 0")
        if masked > self.gpsa_layers:
            raise ValueError(f"masks {masked} GPSA layers, at most gpsa_layers = {self.gpsa_layers} possible")
        if not self.positional_gating and (masked or not self.train_gating):
            raise ValueError("has positional_gating false, which leaves no gate to mask or to freeze: set it to true")
        if not self.conv_init and self.locality_strength != 1:
            raise ValueError("has a locality_strength, which needs conv_init true: set one of the two to its default")
        return self


class ConViT(ClassTokenModel):
    """Vision transformer with soft convolutional inductive biases.

    Probes: ``attention`` of every layer; ``position`` and ``gate`` of GPSA layers, which have no class token. Shapes: see
    :class:`~pipeline.models.convit.gpsa.GatedPositionalSelfAttention`.

    Args:
        layout: heads and width. A square number of heads lets the convolutional initialization use all of them.
        options: see :class:`ModelOptions`. ``image_size``: a multiple of 16; ``forward`` takes no other size, because of the position
            embedding, but in the feature form.

    Raises:
        UserError: ``image_size`` is not a multiple of 16.
    """

    reference_names = (
        *REFERENCE_NAMES,
        ("blocks.*.attn.gating_param", "blocks.*.attn.gating"),
        ("blocks.*.attn.pos_proj.", "blocks.*.attn.position_projection."),
    )
    switches: ConViTSwitches
    reference_switches = frozenset(ConViTSwitches.model_fields) - {"positional_gating"}

    def __init__(self, layout: ViTLayout, **options: Unpack[ModelOptions]) -> None:
        settings, switches = settle(options, ConViTSwitches)
        super().__init__(linear_drop_path(settings.drop_path, layout.depth), settings.activation_checkpointing, switches)
        width = layout.width
        self.gpsa_layers = switches.gpsa_layers
        self.position_embedding = PositionEmbedding(settings.image_size, 0, width, switches.mask_position_embedding)
        self.patch_embedding = PatchEmbedding(width)
        self.class_token = nn.Parameter(torch.empty(1, 1, width))
        self.blocks = ModuleList(_block(layout, switches, layer) for layer in range(layout.depth))
        self.add_classifier(width, settings.num_classes)
        self.mask_attention_at_test(switches.mask_content_layers, switches.mask_position_layers)

    def no_weight_decay(self) -> set[str]:
        return {"class_token", "position_embedding.weight"}

    def mask_attention_at_test(self, content_layers: int = 0, position_layers: int = 0) -> None:
        """Set the switches ``mask_content_layers`` and ``mask_position_layers`` of an existing model.

        Args:
            content_layers: number of leading GPSA layers that attend by position only.
            position_layers: number of leading GPSA layers that attend by content only. At most one of the two is nonzero;
                (0, 0) removes the masks.

        Raises:
            UserError: both are nonzero, there are fewer GPSA layers, or the layers have no gates.
        """
        masks = {"mask_content_layers": content_layers, "mask_position_layers": position_layers}
        self.switches = section_from_dict(ConViTSwitches, self.switches.model_dump() | masks, key="model.switches")
        for layer, block in enumerate(self.blocks[: self.gpsa_layers]):
            if isinstance(block.attn, GatedPositionalSelfAttention):
                block.attn.test_gate = 1.0 if layer < content_layers else 0.0 if layer < position_layers else None

    def tokens(self, images: Tensor, noise: Tensor | None) -> Tensor:
        grid = patch_grid(*images.shape[-2:])
        x = self.position_embedding(self.patch_embedding(images), grid)  # (B, N, width)
        offsets = relative_positions(*grid, images.device, self.drop_path_rates.dtype)  # (N, N, 3)
        scales = self.branch_scales(x.shape[0], noise)  # (B, 2 * depth) or None
        for i, block in enumerate(self.blocks):
            if i == self.gpsa_layers:
                x = torch.cat([self.class_token.expand(x.shape[0], -1, -1), x], dim=1)  # (B, N + 1, width) from here on
            x = self.run_block(block, x, scales_of_block(scales, i), offsets if i < self.gpsa_layers else None)
        return x


def _block(layout: ViTLayout, switches: ConViTSwitches, layer: int) -> Block:
    if layer >= switches.gpsa_layers:
        return Block(layout.width, SelfAttention(layout.width, layout.heads, qkv_bias=False), layout.mlp_ratio)
    kind = GatedPositionalSelfAttention if switches.positional_gating else PositionalSelfAttention
    attention = kind(layout.width, layout.heads)
    block = Block(layout.width, attention, layout.mlp_ratio)
    if switches.conv_init:
        attention.init_convolution(switches.locality_strength)
    if isinstance(attention, GatedPositionalSelfAttention) and not switches.train_gating:
        nn.init.zeros_(attention.gating).requires_grad_(False)
    if not switches.train_gpsa:
        attention.requires_grad_(False)
    return block


register(
    ConViT,
    ConViTSwitches,
    "ConViT (ICML 2021), Table 1",
    {
        "convit_ti": (ViTLayout(4, 192), "ConViT Tiny, 4 heads", 6, 1, 73.1),
        "convit_ti_plus": (ViTLayout(4, 256), "ConViT Tiny+, 4 heads", 10, 2, 76.7),
        "convit_s": (ViTLayout(9, 432), "ConViT Small, 9 heads", 27, 5.4, 81.3),
        "convit_s_plus": (ViTLayout(9, 576), "ConViT Small+, 9 heads", 48, 10, 82.2),
        "convit_b": (ViTLayout(16, 768), "ConViT Base, 16 heads", 86, 17, 82.4),
        "convit_b_plus": (ViTLayout(16, 1024), "ConViT Base+, 16 heads", 152, 30, 82.5),
    },
)
