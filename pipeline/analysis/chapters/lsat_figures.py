"""Draw the figures of :mod:`pipeline.analysis.chapters.lsat`. All arrays are tensors on the CPU."""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import Tensor

from pipeline.analysis.chapter import Example
from pipeline.analysis.chapters.attention import layer_head_plot
from pipeline.analysis.chapters.gated_mlp_figures import mark_stages
from pipeline.analysis.style import MAP_COLORS, image_grid, legend_beside, map_grid, mark_query, new_figure, numbers, overlay
from pipeline.page import GREY

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


def place_name(shift: Any) -> str:
    """Where a variant's patch lies, pixels down and right of the unshifted one: "0, 0", "-1, +2"."""
    return ", ".join(_signed(-int(each)) for each in shift)


def _signed(value: int) -> str:
    return f"{value:+d}" if value else "0"


def shift_planes(weights: Tensor, shifts: Tensor) -> Figure:
    """Per head, the variants on the plane of their offsets. Args: weights: (heads, T); shifts: (T, 2)."""
    offsets = -shifts.numpy()  # where the patch lies
    top, left = offsets.min(0)
    rows, columns = offsets.max(0) - offsets.min(0) + 1
    across = min(len(weights), 4)
    down = ceil(len(weights) / across)
    figure = new_figure(2.1 * across + 0.9, 2.3 * down * max(rows / columns, 0.6))
    grid = figure.subplots(down, across, squeeze=False)
    lowest, highest = float(weights.min()), float(weights.max())
    for axes in grid.flat:
        axes.set_axis_off()
    image = None
    for head, (axes, of_head) in enumerate(zip(grid.flat, weights.numpy()), start=1):
        plane = np.full((rows, columns), np.nan)
        plane[offsets[:, 0] - top, offsets[:, 1] - left] = of_head
        axes.set_axis_on()
        axes.spines[:].set_visible(False)
        image = axes.imshow(plane, cmap=MAP_COLORS, vmin=lowest, vmax=highest)
        for (y, x), weight in zip(offsets, of_head):
            color = "black" if weight > lowest + 0.6 * (highest - lowest) else "white"
            axes.text(x - left, y - top, f"{100 * weight:.1f}", ha="center", va="center", fontsize=7, color=color)
        mark_query(axes, (-top, -left))
        axes.set_xticks(range(columns), [_signed(left + i) for i in range(columns)])
        axes.set_yticks(range(rows), [_signed(top + i) for i in range(rows)])
        axes.tick_params(length=0)
        axes.set_title(f"head {head}", fontsize=9)
    for axes in grid[:, 0]:
        axes.set_ylabel("pixels down")
    for axes in grid[-1]:
        axes.set_xlabel("pixels right")
    assert image is not None
    figure.colorbar(image, ax=grid.ravel().tolist(), label="weight, %", format=lambda value, _: f"{100 * value:g}", aspect=25)
    return figure


def shift_maps(weights: Tensor, shifts: Tensor) -> Figure:
    """Weights of every patch. Args: weights: (heads, T, rows, columns); shifts: (T, 2)."""
    return map_grid(
        weights,
        numbers(len(weights)),
        [place_name(each) for each in shifts],
        label="weight",
        xlabel="Place of the variant, pixels down, right",
        ylabel="Head",
        cell=max(0.6, 8 / len(shifts)),
    )


def offsets_on_images(examples: Sequence[Example], offsets: Sequence[Tensor]) -> Figure:
    """Each image, and on it the mean offset of every patch by head. Args: offsets: per example (heads, rows, columns, 2), pixels."""
    heads = min(offsets[0].shape[0], 8)
    longest = max(float(each.norm(dim=-1).max()) for each in offsets) or 1.0
    pictures = [
        [example.pixels, *(overlay(example.pixels, each[head].norm(dim=-1), limits=(0.0, longest)) for head in range(heads))]
        for example, each in zip(examples, offsets)
    ]
    columns = ["image", *(f"head {head + 1}" for head in range(heads))]
    figure = image_grid(pictures, [each.label for each in examples], columns, cell=max(1.1, 7.5 / (heads + 1)))
    for place, of_image in enumerate(offsets):
        for head in range(heads):
            _arrows(figure.axes[place * (heads + 1) + 1 + head], of_image[head], examples[place].pixels.shape[-1], longest)
    _color_bar(figure, 0.0, longest, "mean offset, pixels")
    return figure


def _arrows(axes: Axes, offsets: Tensor, size: int, longest: float) -> None:
    """Arrows of (rows, columns, 2) on an image of ``size`` pixels, at most 12 along a side: means over blocks of patches."""
    rows = offsets.shape[0]
    block = ceil(rows / 12)
    ends = [range(first, min(first + block, rows)) for first in range(0, rows, block)]
    means = np.array([[offsets[y.start : y.stop, x.start : x.stop].mean((0, 1)).tolist() for x in ends] for y in ends])
    centers = np.array([(each.start + each.stop) / 2 for each in ends]) * size / rows - 0.5
    x, y = np.meshgrid(centers, centers)
    scale = longest / (0.9 * block * size / rows)  # the longest arrow is as long as its block
    axes.quiver(
        x, y, means[..., 1], means[..., 0], color="white", angles="xy", scale_units="xy", scale=scale, pivot="mid", width=0.011
    )


def weights_on_image(example: Example, weights: Tensor, shifts: Tensor) -> Figure:
    """An image, and on it each variant's weights by head. Args: weights: (heads, T, rows, columns); shifts: (T, 2)."""
    heads = min(len(weights), 6)
    limits = (float(weights.min()), float(weights.max()))
    pictures = [
        [example.pixels, *(overlay(example.pixels, each, limits=limits) for each in weights[head])] for head in range(heads)
    ]
    columns = ["image", *(place_name(each) for each in shifts)]
    figure = image_grid(pictures, [f"head {head + 1}" for head in range(heads)], columns, cell=0.66)
    _color_bar(figure, *limits, "weight")
    return figure


def _color_bar(figure: Figure, lowest: float, highest: float, label: str) -> None:
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import Normalize

    figure.colorbar(
        ScalarMappable(Normalize(lowest, highest), MAP_COLORS), ax=figure.axes, label=label, fraction=0.03, pad=0.01, aspect=25
    )


def distances(values: Sequence[Tensor], equal: Sequence[float], levels: Sequence[int], first: int) -> Figure:
    """Mean attention distance of the global layers.

    Args:
        values: per layer (heads,).
        equal: per layer, of equal weights.
        levels: of the layers.
        first: layers before them, which are not drawn.
    """
    figure = layer_head_plot(values, "mean distance, patches")
    axes = figure.axes[0]
    for place, value in enumerate(equal, start=1):
        label = "equal attention" if place == 1 else None
        axes.plot([place - 0.45, place + 0.45], [value, value], "--", color=GREY, linewidth=1.0, label=label)
    axes.set_xticks(range(1, len(values) + 1), [str(first + i) for i in range(1, len(values) + 1)])
    mark_stages(axes, levels, "level")
    legend_beside(axes)
    return figure
