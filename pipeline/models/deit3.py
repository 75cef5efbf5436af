"""DeiT III (Touvron et al., "DeiT III: Revenge of the ViT", ECCV 2022): the plain vision transformer with LayerScale.

It differs from DeiT in three places: each residual branch is multiplied by learned factors per channel (LayerScale; Touvron et al.,
"Going deeper with image transformers", ICCV 2021, Eq. 5), the class token has no position embedding, and stochastic depth has the
same rate in every block. ``load_reference_state_dict`` loads the authors' published weights.
"""

from __future__ import annotations

from typing import Annotated, Any

import torch
from pydantic import Field
from torch import Tensor, nn
from typing_extensions import Unpack

from pipeline.models.common.base import ModelOptions, Switches, scale_branch, scales_of_block, settle
from pipeline.models.common.layers import ModuleList
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
from pipeline.models.entry import register

_BRANCHES = 2  # per block


class DeiT3Switches(Switches):
    """What DeiT III adds to a plain ViT."""

    layer_scale: Annotated[float, Field(gt=0, le=1)] | None = 1e-4
    """Initial value of LayerScale's factors; null: no LayerScale."""


class ScaledBlock(Block):
    """A transformer block with LayerScale: each branch times a vector of factors.

    Args:
        width: channels of a token.
        attention: module that is called with (x, position).
        mlp_ratio: hidden width of the MLP / width.
        initial: value that all factors begin with.
    """

    def __init__(self, width: int, attention: nn.Module, mlp_ratio: int, initial: float) -> None:
        super().__init__(width, attention, mlp_ratio)
        self.layer_scale1 = nn.Parameter(torch.full((width,), initial))
        self.layer_scale2 = nn.Parameter(torch.full((width,), initial))

    def forward(self, x: Tensor, branch_scales: Tensor | None, position: Any = None) -> Tensor:
        """As :meth:`Block.forward`: x (B, N, width), branch scales (B, 2) or None -> (B, N, width)."""
        x = x + scale_branch(self.layer_scale1 * self.attn(self.norm1(x), position), branch_scales, 0)
        return x + scale_branch(self.layer_scale2 * self.mlp(self.norm2(x)), branch_scales, 1)


class DeiT3(ClassTokenModel):
    """DeiT III. Probes of every layer: ``attention`` and ``phi_c``, (B, heads, N + 1, N + 1) each, class token first.

    Args:
        layout: heads and width.
        options: see :class:`ModelOptions`. ``image_size``: a multiple of 16; ``forward`` takes no other size. In the feature form it
            takes any, also images that are not square. ``drop_path``: of every block.

    Raises:
        UserError: ``image_size`` is not a multiple of 16.
    """

    reference_names = (
        *REFERENCE_NAMES,
        ("blocks.*.gamma_1", "blocks.*.layer_scale1"),
        ("blocks.*.gamma_2", "blocks.*.layer_scale2"),
    )
    reference_switches = frozenset({"layer_scale"})

    def __init__(self, layout: ViTLayout, **options: Unpack[ModelOptions]) -> None:
        settings, switches = settle(options, DeiT3Switches)
        super().__init__([settings.drop_path] * (_BRANCHES * layout.depth), settings.activation_checkpointing, switches)
        width, initial = layout.width, switches.layer_scale
        self.position_embedding = PositionEmbedding(settings.image_size, 0, width, masked_at_test=False)
        self.patch_embedding = PatchEmbedding(width)
        self.class_token = nn.Parameter(torch.empty(1, 1, width))

        def block() -> Block:
            attention = SelfAttention(width, layout.heads, qkv_bias=True)
            if initial is None:
                return Block(width, attention, layout.mlp_ratio)
            return ScaledBlock(width, attention, layout.mlp_ratio, initial)

        self.blocks = ModuleList(block() for _ in range(layout.depth))
        self.add_classifier(width, settings.num_classes)

    def tokens(self, images: Tensor, noise: Tensor | None) -> Tensor:
        patches = self.position_embedding(self.patch_embedding(images), patch_grid(*images.shape[-2:]))  # (B, N, width)
        x = torch.cat([self.class_token.expand(len(patches), -1, -1), patches], dim=1)  # (B, N + 1, width)
        scales = self.branch_scales(len(x), noise)  # (B, 2 * depth) or None
        for i, block in enumerate(self.blocks):
            x = self.run_block(block, x, scales_of_block(scales, i))
        return x


register(
    DeiT3,
    DeiT3Switches,
    "DeiT III: Revenge of the ViT (ECCV 2022); figures of the authors' model zoo",
    {
        "deit3_s": (ViTLayout(6, 384), "DeiT III Small, 6 heads", 22.0, 4.6, 81.4),
        "deit3_m": (ViTLayout(8, 512), "DeiT III Medium, 8 heads", 38.8, 8.0, 83.0),
        "deit3_b": (ViTLayout(12, 768), "DeiT III Base, 12 heads", 86.6, 17.5, 83.8),
    },
)
