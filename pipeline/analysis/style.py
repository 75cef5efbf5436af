"""Look of the figures, and those that chapters share: grids of maps, bars per layer and head, curves, attention on an image.

Every figure is made with :func:`new_figure`, within :func:`style`; there is no display and no global state of pyplot. Arrays are
NumPy arrays or tensors on the CPU. Layers and heads are counted from 1 in labels. Colours can be told apart without red and
green (Okabe and Ito; viridis).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from pipeline.errors import UserError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

BLUE, ORANGE, GREEN, PINK, SKY, RED, YELLOW, GREY = (
    "#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#F0E442", "#6E6E6E",
)  # fmt: skip
COLORS = (BLUE, ORANGE, GREEN, PINK, SKY, RED, GREY)  # of categories, in this order
MAP_COLORS = "viridis"  # of attention, low to high
DIVERGING_COLORS = "RdBu_r"  # of values around 0
_RC = {
    "font.family": "DejaVu Sans",  # ships with matplotlib: the same everywhere
    "font.size": 9,
    "axes.titlesize": 10,
    "axes.labelsize": 9,
    "xtick.labelsize": 8,
    "ytick.labelsize": 8,
    "legend.fontsize": 8,
    "legend.frameon": False,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": False,
    "axes.axisbelow": True,
    "grid.color": "#DDDDDD",
    "grid.linewidth": 0.6,
    "lines.linewidth": 1.5,
    "figure.facecolor": "white",
    "savefig.facecolor": "white",
    "svg.hashsalt": "pervit",  # ids in an SVG are a function of what is drawn
}


@contextmanager
def style() -> Iterator[None]:
    """The look of all figures, while they are drawn and while they are written.

    Raises:
        UserError: matplotlib is not installed.
    """
    try:
        import matplotlib
    except ImportError:
        raise UserError("figures need matplotlib", "pip install 'pervit-pipeline[insight]'") from None
    with matplotlib.rc_context(_RC):
        yield


def new_figure(width: float, height: float) -> Figure:
    """An empty figure. Args: width, height: inches; text is 9 points, so 7 to 12 inches fill a page."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


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
    figure = new_figure(columns * cell + 1.6, rows * cell * height / width + 0.7)
    axes = figure.add_subplot()
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


def mark_query(
    axes: Axes, query: tuple[int, int], offsets: Sequence[tuple[float, float]] = ((0, 0),), side: float = 1.0
) -> None:
    """Frame a patch in maps drawn by imshow.

    Args:
        query: (row, column) of the patch.
        offsets: (row, column) of each map's first pixel in the axes.
        side: of a patch, in pixels of the axes.
    """
    from matplotlib.collections import PatchCollection
    from matplotlib.patches import Rectangle

    frames = [Rectangle((left + query[1] * side - 0.5, top + query[0] * side - 0.5), side, side) for top, left in offsets]
    axes.add_collection(PatchCollection(frames, facecolor="none", edgecolor=RED, linewidth=0.9))


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
        axes.bar(places[finite], heads[finite], width * 0.9, color=color, alpha=0.55, linewidth=0)
        means.append(heads[finite].mean() if finite.any() else np.nan)
    axes.plot(range(1, len(means) + 1), means, color="black", marker="o", markersize=3, label="mean of the heads")
    axes.set_xticks(range(1, len(means) + 1))
    axes.set_xlim(0.4, len(means) + 0.6)
    if log:
        axes.set_yscale("log")
    axes.set_ylim(*ylim)
    axes.grid(axis="y")
    axes.set(xlabel="Layer", ylabel=ylabel, title=title)
    axes.legend(loc="best")
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
        axes.legend(loc="best")
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
    shares = np.kron(shares, np.ones((pixels.shape[0] // values.shape[0], pixels.shape[1] // values.shape[1])))  # (H, W)
    tint = matplotlib.colormaps[colors](shares)[..., :3]  # (H, W, 3)
    grey = pixels @ np.array([0.299, 0.587, 0.114])
    return 0.4 * grey[..., None] + 0.6 * tint


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
        axes.set_xticks([])
        axes.set_yticks([])
        axes.spines[:].set_visible(False)
        if place[0] == 0:
            axes.set_title(column_labels[place[1]], fontsize=8)
        if place[1] == 0:
            axes.set_ylabel(row_labels[place[0]], fontsize=8)
        picture = images[place[0]][place[1]] if place[1] < len(images[place[0]]) else None
        if picture is None:
            continue
        pixels = np.asarray(picture, dtype=np.float64)
        pixels = pixels.transpose(1, 2, 0) if pixels.shape[0] == 3 and pixels.shape[-1] != 3 else pixels
        axes.imshow(np.clip(pixels, 0, 1), interpolation="nearest")
        if query is not None and patches:
            mark_query(axes, query, side=pixels.shape[0] / patches)
    if title:
        figure.suptitle(title, fontsize=10)
    return figure
