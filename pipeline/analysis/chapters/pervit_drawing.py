"""Grids of maps and bars as the chapters on peripheral attention draw them."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from pipeline.analysis.style import MAP_COLORS, layer_head_plots, mark_query, new_figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

PHI = {"phi_p": "$\\Phi_p$", "phi_c": "$\\Phi_c$", "attention": "$\\Phi_a$"}
OWN_SCALE = "each map from its least to its largest value"


def stretched(maps: Tensor) -> Tensor:
    """(..., rows, columns) with each map stretched to [0, 1]; a map of one value, which has nothing to stretch, keeps it."""
    low, high = maps.amin((-2, -1), keepdim=True), maps.amax((-2, -1), keepdim=True)
    flat = high - low <= 1e-6 * high
    return torch.where(flat, maps, (maps - low) / torch.where(flat, 1.0, high - low))


def draw_maps(
    axes: Axes,
    maps: Tensor,
    query: tuple[int, int],
    *,
    rows: Mapping[int, str] | None = None,
    columns: Sequence[str] = (),
    title: str = "",
    notes: Sequence[Sequence[str]] | None = None,
    apart: Collection[int] = (),
) -> None:
    """Maps with colours from 0 to 1, in rows and columns of one axes, each with the query framed.

    Args:
        maps: (rows, columns, h, w).
        rows: number of a row -> its label.
        columns: labels, above; none: no labels.
        title: above them.
        notes: text above each map.
        apart: rows with more space before them.
    """
    zoom = max(1, round(14 / maps.shape[-1]))  # pixels a token: the gaps of small grids are no wider than those of large ones
    maps = maps.repeat_interleave(zoom, -2).repeat_interleave(zoom, -1)
    count, across, height, width = maps.shape
    gap = max(1, round(0.08 * width))
    above = gap + max(1, round(0.2 * height)) if notes else gap
    tops, top = [], 0
    for row in range(count):
        top += (above if row or notes else 0) + (max(2, height // 3) if row in apart else 0)
        tops.append(top)
        top += height
    lefts = [column * (width + gap) for column in range(across)]
    mosaic = torch.full((top, lefts[-1] + width), torch.nan, dtype=torch.float64)
    for row, y in enumerate(tops):
        for column, x in enumerate(lefts):
            mosaic[y : y + height, x : x + width] = maps[row, column]
            if notes:
                axes.text(x + (width - 1) / 2, y - 0.8, notes[row][column], ha="center", va="bottom", fontsize=6)
    axes.imshow(mosaic, cmap=MAP_COLORS, vmin=0, vmax=1, interpolation="nearest", aspect="equal")
    axes.set_title(title)
    axes.set_xticks([x + (width - 1) / 2 for x in lefts] if columns else [], columns)
    rows = rows or {}
    axes.set_yticks([tops[row] + (height - 1) / 2 for row in rows], list(rows.values()))
    axes.tick_params(length=0, top=False, labeltop=True, bottom=False, labelbottom=False)
    axes.spines[:].set_visible(False)
    mark_query(axes, query, [(y, x) for y in tops for x in lefts], zoom)


def map_figure(
    maps: Tensor,
    query: tuple[int, int],
    label: str,
    *,
    title: str = "Layer",
    rows: Mapping[int, str] | None = None,
    notes: Sequence[Sequence[str]] | None = None,
    apart: Collection[int] = (),
) -> Figure:
    """A figure of :func:`draw_maps` with numbered columns and a colour bar. Args: label: of the bar."""
    count, across = maps.shape[:2]
    cell = min(0.8, 7.2 / across)
    figure = new_figure(
        across * cell + (2.0 if rows else 1.2), count * cell * (1.25 if notes else 1.07) + 0.2 * len(apart) + 0.6
    )
    axes = figure.add_subplot()
    draw_maps(axes, maps, query, rows=rows, columns=numbers(across), title=title, notes=notes, apart=apart)
    bar = figure.colorbar(axes.images[0], ax=axes, label=label, fraction=0.03, pad=0.02, aspect=20)
    if label == OWN_SCALE:
        bar.set_ticks([0, 1], labels=["least", "largest"])
    return figure


def numbers(count: int) -> list[str]:
    """Labels of layers or heads, from 1."""
    return [str(number) for number in range(1, count + 1)]


def bars_by_head(panels: Mapping[str, Tensor], ylabel: str, *, one_scale: bool) -> Figure:
    """Bars of the heads and a line of each layer's mean, for values (layers, heads) by title, under each other."""
    figure = layer_head_plots(panels, ylabel, share=False)
    top = max(axes.get_ylim()[1] for axes in figure.axes)
    for axes in figure.axes:
        axes.set_ylim(0, top if one_scale else None)
        legend = axes.get_legend()
        if legend is not None:  # it hides bars; the caption says what it does
            legend.remove()
    return figure
