"""PosMLP-T/S/B (Wang et al., "Parameterization of Cross-Token Relations with Relative Positional Encoding for Vision MLP",
ACM MM 2022; layout: Table 11).

A four-stage pyramid of gated blocks on windows. Where paper and published code differ, this follows the code, so that
``load_reference_state_dict`` can load the authors' weights. Probes of every block: ``position`` and, with ``mixing: ggqpe``,
``covariance`` (:mod:`pipeline.models.gated_mlp.token_mixing`).
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from typing_extensions import Unpack

from pipeline.models.common.base import ModelOptions, VisionModel, check_sides, linear_drop_path, settle
from pipeline.models.common.layers import ModuleList, drop_path_scales, relative_index
from pipeline.models.entry import register
from pipeline.models.gated_mlp.gating import GROUPED, LAYER_NORM_EPS, POSMLP_CODE, GatedBlock
from pipeline.models.gated_mlp.partition import PaddedTiling, Tiling
from pipeline.models.gated_mlp.posmlp_layers import (
    DEPTHS,
    GROUPS,
    RATIOS,
    STEM_STRIDE,
    STRIDE,
    AbsolutePosition,
    ConvMerging,
    ConvStem,
    LinearMerging,
    LinearStem,
    PosMLPSwitches,
    check_groups,
    check_windows,
)
from pipeline.models.gated_mlp.token_mixing import GaussianMap, quadratic_terms


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
    """Vision MLP with positional spatial gating units.

    Args:
        width: channels of the first stage; each further stage doubles them.
        options: see :class:`ModelOptions`. ``image_size``: a multiple of 32. ``forward`` takes other sizes too if the windows tile their
            tokens: with the default windows, multiples of ``image_size``. The feature form takes any multiple of 4: see
            :meth:`feature_maps`. ``activation_checkpointing``: not of the stem, whose BatchNorm would update its statistics twice.

    Raises:
        UserError: ``image_size``, windows or groups do not fit.
    """

    switches: PosMLPSwitches
    reference_switches = frozenset(
        {"mixing", "covariance", "norm", "groups", "windows", "shift_windows", "block_dropout", "head_dropout"}
    )

    def __init__(self, width: int, **options: Unpack[ModelOptions]) -> None:
        settings, switches = settle(options, PosMLPSwitches)
        super().__init__(
            linear_drop_path(settings.drop_path, sum(DEPTHS), branches=1), settings.activation_checkpointing, switches
        )
        image_size = settings.image_size
        self.reference_names = (*(_SGU_NAMES if switches.mixing == "sgu" else _POSGU_NAMES), *_NAMES)
        widths = [width * 2**stage for stage in range(len(DEPTHS))]
        check_sides([image_size], STRIDE)
        windows = switches.windows or (image_size // 16,) * 3 + (image_size // 32,)
        check_windows(windows, image_size, image_size)
        groups = (switches.groups or GROUPS) if switches.mixing in GROUPED else (1,) * len(DEPTHS)
        check_groups(groups, widths, switches.split)

        self.image_size, self.shift_windows = image_size, switches.shift_windows
        self.block_dropout, self.head_dropout = switches.block_dropout, switches.head_dropout
        self.stem = ConvStem(width) if switches.patch_embedding == "convolution" else LinearStem(width)
        side = image_size // STEM_STRIDE
        self.absolute_position = AbsolutePosition(side, width) if switches.absolute_position else nn.Identity()
        merging = ConvMerging if switches.patch_merging == "convolution" else LinearMerging
        self.stages = ModuleList(
            Stage(
                merging(widths[i - 1]) if i else nn.Identity(),
                [
                    GatedBlock(widths[i], RATIOS[i], windows[i], groups[i], switches, POSMLP_CODE, switches.block_dropout)
                    for _ in range(DEPTHS[i])
                ],
                windows[i],
            )
            for i in range(len(DEPTHS))
        )
        self.norm = nn.LayerNorm(widths[-1], eps=LAYER_NORM_EPS)
        self.head = nn.Linear(widths[-1], settings.num_classes)
        self.apply(_init_weights)

    def reference_tables(self) -> dict[str, Tensor]:
        """Per block: the quadratic terms of the relative positions (ggqpe), or the table index of each token pair (lrpe)."""
        tables = {}
        for i, stage in enumerate(self.stages):
            for j, block in enumerate(stage.blocks):
                unit, mixing = f"levels.{i}.encoder.{j}.gate_unit.pos.", block.gate.mixing
                # Cloned: the cached results are shared between blocks, and safetensors rejects shared memory.
                if isinstance(mixing, GaussianMap):
                    spreads = mixing.spreads
                    terms = quadratic_terms(stage.window, spreads.device, spreads.dtype)
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
        blocks = sum(DEPTHS) if self.block_dropout else 0
        channels = self.head.in_features if self.head_dropout and not self.strides else 0
        return super().noise_per_sample, blocks, channels

    def class_scores(self, images: Tensor, noise: Tensor | None = None) -> Tensor:
        """See the base class. H and W are multiples of 32 whose tokens the windows tile."""
        height, width = images.shape[-2:]
        check_windows([stage.window for stage in self.stages], height, width)
        # The stem here, not deeper: `train.compile=model` leaves it out, and ends a graph in every function around its call.
        outputs, for_head = self._run_stages(self.stem(images), noise, self.shift_windows)
        features = self.norm(outputs[-1]).mean(dim=(1, 2))  # (B, 8 * width)
        return self.head(self._dropout(features, for_head))

    def feature_layout(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        strides = tuple(STEM_STRIDE * 2**stage for stage in range(len(DEPTHS)))
        return strides, tuple(stage.blocks[0].norm.normalized_shape[0] for stage in self.stages)

    def feature_maps(self, images: Tensor, noise: Tensor | None = None) -> list[Tensor]:
        """The outputs of the four stages, each normalized.

        The windows keep the size of the training; grids are padded to whole windows. On an image that is larger than
        ``image_size`` on a side, every second block shifts its windows by half a window (Sec. 5.5), so that they do not stay
        apart; at ``image_size`` the last map is what the classifier pools, unless the switch ``shift_windows`` is on.

        Args:
            images: (B, 3, H, W), multiples of 4, or of 32 with the switches for linear embedding or merging.
            noise: as in :meth:`class_scores`.

        Returns:
            (B, 2^i * width, H / (4 * 2^i), W / (4 * 2^i)) for i from 0 to 3, sides rounded up.

        Raises:
            UserError: H or W does not fit.
        """
        height, width = images.shape[-2:]
        unit = STEM_STRIDE if isinstance(self.stages[1].merging, ConvMerging) else STRIDE
        check_sides((height, width), unit, of_images=True)
        outputs, _ = self._run_stages(self.stem(images), noise, self.shift_windows or max(height, width) > self.image_size)
        return [self.normed_map(x, stage) for stage, x in enumerate(outputs)]

    def _run_stages(self, x: Tensor, noise: Tensor | None, shifts: bool) -> tuple[list[Tensor], Tensor]:
        """From what the stem made: outputs (B, rows, columns, width) of all stages, and the head's part of the noise."""
        if noise is None:
            noise = torch.rand(x.shape[0], self.noise_per_sample if self.training else 0, device=x.device)
        counts = self._noise_counts() if self.training else (0, 0, 0)
        for_branches, for_blocks, for_head = noise[:, : sum(counts)].split(counts, dim=1)
        scales = self.branch_scales(x.shape[0], for_branches)  # (B, blocks) or None
        x = self.absolute_position(x)  # (B, H / 4, W / 4, width)
        outputs: list[Tensor] = []
        first = 0
        for stage in self.stages:
            last = first + len(stage.blocks)
            of_stage = None if scales is None else scales[:, first:last]
            x = self._run_stage(stage, stage.merging(x), of_stage, for_blocks[:, first:last], shifts)
            outputs.append(x)
            first = last
        return outputs, for_head

    def _run_stage(self, stage: Stage, x: Tensor, scales: Tensor | None, noise: Tensor, shifts: bool) -> Tensor:
        """x (B, rows, columns, width), scales (B, blocks of this stage) or None, noise (B, blocks or 0) -> the same shape as x."""
        grid = (x.shape[1], x.shape[2])
        shiftable = shifts and max(grid) > stage.window
        for i, block in enumerate(stage.blocks):
            shift = stage.window // 2 if shiftable and i % 2 else 0
            layout = (PaddedTiling if self.strides else Tiling)(grid, stage.window, shift)
            branch_scales = None if scales is None else scales[:, i : i + 1]
            dropout = noise[:, i] if noise.shape[1] else None
            connected = layout.connected(x.device)
            tokens = self.run_block(block, layout.split(x), branch_scales, connected, dropout, layout.runs)
            x = layout.join(tokens)  # (B, rows, columns, width)
        return x

    def _dropout(self, features: Tensor, noise: Tensor) -> Tensor:
        """Dropout on features (B, width) by noise (B, width); (B, 0): no dropout."""
        if not noise.shape[1]:
            return features
        return features * drop_path_scales(torch.full_like(noise, self.head_dropout), noise).to(features.dtype)


def _init_weights(module: nn.Module) -> None:
    if isinstance(module, (nn.Linear, nn.Conv2d)):
        nn.init.trunc_normal_(module.weight, std=0.02)
        if module.bias is not None:
            nn.init.zeros_(module.bias)


register(
    PosMLP,
    PosMLPSwitches,
    "PosMLP (ACM MM 2022), Table 2",
    {
        "posmlp_t": (96, "PosMLP Tiny, width 96", 21, 5.2, 82.1),
        "posmlp_s": (128, "PosMLP Small, width 128", 37, 8.7, 83.0),
        "posmlp_b": (192, "PosMLP Base, width 192", 82, 18.6, 83.6),
    },
)
