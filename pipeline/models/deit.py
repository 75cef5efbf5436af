"""DeiT (Touvron et al., "Training data-efficient image transformers & distillation through attention", ICML 2021) and DeiT III
(Touvron et al., "DeiT III: Revenge of the ViT", ECCV 2022). ``load_reference_state_dict`` loads the authors' published weights.

DeiT is the plain vision transformer that ConViT and PerViT are compared with: 16x16 patches, a class token, learned position
embeddings. The "+" models are those of ConViT's Table 1, with ConViT's numbers of heads and 64 channels per head.

DeiT III differs from it in three places: each residual branch is multiplied by learned factors per channel (LayerScale; Touvron
et al., "Going deeper with image transformers", ICCV 2021, Eq. 5), the class token has no position embedding, and stochastic depth
has the same rate in every block.
"""

import math
from collections.abc import Iterator
from functools import partial
from typing import Annotated, Any

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn import functional as F

from pipeline.models.common import vit
from pipeline.models.common.base import ModelOptions, Switches, linear_drop_path, scale_branch
from pipeline.models.common.irpe import RelativeSelfAttention
from pipeline.models.common.layers import ModuleList
from pipeline.models.common.probe import probe
from pipeline.models.pervit.phi_model import PhiModel
from pipeline.models.pervit.position import PeripheralPosition, PhiDesign
from pipeline.models.registry import register

_KERNEL = 3


