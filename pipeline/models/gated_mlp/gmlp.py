"""gMLP-S (Liu et al., "Pay Attention to MLPs", NeurIPS 2021), the second backbone of PosMLP's Table 1.

Size as in the paper's Table 1; details as in timm's ``gmlp_s16_224``, whose weights ``load_reference_state_dict`` loads. With
``mixing: ggqpe`` and the other maps it is the gMLP column of PosMLP's Tables 1 and 3 (Wang et al., ACM MM 2022).
Probes of every block: ``position`` and, with ``mixing: ggqpe``, ``covariance`` (:mod:`pipeline.models.gated_mlp.token_mixing`).
"""

from __future__ import annotations

from functools import partial
from typing import Literal

from pydantic import PositiveInt, model_validator
from torch import Tensor, nn
from typing_extensions import Unpack

from pipeline.errors import UserError
from pipeline.models.common.base import ModelOptions, VisionModel, check_sides, settle
from pipeline.models.common.layers import ModuleList
from pipeline.models.entry import register
from pipeline.models.gated_mlp.gating import GMLP_CODE, GROUPED, LAYER_NORM_EPS, GatedBlock, GatingSwitches
from pipeline.models.gated_mlp.partition import PaddedTiling

PATCH = 16  # side of a patch in pixels
TRUNCATED_STD = 0.87962566103423978  # of a normal distribution cut off at two standard deviations
GROUPS = 8  # default channel groups of grouped maps (PosMLP, Table 3)


class GMLPSwitches(GatingSwitches):
    """Ablations of PosMLP's Tables 1 and 3 with gMLP as the backbone; the defaults are gMLP itself."""

    mixing: Literal["sgu", "lrpe_m", "lrpe", "glrpe", "ggqpe"] = "sgu"
    """PosMLP Table 1, the token-mixing map; see :class:`GatingSwitches`."""
    groups: PositiveInt | None = None
    """PosMLP Table 3: channel groups of glrpe and ggqpe, equal in all layers. null: 8."""

    @model_validator(mode="after")
    def _groups_need_a_grouped_map(self) -> GMLPSwitches:
        if self.groups and self.mixing not in GROUPED:
            raise ValueError(f"must leave groups alone unless mixing is one of {', '.join(GROUPED)}")
        return self


class GMLP(VisionModel):
    """Vision MLP with spatial gating units: 16x16 patches, identical blocks that mix all tokens, average pooling, classifier.

    Args:
        width: channels of a token.
        depth: number of blocks.
        ratio: the gating units have ``ratio * width`` input channels.
        options: see :class:`ModelOptions`. ``image_size``: a multiple of 16; ``forward`` takes no other size, because there is a mixing
            weight per pair of tokens, but in the feature form. ``drop_path``: of all blocks.

    Raises:
        UserError: ``image_size`` or the groups do not fit.
    """

    switches: GMLPSwitches
    reference_names = (
        ("stem.proj.", "stem."),
        ("blocks.*.mlp_channels.fc*.", "blocks.*.fc*."),
        ("blocks.*.mlp_channels.gate.norm.", "blocks.*.gate.norm."),
        ("blocks.*.mlp_channels.gate.proj.weight", "blocks.*.gate.mixing.weight"),
        ("blocks.*.mlp_channels.gate.proj.bias", "blocks.*.gate.bias"),
    )

    def __init__(self, width: int, depth: int, ratio: int, **options: Unpack[ModelOptions]) -> None:
        settings, switches = settle(options, GMLPSwitches)
        super().__init__([settings.drop_path] * depth, settings.activation_checkpointing, switches)
        image_size = settings.image_size
        check_sides([image_size], PATCH)
        groups = (switches.groups or GROUPS) if switches.mixing in GROUPED else 1
        channels = ratio * width // 2 if switches.split else ratio * width
        if channels % groups:
            raise UserError(
                f"model.switches.groups must divide the {channels} mixed channels, got {groups}", f"set it to {GROUPS}"
            )
        self.image_size = image_size
        self.stem = nn.Conv2d(3, width, PATCH, stride=PATCH)
        window = image_size // PATCH
        self.blocks = ModuleList(GatedBlock(width, ratio, window, groups, switches, GMLP_CODE) for _ in range(depth))
        self.norm = nn.LayerNorm(width, eps=LAYER_NORM_EPS)
        self.head = nn.Linear(width, settings.num_classes)
        self._init_weights()

    def _init_weights(self) -> None:
        """As in timm: Xavier weights and near-zero biases in the blocks, zero-initialized classifier."""
        for block in self.blocks:
            for linear in (block.fc1, block.fc2):
                nn.init.xavier_uniform_(linear.weight)
                nn.init.normal_(linear.bias, std=1e-6)
        fan_in = 3 * PATCH * PATCH
        nn.init.trunc_normal_(self.stem.weight, std=fan_in**-0.5 / TRUNCATED_STD)  # LeCun initialization, as timm computes it
        if self.stem.bias is not None:
            nn.init.zeros_(self.stem.bias)
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)

    def class_scores(self, images: Tensor, noise: Tensor | None = None) -> Tensor:
        """See the base class. The size is ``image_size``."""
        height, width = images.shape[-2:]
        if height != self.image_size or width != self.image_size:
            raise UserError(
                f"the images are {height}x{width} pixels, but this gMLP was built for {self.image_size}x{self.image_size}, as its "
                f"token-mixing weights are tied to positions",
                "resize the images, or set model.image_size and train from scratch",
            )
        scales = self.branch_scales(images.shape[0], noise)  # (B, depth) or None
        x = self.stem(images).flatten(2).transpose(1, 2)[:, None]  # (B, 1, N, width): a single window
        for i, block in enumerate(self.blocks):
            x = self.run_block(block, x, None if scales is None else scales[:, i : i + 1])
        return self.head(self.norm(x).mean(dim=(1, 2)))  # (B, num_classes)

    def feature_layout(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        return (PATCH,), (self.norm.normalized_shape[0],)

    def feature_maps(self, images: Tensor, noise: Tensor | None = None) -> list[Tensor]:
        """The tokens after the last block, normalized.

        The token-mixing weights are for the grid of ``image_size``. Other grids are covered by windows of that size, which every
        second block shifts by half a window, as PosMLP does on large images; the paper has no such use.

        Args:
            images: (B, 3, H, W), multiples of 16.
            noise: as in :meth:`class_scores`.

        Returns:
            One map, (B, width, H / 16, W / 16).

        Raises:
            UserError: H or W is not a multiple of 16.
        """
        check_sides(images.shape[-2:], PATCH, of_images=True)
        scales = self.branch_scales(images.shape[0], noise)  # (B, depth) or None
        x = self.stem(images).permute(0, 2, 3, 1)  # (B, rows, columns, width)
        grid, window = (x.shape[1], x.shape[2]), self.image_size // PATCH
        for i, block in enumerate(self.blocks):
            layout = PaddedTiling(grid, window, window // 2 if i % 2 else 0)
            branch_scales = None if scales is None else scales[:, i : i + 1]
            tokens = self.run_block(block, layout.split(x), branch_scales, layout.connected(x.device), None, layout.runs)
            x = layout.join(tokens)
        return [self.normed_map(x, 0)]


register(
    partial(GMLP, depth=30, ratio=6),
    GMLPSwitches,
    "Pay Attention to MLPs (NeurIPS 2021), Table 2; with other maps: PosMLP (ACM MM 2022), Tables 1 and 3",
    {"gmlp_s": (256, "gMLP Small, width 256, 30 blocks", 20, 4.5, 79.6)},
)
