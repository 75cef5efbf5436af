"""PosMLP's layout (Wang et al., ACM MM 2022, Table 11), and the images, windows and groups that suit it."""

from __future__ import annotations

from pipeline.errors import UserError
from pipeline.models.gated_mlp.posmlp_layers import STEM_STRIDE

STRIDE = 32  # of the last stage
DEPTHS = (2, 2, 18, 2)  # blocks per stage, Table 11
RATIOS = (4, 4, 4, 2)  # γ of Table 11
GROUPS = (8, 16, 32, 64)  # s of Table 4


def check_size(image_size: int) -> None:
    """Raise a UserError unless the four stages divide a square image of ``image_size`` pixels."""
    if image_size % STRIDE or image_size < STRIDE:
        raise UserError(
            f"model.image_size is {image_size}, but PosMLP's four stages need a multiple of {STRIDE}",
            f"set it to {max(1, round(image_size / STRIDE)) * STRIDE}",
        )


def check_sides(height: int, width: int, unit: int) -> None:
    """Raise a UserError unless the sides of an image are multiples of ``unit``."""
    for size in (height, width):
        if size % unit or size < unit:
            raise UserError(
                f"an image has {height}x{width} pixels, but PosMLP's features need sides that are multiples of {unit}",
                "pad or resize the images",
            )


def check_windows(windows: list[int] | tuple[int, ...], height: int, width: int) -> None:
    """Raise a UserError unless the windows of each stage tile the tokens of an image."""
    for stage, window in enumerate(windows):
        stride = STEM_STRIDE * 2**stage
        if height % (stride * window) or width % (stride * window):
            raise UserError(
                f"an image of {height}x{width} pixels does not divide into the windows of stage {stage + 1}, whose side is "
                f"{window} tokens",
                f"multiples of {stride * window} pixels are needed, so change model.image_size or model.switches.windows",
            )


def check_groups(groups: tuple[int, ...], widths: list[int], split: bool) -> None:
    """Raise a UserError unless the channel groups divide the mixed channels of each stage."""
    for stage, (count, width, ratio) in enumerate(zip(groups, widths, RATIOS)):
        channels = width * ratio // 2 if split else width * ratio
        if channels % count:
            raise UserError(
                f"model.switches.groups is {count} for stage {stage + 1}, but must divide its {channels} mixed channels",
                f"set it to a power of two, for example {GROUPS[stage]}",
            )
