"""Figures of the ConViT chapter."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import Tensor

from pipeline.analysis.style import GREY, MAP_COLORS, layer_head_plot, mark_query, new_figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_GATE_COLORS = "Reds"  # white: content, red: position
_LOWEST = 1e-5  # attention below it has the lowest colour of a logarithmic scale
_INITIAL_GATE = 0.731  # σ(1)
Gates = Sequence[Sequence[float] | None]  # [layer][head]


def gates(values: Gates, heads: int) -> Figure:
    """Bars of the gates, and their initial value."""
    figure = layer_head_plot(_filled(values, heads), "Gate σ(λ)", ylim=(0, 1), color="#C44E52")
    _reference(figure.axes[0], _INITIAL_GATE, "initial value")
    return figure


def position_distance(values: Gates, heads: int, initial: float | None) -> Figure:
    """Bars of the positional term's mean distance, and its initial value."""
    figure = layer_head_plot(_filled(values, heads), "Distance (patches)", ylim=(0, None))
    if initial is not None:
        _reference(figure.axes[0], initial, "initial value")
    return figure


def attention_maps(maps: Tensor, values: Gates, query: tuple[int, int], pixels: Tensor | None = None) -> Figure:
    """Maps of a query by layer and head, their gates above them, and the image.

    Args:
        maps: (layers, heads, rows, columns).
        values: gates of at least these layers.
        query: (row, column).
        pixels: (3, S, S) in [0, 1]; None: without an image.
    """
    layers, heads, rows, columns = maps.shape
    cell = min(0.62, max(0.44, 7 / heads))
    left = 2.0 if pixels is not None else 0.0
    figure = new_figure(left + heads * cell * 1.1 + 2.2, layers * cell * 1.26 + 0.7)
    if pixels is None:
        axes = figure.add_subplot()
    else:
        beside, axes = figure.subplots(1, 2, width_ratios=[left, heads * cell * 1.1 + 2.2])
        _show_image(beside, pixels, query, rows)
        beside.set_anchor("N")
    strip, gap = max(1.0, 0.25 * rows), max(1, round(0.08 * columns))  # strip: height of a gate's label, in patches
    labels = [(layer, head) for layer in range(layers) for head in range(heads) if values[layer] is not None]
    pitch_y, pitch_x = rows + strip, columns + gap
    corners = [(layer * pitch_y, head * pitch_x) for layer in range(layers) for head in range(heads)]
    image = _draw_maps(axes, maps.flatten(0, 1).double().numpy(), corners)
    mark_query(axes, query, [(top, left) for top, left in corners])
    for layer, head in labels:
        gate = values[layer][head]  # type: ignore[index]
        _label(axes, layer * pitch_y - 0.5, head * pitch_x - 0.5, columns, strip * 0.8, gate)
    axes.set_xlim(-0.5, heads * pitch_x - gap - 0.5)
    axes.set_ylim(layers * pitch_y - strip - 0.5, -0.5 - strip)
    axes.set_xticks([head * pitch_x + (columns - 1) / 2 for head in range(heads)], [str(head + 1) for head in range(heads)])
    axes.set_yticks([layer * pitch_y + (rows - 1) / 2 for layer in range(layers)], [str(layer + 1) for layer in range(layers)])
    axes.set(xlabel="Head", ylabel="Layer")
    extend = "min" if float(maps.min()) < _LOWEST else "neither"
    figure.colorbar(image, ax=axes, label="Attention (logarithmic)", fraction=0.04, pad=0.02, aspect=30, extend=extend)
    return figure


def initial_positions(maps: Mapping[str, Tensor], query: tuple[int, int], pixels: Sequence[Tensor]) -> Figure:
    """Maps (heads, rows, columns) of each row's label, each row on a scale of its own, and the image if there is one."""
    heads, rows, _ = next(iter(maps.values())).shape
    cell = min(1.3, max(0.5, 7 / (heads + 1)))
    columns = heads + len(pixels)
    figure = new_figure(columns * cell + 0.9, len(maps) * (cell + 0.1) + 0.4)
    grid = figure.subplots(len(maps), columns, squeeze=False)
    for row, (label, each) in enumerate(maps.items()):
        for head in range(heads):
            axes = grid[row, len(pixels) + head]
            axes.imshow(each[head].numpy(), cmap=MAP_COLORS, vmin=0, vmax=max(float(each.max()), 1e-12))
            _bare(axes)
            mark_query(axes, query)
            if row == 0:
                axes.set_title(f"head {head + 1}", fontsize=8)
        grid[row, len(pixels)].set_ylabel(label)
        if pixels and row == 0:
            _show_image(grid[0, 0], pixels[0], query, rows)
        elif pixels:
            grid[row, 0].set_axis_off()
    return figure


def _draw_maps(axes: Axes, maps: np.ndarray, corners: Sequence[tuple[float, float]]) -> Any:
    """Draw (maps, rows, columns) with their first pixels at (top, left) corners, on one logarithmic scale."""
    from matplotlib.colors import LogNorm

    image = None
    low = max(float(maps.min()), _LOWEST)
    high = max(float(maps.max()), 1.01 * low)
    for values, (top, left) in zip(maps, corners):
        rows, columns = values.shape
        extent = (left - 0.5, left + columns - 0.5, top + rows - 0.5, top - 0.5)
        clipped = np.maximum(values, low)
        image = axes.imshow(clipped, cmap=MAP_COLORS, norm=LogNorm(low, high), extent=extent, interpolation="nearest")
    axes.set_aspect("equal")
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)
    return image


def _label(axes: Axes, top: float, left: float, width: float, height: float, gate: float) -> None:
    """A gate's value above the map whose corner is given, on its colour."""
    import matplotlib
    from matplotlib.patches import Rectangle

    colour = matplotlib.colormaps[_GATE_COLORS](0.75 * gate)
    axes.add_patch(Rectangle((left, top - height), width, height, facecolor=colour, edgecolor=GREY, linewidth=0.3))
    axes.text(left + width / 2, top - height / 2, f"{gate:.2f}", ha="center", va="center_baseline", fontsize=5)


def _show_image(axes: Axes, pixels: Tensor, query: tuple[int, int], rows: int) -> None:
    axes.imshow(pixels.permute(1, 2, 0).clamp(0, 1).numpy())
    _bare(axes)
    mark_query(axes, query, side=pixels.shape[-1] / rows)


def _bare(axes: Axes) -> None:
    axes.set_xticks([])
    axes.set_yticks([])
    axes.spines[:].set_visible(False)


def _reference(axes: Axes, value: float, label: str) -> None:
    axes.axhline(value, color=GREY, linestyle="--", linewidth=1, label=label)
    axes.legend(loc="best")


def _filled(values: Gates, heads: int) -> list[list[float]]:
    """Layers without values get NaN for each head, which has no bar."""
    return [[float("nan")] * heads if layer is None else [*layer] for layer in values]
