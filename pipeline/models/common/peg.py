"""Conditional position encoding (Chu et al., "Conditional Positional Encodings for Vision Transformers", ICLR 2023; CPVT)."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

_KERNEL = 3


class PositionGenerator(nn.Conv2d):
    """Position encoding generator (PEG): a depthwise 3x3 convolution of the patch tokens with a residual connection.

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
