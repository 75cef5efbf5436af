"""PerViT-T/S/M (Min et al., "Peripheral Vision Transformer", NeurIPS 2022; layout: Supplement Table S5).

Where paper and published code differ the code is followed, since its weights know nothing else; each such
place says so. ``load_reference_state_dict`` loads the authors' weights.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from pipeline.errors import UserError
from pipeline.models.base import Switches, VisionModel, linear_drop_path, scale_branch
from pipeline.models.layers import MLP, biased_attention, init_linear
from pipeline.models.peripheral import DistanceScales, PeripheralPosition, position_distances
from pipeline.models.registry import register

STEM_STRIDE = 16
LAYER_NORM_EPS = 1e-6


@dataclass(frozen=True)
class PerViTLayout:
    """One row of Supplement Table S5."""

    heads: int
    widths: tuple[int, int, int, int]  # channels of each stage
    stem_widths: tuple[int, int, int, int]
    depths: tuple[int, int, int, int] = (2, 2, 6, 2)
    mlp_ratio: int = 4


class PerViTSwitches(Switches):
    """Ablations of Tables 1, 2, 3, 5 and S3."""


class ConvStem(nn.Module):
    """Convolutional patch embedding: four stride-2 3x3 convolutions with BatchNorm and ReLU, then 1x1.

    ``forward``: (B, 3, H, W) -> (B, width, H / 16, W / 16).
    """

    def __init__(self, widths: tuple[int, ...]) -> None:
        super().__init__()
        channels = (3, *widths)
        self.layers = nn.ModuleList(
            nn.Sequential(
                nn.Conv2d(channels[i], channels[i + 1], 3, stride=2, padding=1), nn.BatchNorm2d(channels[i + 1]), nn.ReLU()
            )
            for i in range(len(widths))
        )
        self.projection = nn.Conv2d(widths[-1], widths[-1], 1)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.projection(x)


class PeripheralAttention(nn.Module):
    """Multi-head peripheral attention (Eq. 1 to 3).

    Normalize[exp(τ Q Kᵀ) ⊙ Φp] V is computed in its identical, cheaper form softmax(τ Q Kᵀ + log Φp) V,
    which runs on the fused attention kernels.

    ``forward``: x (B, N, width), log_phi (heads, N, N) -> (B, N, width).
    """

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.proj = nn.Linear(width, width)

    def forward(self, x: Tensor, log_phi: Tensor) -> Tensor:
        batch, tokens, width = x.shape
        qkv = self.qkv(x).view(batch, tokens, 3, self.heads, width // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)  # (B, heads, N, head_dim) each
        out = biased_attention(q, k, v, log_phi)  # (B, heads, N, head_dim)
        return self.proj(out.transpose(1, 2).reshape(batch, tokens, width))


class Block(nn.Module):
    """Convolutional position encoding and peripheral attention, then an MLP that may change the width.

    As in the authors' code: the CPE (a depthwise 3x3 convolution) sits inside the attention branch before
    the norm and has no residual of its own; the last block of a stage widens in ``fc2`` and passes its
    residual through a linear layer.
    """

    def __init__(self, width: int, out_width: int, heads: int, mlp_ratio: int, layer: int, depth: int) -> None:
        super().__init__()
        self.cpe = nn.Conv2d(width, width, 3, padding=1, groups=width)
        self.norm1 = nn.LayerNorm(width, eps=LAYER_NORM_EPS)
        self.position = PeripheralPosition(heads, layer, depth)  # called by PerViT, once per step
        self.attn = PeripheralAttention(width, heads)
        self.norm2 = nn.LayerNorm(width, eps=LAYER_NORM_EPS)
        self.mlp = MLP(width, mlp_ratio * width, out_width)
        self.residual = nn.Identity() if width == out_width else nn.Linear(width, out_width)

    def forward(self, x: Tensor, log_phi: Tensor, grid: tuple[int, int], branch_scales: Tensor | None) -> Tensor:
        """One transformer block.

        Args:
            x: (B, N, width) tokens in row-major order of ``grid``.
            log_phi: (heads, N, N) of this layer.
            grid: (rows, columns), N = rows * columns.
            branch_scales: (B, 2) stochastic-depth factors of the two branches, or None for 1.

        Returns:
            (B, N, out_width).
        """
        image = x.transpose(1, 2).unflatten(2, grid)  # (B, width, rows, columns)
        position_aware = self.cpe(image).flatten(2).transpose(1, 2)  # (B, N, width)
        attended = self.attn(self.norm1(position_aware), log_phi)
        x = x + scale_branch(attended, branch_scales, 0)
        return self.residual(x) + scale_branch(self.mlp(self.norm2(x)), branch_scales, 1)


class PerViT(VisionModel):
    """Peripheral Vision Transformer.

    Args:
        layout: widths and depths.
        num_classes: outputs of the classifier.
        image_size: a multiple of 16, at least 32. ``forward`` takes other sizes too: the position grid
            follows the image.
        drop_path: stochastic depth rate of the last block; rates grow linearly from 0 (DeiT's rule).
        activation_checkpointing: recompute each block in the backward pass instead of keeping its inner
            activations. The stem is left out: its BatchNorm would update its statistics twice. So is Φp,
            whose size does not depend on the batch.

    Raises:
        UserError: ``image_size`` does not suit the stem.
    """

    # Renames the authors' keys (patterns tried in order, see load_reference_state_dict).
    reference_names = (
        (r"^conv_layers\.conv_layers\.(\d)\.(\d)\.", r"stem.layers.\1.\2."),
        (r"^conv_layers\.conv1x1\.", r"stem.projection."),
        (r"^rpe_proj\.", r"distance_scales."),
        (r"^(blocks\.\d+)\.attn\.activation\.conv(\d)\.", r"\1.position.projection\2."),
        (r"^(blocks\.\d+)\.attn\.activation\.gn(\d)\.", r"\1.position.norm\2."),
        (r"^(blocks\.\d+)\.attn\.to_qkv\.", r"\1.attn.qkv."),
        (r"^(blocks\.\d+)\.conv\.proj\.", r"\1.cpe."),
        (r"^(blocks\.\d+)\.res_path\.", r"\1.residual."),
    )

    def __init__(
        self,
        layout: PerViTLayout,
        num_classes: int = 1000,
        image_size: int = 224,
        drop_path: float = 0.0,
        activation_checkpointing: bool = False,
        switches: PerViTSwitches | None = None,
    ) -> None:
        depth = sum(layout.depths)
        super().__init__(linear_drop_path(drop_path, depth), activation_checkpointing)
        _check_size(image_size, image_size)
        stage_of = [stage for stage, blocks in enumerate(layout.depths) for _ in range(blocks)]
        widths = [layout.widths[stage] for stage in stage_of]
        self.stem = ConvStem(layout.stem_widths)
        self.distance_scales = DistanceScales(4 * layout.heads)
        self.blocks = nn.ModuleList(
            Block(widths[i], widths[min(i + 1, depth - 1)], layout.heads, layout.mlp_ratio, i, depth) for i in range(depth)
        )
        self.norm = nn.LayerNorm(widths[-1], eps=LAYER_NORM_EPS)
        self.head = nn.Linear(widths[-1], num_classes)
        # Residual linears, stem and CPE keep PyTorch's own initialization, as in the authors' code.
        for block in self.blocks:
            block.attn.apply(init_linear)
            block.mlp.apply(init_linear)
        init_linear(self.head)

        self._phi_cache: tuple[tuple, list[Tensor]] | None = None
        self.register_load_state_dict_post_hook(lambda module, _: module._forget_phi())

    def forward(self, images: Tensor, noise: Tensor | None = None) -> Tensor:
        """Class scores.

        Args:
            images: (B, 3, H, W), H and W multiples of 16 and at least 32.
            noise: (B, noise_per_sample) uniform numbers in [0, 1) for stochastic depth. Drawn from PyTorch's
                generator when None; the train loop passes its own, so that they do not depend on the number
                of processes. Unused in eval mode.

        Returns:
            (B, num_classes).

        Raises:
            UserError: H or W does not suit the stem.
        """
        _check_size(*images.shape[-2:])
        x = self.stem(images)  # (B, width, rows, columns)
        grid = (x.shape[2], x.shape[3])
        x = x.flatten(2).transpose(1, 2)  # (B, N, width)
        scales = self.branch_scales(len(x), noise)  # (B, 2 * depth) or None
        for i, (block, log_phi) in enumerate(zip(self.blocks, self.log_phi(grid))):
            x = self.run_block(block, x, log_phi, grid, None if scales is None else scales[:, 2 * i : 2 * i + 2])
        return self.head(self.norm(x).mean(dim=1))

    def token_grid(self, images: Tensor) -> tuple[int, int]:
        """(rows, columns) of tokens that images (B, 3, H, W) give."""
        return images.shape[-2] // STEM_STRIDE, images.shape[-1] // STEM_STRIDE

    def log_phi(self, grid: tuple[int, int]) -> list[Tensor]:
        """log Φp of every layer for a grid of (rows, columns) tokens.

        Computed afresh while gradients flow; in eval mode without gradients the result is kept until a
        parameter or the mode changes.

        Returns:
            ``depth`` tensors (heads, N, N).
        """
        cacheable = not self.training and not torch.is_grad_enabled()
        if cacheable:
            key = (grid, tuple(p._version for p in self.phi_parameters()))
            if self._phi_cache is not None and self._phi_cache[0] == key:
                return self._phi_cache[1]
        # Device and type are asked of a buffer: under ZeRO-3 touching a parameter here would gather it.
        distance = position_distances(*grid, self.drop_path_rates.device, self.drop_path_rates.dtype)
        scale, offset = self.distance_scales()
        maps = [block.position(distance, scale, offset) for block in self.blocks]
        if cacheable:
            self._phi_cache = (key, maps)
        return maps

    def train(self, mode: bool = True) -> PerViT:
        self._forget_phi()
        return super().train(mode)

    def _apply(self, *args, **kwargs) -> PerViT:  # .to(), .half(), ...
        self._forget_phi()
        return super()._apply(*args, **kwargs)

    def _forget_phi(self) -> None:
        self._phi_cache = None

    def phi_parameters(self) -> Iterator[nn.Parameter]:
        """The parameters that Φp is made of, all layers."""
        yield from self.distance_scales.parameters()
        for block in self.blocks:
            yield from block.position.parameters()


def _check_size(height: int, width: int) -> None:
    for size in (height, width):
        if size % STEM_STRIDE or size < 2 * STEM_STRIDE:
            raise UserError(
                f"model.image_size is {size}, but PerViT's stem needs a multiple of {STEM_STRIDE} that is at least "
                f"{2 * STEM_STRIDE}: set it to {max(2, round(size / STEM_STRIDE)) * STEM_STRIDE}."
            )


_PAPER = "Peripheral Vision Transformer (NeurIPS 2022), Supplement Table S5"


@register("PerViT Tiny, 4 heads", paper=_PAPER, switches=PerViTSwitches, paper_params_m=7.6, paper_gmacs=1.6, paper_top1=78.8)
def pervit_t(**options) -> PerViT:
    return PerViT(PerViTLayout(4, (128, 192, 224, 280), (48, 64, 96, 128)), **options)


@register("PerViT Small, 8 heads", paper=_PAPER, switches=PerViTSwitches, paper_params_m=21.3, paper_gmacs=4.4, paper_top1=82.1)
def pervit_s(**options) -> PerViT:
    # The supplement prints 262 as the stem's last width; the published code has 272, as the first stage needs.
    return PerViT(PerViTLayout(8, (272, 320, 368, 464), (64, 128, 192, 272)), **options)


@register(
    "PerViT Medium, 12 heads", paper=_PAPER, switches=PerViTSwitches, paper_params_m=43.7, paper_gmacs=9.0, paper_top1=82.9
)
def pervit_m(**options) -> PerViT:
    return PerViT(PerViTLayout(12, (312, 468, 540, 684), (64, 192, 256, 312)), **options)
