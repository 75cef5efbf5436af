"""Local shift embeddings of LSAT: every patch is embedded from T slightly shifted images (Sheynin et al., 2021, Sec. 3.1)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import cycle
from math import isqrt
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from pipeline.models.common.features import GridEmbedding, resample_grid

Shift = tuple[int, int]  # pixels (down, right) by which the image's content moves
ShiftFunction = Callable[[Tensor, Shift], Tensor]


def roll(image: Tensor, shift: Shift) -> Tensor:
    """(B, 3, H, W) shifted circularly."""
    return image.roll(shift, dims=(2, 3))


def pad_circularly(image: Tensor, shift: Shift) -> Tensor:
    """(B, 3, H, W) shifted circularly, keeping the content that moves past the bottom and right borders.

    A convolution without padding sees the same as with :func:`roll`. A padded one sees the image's last rows and columns in
    place of zeros, as in the published code at 224 pixels.

    Returns:
        (B, 3, H + down, W + right).
    """
    down, right = shift
    return F.pad(image, (right, 0, down, 0), mode="circular") if down or right else image


def translate(image: Tensor, shift: Shift) -> Tensor:
    """(B, 3, H, W) shifted with reflection padding (Sec. 4.1)."""
    (down, right), (height, width) = shift, image.shape[2:]
    padded = F.pad(image, (max(right, 0), max(-right, 0), max(down, 0), max(-down, 0)), mode="reflect")
    top, left = max(-down, 0), max(-right, 0)
    return padded[:, :, top : top + height, left : left + width]


@dataclass(frozen=True)
class ShiftSet:
    """A list of shifts and the way an image is shifted."""

    shifts: tuple[Shift, ...]  # the first is (0, 0), the image itself
    shift_image: ShiftFunction

    def along_one_axis(self) -> ShiftSet:
        """The subset without diagonal shifts."""
        return replace(self, shifts=tuple(shift for shift in self.shifts if 0 in shift))

    def image_itself(self) -> ShiftSet:
        """The subset of the unshifted image alone."""
        return replace(self, shifts=self.shifts[:1])

    def by_translation(self) -> ShiftSet:
        """The same shifts with reflection instead of circular padding."""
        return replace(self, shift_image=translate)


# The paper's sets (Sec. 4), in the published code's order and with its padding.
SHIFTS_224 = ShiftSet(((0, 0), (0, 1), (0, 2), (0, 3), (1, 0), (2, 0), (3, 0), (1, 1), (2, 2), (3, 3)), pad_circularly)
SHIFTS_32 = ShiftSet(
    (
        *((0, 0), (1, 0), (0, 1), (-1, 0), (0, -1), (2, 0), (0, 2), (-2, 0), (0, -2)),
        *((1, 1), (1, 2), (1, -1), (-1, 1), (-1, 2), (-1, -1), (2, 1), (2, 2), (2, -1)),
    ),
    roll,
)


class ShiftEmbedding(nn.Module):
    """Patch embeddings of T shifted images (Sec. 3.1), with a convolution per shift or a shared one.

    Args:
        shift_set: T shifts.
        projections: T convolutions, or a single one.

    ``forward``: (B, 3, H, W) -> (B, N, T, width), N patches in row-major order.
    """

    def __init__(self, shift_set: ShiftSet, projections: Sequence[nn.Conv2d]) -> None:
        super().__init__()
        self.shift_set = shift_set
        self.projections = nn.ModuleList(projections)

    def forward(self, images: Tensor) -> Tensor:
        maps = [
            projection(self.shift_set.shift_image(images, shift)).flatten(2).transpose(1, 2)  # (B, N, width)
            for shift, projection in zip(self.shift_set.shifts, cycle(self.projections))
        ]
        return torch.stack(maps, dim=2)  # (B, N, T, width)


class PositionEmbedding(GridEmbedding):
    """Learned position embedding of shape (T, N, width), or (N, width) shared by the variants.

    A module of its own, so that ZeRO-3 gathers the table. N is a square number: images are square, but in the feature form.
    ``forward``: x (B, N, T, width), grid (rows, columns) of its patches -> the same shape.
    """

    def __init__(self, *shape: int) -> None:
        super().__init__()
        self.table = nn.Parameter(nn.init.trunc_normal_(torch.empty(shape), std=0.02))

    def forward(self, x: Tensor, grid: tuple[int, int]) -> Tensor:
        table = self.table if self.table.ndim == 3 else self.table[None]  # (T or 1, N, D)
        if self.any_grid:
            side = isqrt(table.shape[1])
            table = resample_grid(table, (side, side), grid)
        return x + table.transpose(0, 1)


@dataclass(frozen=True)
class LSATLayout:
    """A column of Table 2: width, heads and depth per level; the first level's depth includes the local block."""

    widths: tuple[int, ...]
    heads: tuple[int, ...]
    depths: tuple[int, ...]
    kernel: int  # of the patch embedding, as stride and padding
    stride: int
    padding: int
    shifts: ShiftSet
    kv_heads: Literal["shared", "per_head"]


def layout_224(
    widths: tuple[int, ...], heads: tuple[int, ...], depths: tuple[int, ...], kernel: int, stride: int, padding: int
) -> LSATLayout:
    """A layout at 224 pixels."""
    return LSATLayout(widths, heads, depths, kernel, stride, padding, SHIFTS_224, kv_heads="per_head")


def layout_32(width: int, heads: int, depths: tuple[int, ...]) -> LSATLayout:
    """A layout at 32 pixels: four levels of equal width."""
    return LSATLayout((width,) * 4, (heads,) * 4, depths, 3, 1, 1, SHIFTS_32, kv_heads="shared")


def grid_side(side: int, halvings: int) -> int:
    """Side of the token grid after ``halvings`` of a grid of side ``side``."""
    return -(-side // 2**halvings)  # rounds up, like the padded max pooling
