"""gMLP-S (Liu et al., "Pay Attention to MLPs", NeurIPS 2021), the second backbone of PosMLP's Table 1.

Size as in the paper's Table 1; details as in timm's ``gmlp_s16_224``, whose weights ``load_reference_state_dict`` loads. With
``mixing: ggqpe`` and the other maps it is the gMLP column of PosMLP's Tables 1 and 3 (Wang et al., ACM MM 2022).
Probes of every block: ``position`` and, with ``mixing: ggqpe``, ``covariance`` (:mod:`pipeline.models.gated_mlp.token_mixing`).
"""

from functools import partial
from typing import Any, Literal

import torch
from pydantic import PositiveInt
from torch import Tensor, nn

from pipeline.models.common.base import ModelOptions, VisionModel
from pipeline.models.common.layers import NORM_EPS, PATCH, ModuleList, check_sides, check_size
from pipeline.models.common.windows import Tiling
from pipeline.models.gated_mlp.gating import GMLP_CODE, GROUPED, GatedBlock, GatingSwitches, run_in_windows
from pipeline.models.registry import register

TRUNCATED_STD = 0.87962566103423978  # of a normal distribution cut off at two standard deviations
GROUPS = 8  # default channel groups of grouped maps (PosMLP, Table 3)


class GMLPSwitches(GatingSwitches):
    """Ablations of PosMLP's Tables 1 and 3 with gMLP as the backbone; the defaults are gMLP itself."""

    mixing: Literal["sgu", "lrpe_m", "lrpe", "glrpe", "ggqpe"] = "sgu"
    """PosMLP Table 1, the token-mixing map; see :class:`GatingSwitches`."""
    groups: PositiveInt | None = None
    """PosMLP Table 3: channel groups of glrpe and ggqpe, equal in all layers. null: 8."""


class GMLP(VisionModel):
    """Vision MLP with spatial gating units: 16x16 patches, identical blocks that mix all tokens, average pooling, classifier.
    Raises UserError: ``image_size`` or the groups do not fit.

    Args:
        width, ratio: see :class:`~pipeline.models.gated_mlp.gating.GatedBlock`.
        options: ``image_size``: a multiple of 16; ``forward`` takes no other size, because there is a mixing weight per pair of
            tokens, but in the feature form. ``drop_path``: of all blocks.
    """

    image_format = torch.contiguous_format
    switches: GMLPSwitches
    reference_names = (
        ("stem.proj.", "stem."),
        ("blocks.*.mlp_channels.fc*.", "blocks.*.fc*."),
        ("blocks.*.mlp_channels.gate.norm.", "blocks.*.gate.norm."),
        ("blocks.*.mlp_channels.gate.proj.weight", "blocks.*.gate.mixing.weight"),
        ("blocks.*.mlp_channels.gate.proj.bias", "blocks.*.gate.bias"),
    )

    def __init__(self, width: int, depth: int, ratio: int, switches: GMLPSwitches | None = None, **options: Any) -> None:
        switches, settings = switches or GMLPSwitches(), ModelOptions(**options)
        super().__init__([settings.drop_path] * depth, settings.activation_checkpointing, switches)
        check_sides([settings.image_size], PATCH)
        self.image_size, window = settings.image_size, settings.image_size // PATCH
        groups = (switches.groups or GROUPS) if switches.mixing in GROUPED else 1
        self.stem = nn.Conv2d(3, width, PATCH, stride=PATCH)
        self.blocks = ModuleList(GatedBlock(width, ratio, window, groups, switches, GMLP_CODE) for _ in range(depth))
        self.norm = nn.LayerNorm(width, eps=NORM_EPS)
        self.head = nn.Linear(width, settings.num_classes)
        # As in timm: Xavier weights and near-zero biases in the blocks, zero-initialized classifier.
        for block in self.blocks:
            for linear in (block.fc1, block.fc2):
                nn.init.xavier_uniform_(linear.weight)
                nn.init.normal_(linear.bias, std=1e-6)
        fan_in = 3 * PATCH * PATCH
        nn.init.trunc_normal_(self.stem.weight, std=fan_in**-0.5 / TRUNCATED_STD)  # LeCun initialization, as timm computes it
        for zeros in (self.stem.bias, self.head.weight, self.head.bias):
            nn.init.zeros_(zeros)  # type: ignore[arg-type]  # the stem has a bias

    def class_scores(self, images: Tensor, noise: Tensor | None = None) -> Tensor:
        """See the base class. The size is ``image_size``."""
        check_size(images, self.image_size)
        return self.head(self.norm(self._run_blocks(images, noise)).mean(dim=(1, 2)))  # (B, num_classes)

    def feature_maps(self, images: Tensor, noise: Tensor | None = None) -> list[Tensor]:
        """The tokens after the last block, normalized: one map of stride 16. H and W are multiples of 16.

        The token-mixing weights are for the grid of ``image_size``. Other grids are covered by windows of that size, which every
        second block shifts by half a window, as PosMLP does on large images; the paper has no such use.
        """
        check_sides(images.shape[-2:], PATCH, of_images=True)
        return [self.normed_map(self._run_blocks(images, noise), 0)]

    def _run_blocks(self, images: Tensor, noise: Tensor | None) -> Tensor:
        """(B, 3, H, W) -> (B, rows, columns, width) after the last block."""
        x = self.stem(images).permute(0, 2, 3, 1)  # (B, rows, columns, width)
        grid, window = (int(x.shape[1]), int(x.shape[2])), self.image_size // PATCH
        for i, (block, scale) in enumerate(zip(self.blocks, self.block_scales(images.shape[0], noise, branches=1))):
            rows, columns = (window // 2 if i % 2 and size > window else 0 for size in grid)
            x = run_in_windows(self, block, x, Tiling(grid, window, (rows, columns)), scale)
        return x


register(
    partial(GMLP, depth=30, ratio=6),
    GMLPSwitches,
    "Pay Attention to MLPs (NeurIPS 2021), Table 2; with other maps: PosMLP (ACM MM 2022), Tables 1 and 3",
    gmlp_s=(256, "gMLP Small, width 256, 30 blocks", 20, 4.5, 79.6),
)
