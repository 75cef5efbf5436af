"""Look of the figures, and those that chapters share: grids of maps, bars per layer and head, curves, attention on an image.

Every figure is made with :func:`new_figure`, within :func:`style`; there is no display and no global state of pyplot. Arrays are
NumPy arrays or tensors on the CPU. Layers and heads are counted from 1 in labels. Colours can be told apart without red and
green (Okabe and Ito; viridis).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from pipeline.analysis.look import (
    BLUE,
    COLORS,
    DIVERGING_COLORS,
    GREEN,
    GREY,
    MAP_COLORS,
    ORANGE,
    PINK,
    RED,
    SKY,
    YELLOW,
    bare,
    mark_query,
    new_figure,
    show,
    style,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = [  # those of look, too
    "BLUE", "COLORS", "DIVERGING_COLORS", "GREEN", "GREY", "MAP_COLORS", "ORANGE", "PINK", "RED", "SKY", "YELLOW",
    "curves", "image_grid", "layer_head_plot", "layer_head_plots", "map_grid", "mark_query", "new_figure", "overlay", "style",
]  # fmt: skip


def map_grid(
    maps: Any,
    row_labels: Sequence[str],
    column_labels: Sequence[str],
    *,
    label: str,
    title: str = "",
    xlabel: str = "",
    ylabel: str = "",
    query: tuple[int, int] | None = None,
    limits: tuple[float, float] | None = None,
    log: bool = False,
    colors: str = MAP_COLORS,
    cell: float | None = None,
    picture: Any = None,
) -> Figure:
    """Heat maps in rows and columns, with one colour bar for all.

    Args:
        maps: (rows, columns, h, w); NaN: left white, as for a head that a layer does not have.
        row_labels, column_labels: one each.
        label: of the colour bar, with the unit.
        query: (row, column) of a patch that each map marks.
        limits: of the colours (default: the smallest and the largest value).
        log: logarithmic colours; values of 0 and below take the lowest colour.
        cell: side of a map in inches (default: what makes the grid about 7 inches wide).
        picture: (3, H, W) in [0, 1], shown at the left with the query marked.
    """
    from matplotlib.colors import LogNorm, Normalize

    maps = np.asarray(maps, dtype=np.float64)
    rows, columns, height, width = maps.shape
    gap = max(1, round(0.08 * width))
    mosaic = np.full((rows * (height + gap) - gap, columns * (width + gap) - gap), np.nan)
    for row in range(rows):
        for column in range(columns):
            top, left = row * (height + gap), column * (width + gap)
            mosaic[top : top + height, left : left + width] = maps[row, column]
    shown = mosaic[np.isfinite(mosaic) & (mosaic > 0 if log else True)]
    low, high = limits or ((float(shown.min()), float(shown.max())) if shown.size else (0.0, 1.0))
    if high <= low:  # maps of one value
        high = low + max(abs(low), 1.0) * 1e-6
    if log:
        low = max(low, high * 1e-12)
        mosaic = np.where(mosaic <= low, low, mosaic)

    cell = cell or min(1.5, max(0.5, 7 / columns))
    side = 0.0 if picture is None else 2.0
    figure = new_figure(columns * cell + 1.6 + side, max(rows * cell * height / width, side) + 0.7)
    if picture is None:
        axes = figure.add_subplot()
    else:
        beside, axes = figure.subplots(1, 2, width_ratios=(side, columns * cell))
        show(beside, picture)
        beside.set_anchor("N")
        if query is not None:
            mark_query(beside, query, side=np.shape(picture)[-1] / width)
    image = axes.imshow(
        mosaic, cmap=colors, norm=(LogNorm if log else Normalize)(low, high), interpolation="nearest", aspect="equal"
    )
    axes.set_xticks([column * (width + gap) + (width - 1) / 2 for column in range(columns)], column_labels)
    axes.set_yticks([row * (height + gap) + (height - 1) / 2 for row in range(rows)], row_labels)
    axes.tick_params(length=0, top=False, labeltop=True, bottom=False, labelbottom=False)
    axes.spines[:].set_visible(False)
    if xlabel:
        axes.set_xlabel(xlabel)
        axes.xaxis.set_label_position("top")
    axes.set_ylabel(ylabel)
    if title:
        figure.suptitle(title, fontsize=10)
    if query is not None:
        mark_query(
            axes, query, [(row * (height + gap), column * (width + gap)) for row in range(rows) for column in range(columns)]
        )
    figure.colorbar(image, ax=axes, label=label, fraction=0.03, pad=0.02, aspect=30)
    return figure


def layer_head_plot(
    values: Any,
    ylabel: str,
    title: str = "",
    *,
    log: bool = False,
    ylim: tuple[float | None, float | None] = (None, None),
    color: str = BLUE,
    axes: Axes | None = None,
) -> Figure:
    """One bar per head, grouped by layer, with a line through the layers' means, as PerViT's Fig. 7 and 8.

    Args:
        values: (layers, heads), or a list of layers with different numbers of heads; what is not finite has no bar.
        ylabel: quantity and unit.
        log: logarithmic axis.
        axes: to draw into (default: a figure of its own).
    """
    if axes is None:
        axes = new_figure(max(5.0, 0.55 * len(values) + 1.0), 2.8).add_subplot()
    means = []
    for layer, each in enumerate(values, start=1):
        heads = np.asarray(each, dtype=np.float64)
        finite = np.isfinite(heads)
        width = 0.8 / len(heads)
        places = layer - 0.4 + width * (np.arange(len(heads)) + 0.5)
        axes.bar(places[finite], heads[finite], width * 0.9, color=_lighter(color), linewidth=0)
        means.append(heads[finite].mean() if finite.any() else np.nan)
    axes.plot(range(1, len(means) + 1), means, color="black", marker="o", markersize=3, label="mean of the heads")
    axes.set_xticks(range(1, len(means) + 1))
    axes.set_xlim(0.4, len(means) + 0.6)
    if log:
        axes.set_yscale("log")
    axes.set_ylim(*ylim)
    axes.grid(axis="y")
    axes.set(xlabel="Layer", ylabel=ylabel, title=title)
    axes.legend(loc="lower right", bbox_to_anchor=(1.0, 1.0), borderaxespad=0.1)
    figure = axes.get_figure(root=True)
    assert figure is not None
    return figure


def layer_head_plots(panels: Mapping[str, Any], ylabel: str, *, log: bool = False, share: bool = True) -> Figure:
    """Several of :func:`layer_head_plot` under each other, one colour each. Args: panels: title -> values; share: one y axis for all."""
    layers = max(len(values) for values in panels.values())
    figure = new_figure(max(5.0, 0.55 * layers + 1.0), 2.3 * len(panels) + 0.2)
    grid = figure.subplots(len(panels), 1, sharex=True, sharey=share, squeeze=False)
    for axes, (title, values), color in zip(grid[:, 0], panels.items(), COLORS * 9, strict=False):
        layer_head_plot(values, ylabel, title, log=log, color=color, axes=axes)
        if axes is not grid[-1, 0]:
            axes.set_xlabel("")
    return figure


def curves(
    lines: Mapping[str, tuple[Any, Any]],
    xlabel: str,
    ylabel: str,
    title: str = "",
    *,
    ordered: bool = False,
    log: bool = False,
    legend: Literal["right", "inside", "none"] = "right",
    axes: Axes | None = None,
) -> Figure:
    """Lines over one axis.

    Args:
        lines: label -> (x, y), each (points,).
        ordered: the lines are a sequence (layers, steps): colours from dark to light instead of one of each kind.
        log: logarithmic y axis.
        legend: beside the axes, inside, or none.
        axes: to draw into (default: a figure of its own).
    """
    import matplotlib

    if axes is None:
        axes = new_figure(7.0, 3.4).add_subplot()
    shades = matplotlib.colormaps[MAP_COLORS](np.linspace(0.0, 0.9, max(len(lines), 2)))
    for index, (label, (x, y)) in enumerate(lines.items()):
        color = shades[index] if ordered or len(lines) > len(COLORS) else COLORS[index]
        axes.plot(np.asarray(x), np.asarray(y), color=color, label=label)
    if log:
        axes.set_yscale("log")
    axes.grid()
    axes.set(xlabel=xlabel, ylabel=ylabel, title=title)
    if legend == "right":
        axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5))
    elif legend == "inside":
        axes.legend(loc="lower right", bbox_to_anchor=(1.0, 1.0), borderaxespad=0.1)
    figure = axes.get_figure(root=True)
    assert figure is not None
    return figure


def overlay(image: Any, attention: Any, *, limits: tuple[float, float] | None = None, colors: str = MAP_COLORS) -> np.ndarray:
    """Attention on an image: grey where nothing is attended, coloured by the map.

    Args:
        image: (3, H, W) in [0, 1].
        attention: (h, w), H and W multiples of them; each value colours its patch.
        limits: of the colours (default: 0 and the largest value).

    Returns:
        (H, W, 3) in [0, 1].
    """
    import matplotlib

    pixels = np.asarray(image, dtype=np.float64).transpose(1, 2, 0)  # (H, W, 3)
    values = np.asarray(attention, dtype=np.float64)
    low, high = limits or (0.0, float(np.nanmax(values)))
    shares = np.clip((values - low) / ((high - low) or 1.0), 0, 1)
    tiled = np.kron(shares, np.ones((pixels.shape[0] // values.shape[0], pixels.shape[1] // values.shape[1])))  # (H, W)
    tint = matplotlib.colormaps[colors](tiled)[..., :3]  # (H, W, 3)
    grey = pixels @ np.array([0.299, 0.587, 0.114])
    blended: np.ndarray = 0.45 * grey[..., None] + 0.55 * tint
    return blended


def image_grid(
    images: Sequence[Sequence[Any]],
    row_labels: Sequence[str],
    column_labels: Sequence[str],
    *,
    title: str = "",
    query: tuple[int, int] | None = None,
    patches: int | None = None,
    cell: float | None = None,
) -> Figure:
    """Pictures in rows and columns, such as an image and its overlays.

    Args:
        images: rows of columns of (H, W, 3) or (3, H, W) in [0, 1]; None: left white.
        query: (row, column) of a patch that every picture marks; needs ``patches``.
        patches: along a side of the image.
        cell: side of a picture in inches (default: what makes the grid about 8 inches wide).
    """
    rows, columns = len(images), max(len(row) for row in images)
    cell = cell or min(1.8, max(0.7, 8 / columns))
    figure = new_figure(columns * cell + 1.0, rows * cell + 0.5)
    grid = figure.subplots(rows, columns, squeeze=False, gridspec_kw={"wspace": 0.03, "hspace": 0.03})
    for place, axes in np.ndenumerate(grid):
        bare(axes)
        if place[0] == 0:
            axes.set_title(column_labels[place[1]], fontsize=8)
        if place[1] == 0:
            axes.set_ylabel(row_labels[place[0]], fontsize=8)
        picture = images[place[0]][place[1]] if place[1] < len(images[place[0]]) else None
        if picture is None:
            continue
        height = show(axes, picture)
        if query is not None and patches:
            mark_query(axes, query, side=height / patches)
    if title:
        figure.suptitle(title, fontsize=10)
    return figure


def _lighter(color: str) -> tuple[float, ...]:
    """Half way to white; not transparent, so that no grid shows through."""
    from matplotlib.colors import to_rgb

    return tuple((1 + channel) / 2 for channel in to_rgb(color))
