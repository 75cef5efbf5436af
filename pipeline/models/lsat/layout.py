"""LSAT's layouts (Sheynin et al., 2021, Table 2) and the image sizes that suit them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from pipeline.errors import UserError
from pipeline.models.lsat.shifts import SHIFTS_32, SHIFTS_224, ShiftSet


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


def check_size(size: int, layout: LSATLayout, what: str) -> None:
    """Raise a UserError unless the levels have a token on a side of ``size`` pixels. ``what``: whose side, for the message."""
    coarsest = 2 ** (len(layout.widths) - 1)
    if size % layout.stride or size < layout.stride * coarsest:
        raise UserError(
            f"{what} is {size}, a multiple of {layout.stride} that is at least {layout.stride * coarsest} needed",
            f"set it to {max(coarsest, round(size / layout.stride)) * layout.stride}",
        )


def grid_side(side: int, halvings: int) -> int:
    """Side of the token grid after ``halvings`` of a grid of side ``side``."""
    return -(-side // 2**halvings)  # rounds up, like the padded max pooling
