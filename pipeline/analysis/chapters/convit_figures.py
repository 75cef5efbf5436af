"""Draw the figures of the ConViT chapter."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
from torch import Tensor

from pipeline.analysis.chapters.attention import layer_head_plot
from pipeline.analysis.style import MAP_COLORS, bare, draw_mosaic, gap_of, mark_query, new_figure, numbers, show_image
from pipeline.page import GREY

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_GATE_COLORS = "Reds"  # white: content, red: position
_LOWEST = 1e-5  # attention below it has the lowest colour of a logarithmic scale
_INITIAL_GATE = 0.731  # σ(1)
_ZOOM = 4  # pixels per patch: a quarter of a map, the height of a gate's label, is whole pixels
Gates = Sequence[Sequence[float] | None]  # [layer][head]


def gates(values: Gates, heads: int) -> Figure:
    """Bars of the gates, and their initial value."""
    figure = layer_head_plot(_filled(values, heads), "Gate σ(λ)", ylim=(0, 1), color="#C44E52")
    _reference(figure.axes[0], _INITIAL_GATE)
    return figure


def position_distance(values: Gates, heads: int, initial: float | None) -> Figure:
    """Bars of the positional term's mean distance, and its initial value."""
    figure = layer_head_plot(_filled(values, heads), "Distance (patches)", ylim=(0, None))
    if initial is not None:
        _reference(figure.axes[0], initial)
    return figure


def attention_maps(maps: Tensor, values: Gates, query: tuple[int, int], pixels: Tensor | None = None) -> Figure:
    """Maps of a query by layer and head, their gates above them, and the image.

    Args:
        maps: (layers, heads, rows, columns).
        values: gates of at least these layers.
        query: (row, column).
        pixels: (3, S, S) in [0, 1]; None: without an image.
    """
    from matplotlib.colors import LogNorm

    layers, heads, rows, columns = maps.shape
    cell = min(0.62, max(0.44, 7 / heads))
    left = 2.0 if pixels is not None else 0.0
    figure = new_figure(left + heads * cell * 1.1 + 2.2, layers * cell * 1.26 + 0.7)
    if pixels is None:
        axes = figure.add_subplot()
    else:
        beside, axes = figure.subplots(1, 2, width_ratios=[left, heads * cell * 1.1 + 2.2])
        show_image(beside, pixels, query, rows)
        beside.set_anchor("N")
    height, width = _ZOOM * rows, _ZOOM * columns
    strip = max(_ZOOM, rows)  # height of a gate's label
    tops = [layer * (height + strip) for layer in range(layers)]
    lefts = [head * (width + _ZOOM * gap_of(columns)) for head in range(heads)]
    low = max(float(maps.min()), _LOWEST)
    image = draw_mosaic(
        axes,
        np.maximum(np.kron(maps.double().numpy(), np.ones((_ZOOM, _ZOOM))), low),
        tops,
        lefts,
        query=query,
        side=_ZOOM,
        rows=dict(enumerate(numbers(layers))),
        columns=numbers(heads),
        cmap=MAP_COLORS,
        norm=LogNorm(low, max(float(maps.max()), 1.01 * low)),
    )
    axes.tick_params(labeltop=False, labelbottom=True)
    for top, of_layer in zip(tops, values):
        for place, gate in zip(lefts, of_layer or ()):
            _label(axes, top - 0.5, place - 0.5, width, 0.8 * strip, gate)
    axes.set_ylim(tops[-1] + height - 0.5, -0.5 - strip)
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
    for row, (label, of_row) in enumerate(maps.items()):
        for head in range(heads):
            axes = grid[row, len(pixels) + head]
            axes.imshow(of_row[head].numpy(), cmap=MAP_COLORS, vmin=0, vmax=max(float(of_row.max()), 1e-12))
            bare(axes)
            mark_query(axes, query)
            if row == 0:
                axes.set_title(f"head {head + 1}", fontsize=8)
        grid[row, len(pixels)].set_ylabel(label)
        if pixels and row == 0:
            show_image(grid[0, 0], pixels[0], query, rows)
        elif pixels:
            grid[row, 0].set_axis_off()
    return figure


def _label(axes: Axes, top: float, left: float, width: float, height: float, gate: float) -> None:
    """A gate's value above the map whose corner is given, on its colour."""
    import matplotlib
    from matplotlib.patches import Rectangle

    colour = matplotlib.colormaps[_GATE_COLORS](0.75 * gate)
    axes.add_patch(Rectangle((left, top - height), width, height, facecolor=colour, edgecolor=GREY, linewidth=0.3))
    axes.text(left + width / 2, top - height / 2, f"{gate:.2f}", ha="center", va="center_baseline", fontsize=5)


def _reference(axes: Axes, value: float) -> None:
    axes.axhline(value, color=GREY, linestyle="--", linewidth=1, label="initial value")
    axes.legend(loc="best")


def _filled(values: Gates, heads: int) -> list[list[float]]:
    """Layers without values get NaN for each head, which has no bar."""
    return [[float("nan")] * heads if layer is None else [*layer] for layer in values]