class PositionGenerator(nn.Conv2d):
    """Position encoding generator (PEG; Chu et al., CPVT, ICLR 2023): a depthwise 3x3 convolution of the patch tokens with a residual connection.

    Its zero padding tells the tokens where the borders are. The class token passes by unchanged. The initialization is that of the
    authors' Twins, which has their PEG; of CPVT itself they published no code.

    ``forward``: x (B, N + 1, width), class token first, grid (rows, columns) with N = rows * columns -> (B, N + 1, width).
    """

    def __init__(self, width: int) -> None:
        super().__init__(width, width, _KERNEL, padding=_KERNEL // 2, groups=width)
        nn.init.normal_(self.weight, std=math.sqrt(2 / _KERNEL**2))
        assert self.bias is not None
        nn.init.zeros_(self.bias)

    def forward(self, x: Tensor, grid: tuple[int, int]) -> Tensor:  # type: ignore[override]  # tokens in, tokens out
        class_token, patches = x[:, :1], x[:, 1:]  # (B, 1, width), (B, N, width)
        image = patches.transpose(1, 2).unflatten(2, grid)  # (B, width, rows, columns)
        positions = super().forward(image).flatten(2).transpose(1, 2)  # (B, N, width)
        return torch.cat([class_token, patches + positions], dim=1)


class DeiTSwitches(Switches):
    """Ablations of ConViT's Table 5 and PerViT's Table 2, whose encodings are alternatives."""

    mask_position_embedding: bool = False
    """Omit the position embedding in eval mode (ConViT, Table 5). Training is not affected."""
    peripheral_position: bool = False
    """Multiply every layer's attention by PerViT's Φp (PerViT, Table 2, "+ PPE"). The class token has no position: Φp = 1 to and from it."""
    conditional_position: Annotated[int, Field(ge=0, le=vit.ViTLayout.depth)] = 0
    """CPVT's position encoding generators after each of the first n blocks, instead of the position embedding (PerViT, Table 2, "+ CPVT": 5)."""
    relative_position: bool = False
    """iRPE in every layer: product method, contextual, on keys, shared by the heads (PerViT, Table 2, "+ iRPE")."""

    def misfits(self) -> Iterator[str]:
        names = ("peripheral_position", "conditional_position", "relative_position")
        given = [name for name in names if getattr(self, name)]
        if len(given) > 1:
            yield f"must have at most one of {', '.join(names)}, got {' and '.join(given)}: leave out the others"
        if self.conditional_position and self.mask_position_embedding:
            yield "has conditional_position, which leaves no position embedding to mask: set mask_position_embedding=false"


class DeiT(vit.ClassTokenModel, PhiModel):
    """DeiT with a class token.

    Probes of every layer: ``attention`` (B, heads, N + 1, N + 1), class token first, and, without iRPE, ``phi_c`` likewise; with
    Φp also ``phi_p`` (heads, N, N) of the patches, before the two.

    How PerViT's authors added Φp to DeiT is not published. Here Φp = 1 to and from the class token, the absolute position
    embedding stays (as with iRPE, which Table 2 compares with Φp), and Φp has the peripheral initialization. Its figures for CPVT
    and iRPE are those authors' own: five generators and no position embedding (CPVT's "0-5"), and iRPE beside the embedding.
    Raises UserError: ``image_size`` is not a multiple of 16.

    Args:
        options: ``image_size``: a multiple of 16; ``forward`` takes no other size, because of the position embedding. With
            ``conditional_position``, and in the feature form, it takes any, also images that are not square.
    """

    # The last: iRPE's authors' DeiT (github.com/microsoft/Cream), which has the names of DeiT's otherwise.
    reference_names = (
        *vit.REFERENCE_NAMES,
        ("blocks.*.attn.rpe_k.lookup_table_weight", "blocks.*.attn.relative_position.weight"),
    )
    reference_switches = frozenset({"mask_position_embedding", "relative_position"})
    leading_tokens = 1

    def __init__(self, layout: vit.ViTLayout, switches: DeiTSwitches | None = None, **options: Any) -> None:
        switches, settings = switches or DeiTSwitches(), ModelOptions(**options)
        rates = linear_drop_path(settings.drop_path, layout.depth)
        side, _ = vit.patch_grid(settings.image_size, settings.image_size)
        position = None
        if not switches.conditional_position:
            position = vit.PositionEmbedding(settings.image_size, 1, layout.width, switches.mask_position_embedding)
        super().__init__(layout, switches, settings, rates, position)
        self.relative_position = switches.relative_position
        attention = RelativeSelfAttention if self.relative_position else vit.SelfAttention
        self.blocks = ModuleList(vit.Block(attention(layout.width, layout.heads), layout) for _ in range(layout.depth))
        self.position_generators = ModuleList(PositionGenerator(layout.width) for _ in range(switches.conditional_position))
        if switches.peripheral_position:
            self.add_phi_inputs(layout.heads, side, PhiDesign())
            for layer, block in enumerate(self.blocks):
                block.position = PeripheralPosition(layout.heads, layer, layout.depth)  # called by PhiModel, once per step
        self.add_classifier(settings.num_classes)

    def no_weight_decay(self) -> set[str]:
        """Also the generators of CPVT, as in their authors' Twins; iRPE's tables are decayed, as in its authors' code."""
        generators = {f"position_generators.{i}.weight" for i in range(len(self.position_generators))}
        return super().no_weight_decay() | generators

    def layer_of(self, name: str) -> int:
        """See the base class. A generator of CPVT belongs to the block that it follows."""
        list_name, _, rest = name.partition(".")
        return 1 + int(rest.partition(".")[0]) if list_name == "position_generators" else super().layer_of(name)

    def tokens(self, images: Tensor, noise: Tensor | None) -> Tensor:
        grid = vit.patch_grid(*images.shape[-2:])
        x = self.with_class_token(self.patch_embedding(images))  # (B, N + 1, width)
        if self.position_embedding is not None:
            x = self.position_embedding(x, grid)
        of_blocks = zip(self.blocks, self.block_scales(x.shape[0], noise), self.log_phi(grid))
        for i, (block, scales, log_phi) in enumerate(of_blocks):
            # What the block's attention is told of positions.
            position: Any = grid if self.relative_position else None
            if log_phi is not None:
                probe("phi_p", log_phi.exp)
                position = F.pad(log_phi, (1, 0, 1, 0))  # (heads, N + 1, N + 1): Φp = 1 in the class token's row and column
            x = self.run_block(block, x, scales, position)
            if i < len(self.position_generators):
                x = self.position_generators[i](x, grid)
        return x


class DeiT3Switches(Switches):
    """What DeiT III adds to a plain ViT."""

    layer_scale: Annotated[float, Field(gt=0, le=1)] | None = 1e-4
    """Initial value of LayerScale's factors; null: no LayerScale."""


class ScaledBlock(vit.Block):
    """A transformer block with LayerScale: each branch times a vector of factors, all of which begin with ``initial``."""

    def __init__(self, attention: nn.Module, layout: vit.ViTLayout, initial: float) -> None:
        super().__init__(attention, layout)
        self.layer_scale1, self.layer_scale2 = (nn.Parameter(torch.full((layout.width,), initial)) for _ in range(2))

    def forward(self, x: Tensor, branch_scales: Tensor | None, position: Any = None) -> Tensor:
        x = x + scale_branch(self.layer_scale1 * self.attn(self.norm1(x), position), branch_scales, 0)
        return x + scale_branch(self.layer_scale2 * self.mlp(self.norm2(x)), branch_scales, 1)


class DeiT3(vit.ClassTokenModel):
    """DeiT III. Probes of every layer: ``attention`` and ``phi_c``, (B, heads, N + 1, N + 1) each, class token first. Raises
    UserError: ``image_size`` is not a multiple of 16.

    Args:
        options: ``image_size``: a multiple of 16; ``forward`` takes no other size. In the feature form it takes any, also images
            that are not square. ``drop_path``: of every block.
    """

    reference_names = (
        *vit.REFERENCE_NAMES,
        ("blocks.*.gamma_1", "blocks.*.layer_scale1"),
        ("blocks.*.gamma_2", "blocks.*.layer_scale2"),
    )
    reference_switches = frozenset({"layer_scale"})
    position_embedding: vit.PositionEmbedding

    def __init__(self, layout: vit.ViTLayout, switches: DeiT3Switches | None = None, **options: Any) -> None:
        switches, settings = switches or DeiT3Switches(), ModelOptions(**options)
        rates = [settings.drop_path] * (2 * layout.depth)  # two branches per block
        super().__init__(layout, switches, settings, rates, vit.PositionEmbedding(settings.image_size, 0, layout.width))
        block = vit.Block if switches.layer_scale is None else partial(ScaledBlock, initial=switches.layer_scale)
        self.blocks = ModuleList(block(vit.SelfAttention(layout.width, layout.heads), layout) for _ in range(layout.depth))
        self.add_classifier(settings.num_classes)

    def tokens(self, images: Tensor, noise: Tensor | None) -> Tensor:
        patches = self.position_embedding(self.patch_embedding(images), vit.patch_grid(*images.shape[-2:]))  # (B, N, width)
        x = self.with_class_token(patches)  # (B, N + 1, width)
        for block, scales in zip(self.blocks, self.block_scales(x.shape[0], noise)):
            x = self.run_block(block, x, scales)
        return x


register(
    DeiT,
    DeiTSwitches,
    "Training data-efficient image transformers (ICML 2021), Table 1; figures of ConViT (ICML 2021), Table 1",
    deit_t=(vit.ViTLayout(3, 192), "DeiT Tiny, 3 heads", 6, 1, 72.2, 1442),
    deit_s=(vit.ViTLayout(6, 384), "DeiT Small, 6 heads", 22, 4.3, 79.8, 587),
    deit_b=(vit.ViTLayout(12, 768), "DeiT Base, 12 heads", 86, 17, 81.8, 187),
)
register(
    DeiT,
    DeiTSwitches,
    "ConViT (ICML 2021), Table 1",
    deit_ti_plus=(vit.ViTLayout(4, 256), "DeiT Tiny+, 4 heads", 10, 2, 75.9, 1036),
    deit_s_plus=(vit.ViTLayout(9, 576), "DeiT Small+, 9 heads", 48, 10, 79.0, 480),
    deit_b_plus=(vit.ViTLayout(16, 1024), "DeiT Base+, 16 heads", 152, 30, 77.5, 114),
)
register(
    DeiT3,
    DeiT3Switches,
    "DeiT III: Revenge of the ViT (ECCV 2022); figures of the authors' model zoo",
    deit3_s=(vit.ViTLayout(6, 384), "DeiT III Small, 6 heads", 22.0, 4.6, 81.4),
    deit3_m=(vit.ViTLayout(8, 512), "DeiT III Medium, 8 heads", 38.8, 8.0, 83.0),
    deit3_b=(vit.ViTLayout(12, 768), "DeiT III Base, 12 heads", 86.6, 17.5, 83.8),
)
