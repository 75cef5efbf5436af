"""Draw maps in rows and columns, and attention on images. Maps are square: NumPy arrays or tensors on the CPU."""

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np

from pipeline.analysis.style import Axes, Figure, new_figure
from pipeline.page import RED

ATTENTION, DIVERGING = "viridis", "RdBu_r"  # colours of attention, low to high; of values around 0
Query = tuple[int, int]  # (row, column) of a patch
_DETAIL = 14  # pixels of a map at least, so that gaps between small maps are no wider than between large ones


def mark_query(axes: Axes, query: Query, corner: tuple[float, float] = (0, 0), side: float = 1.0) -> None:
    """Frame a patch in a map that begins at a corner (row, column) of the axes. Args: side: of a patch, in pixels of the axes."""
    from matplotlib.patches import Rectangle

    place = (corner[1] + query[1] * side - 0.5, corner[0] + query[0] * side - 0.5)
    axes.add_patch(Rectangle(place, side, side, facecolor="none", edgecolor=RED, linewidth=0.9))


def show_image(axes: Axes, picture: Any, query: Query | None = None, patches: int = 1) -> None:
    """Show (H, W, 3) or (3, H, W) in [0, 1], with the query framed. Args: patches: along a side of the image."""
    pixels = np.asarray(picture, dtype=np.float64)
    pixels = pixels.transpose(1, 2, 0) if pixels.shape[0] == 3 and pixels.shape[-1] != 3 else pixels
    axes.imshow(np.clip(pixels, 0, 1), interpolation="nearest")
    axes.set(xticks=[], yticks=[])
    axes.spines[:].set_visible(False)
    if query is not None:
        mark_query(axes, query, side=len(pixels) / patches)


def stretched(maps: Any) -> np.ndarray:
    """(..., rows, columns) with each map stretched to [0, 1]; a map of one value, which has nothing to stretch, keeps it."""
    maps = np.asarray(maps, dtype=np.float64)
    low, high = maps.min((-2, -1), keepdims=True), maps.max((-2, -1), keepdims=True)
    flat = high - low <= 1e-6 * high
    return np.where(flat, maps, (maps - low) / np.where(flat, 1.0, high - low))


def draw_maps(
    axes: Axes,
    maps: Any,
    query: Query | Sequence[Sequence[Query]] | None = None,
    *,
    rows: Sequence[str] | Mapping[int, str] = (),
    columns: Sequence[str] = (),
    notes: Sequence[Sequence[str]] = (),
    note_colors: Sequence[Sequence[Any]] = (),
    apart: Collection[int] = (),
    **drawing: Any,
) -> Any:
    """Show maps in rows and columns of one axes. Smaller maps are drawn as large as the largest.

    Args:
        maps: [row][column] (side, side), sides and numbers of columns may differ; NaN is left white.
        query: of all maps, or [row][column] of each, which is framed.
        rows: labels, or number of a row -> its label.
        columns: labels, above; none: no labels.
        notes, note_colors: [row][column] text above a map, and the colour behind it.
        apart: rows with more space before them.
        drawing: of ``imshow``.
    """
    side = max(len(one) for of_row in maps for one in of_row)
    side *= max(1, round(_DETAIL / side))
    gap = max(1, round(0.08 * side))
    above = gap + _lines(notes) * max(1, round(0.2 * side))
    tops, bottom = [], 0
    for row in range(len(maps)):
        tops.append(bottom + (above if row or notes else 0) + (max(2, side // 3) if row in apart else 0))
        bottom = tops[-1] + side
    lefts = [column * (side + gap) for column in range(max(map(len, maps)))]
    mosaic = np.full((bottom, lefts[-1] + side), np.nan)
    for row, (top, of_row) in enumerate(zip(tops, maps)):
        for column, (left, one) in enumerate(zip(lefts, of_row)):
            nearest = np.arange(side) * len(one) // side
            mosaic[top : top + side, left : left + side] = np.asarray(one)[nearest][:, nearest]
            if query is not None:
                marked = query if isinstance(query, tuple) else query[row][column]
                mark_query(axes, marked, (top, left), side / len(one))
    for row, texts in enumerate(notes):
        for column, text in enumerate(texts):
            behind = {"facecolor": note_colors[row][column], "edgecolor": "none", "pad": 0.7} if note_colors else None
            axes.text(lefts[column] + (side - 1) / 2, tops[row] - 0.8, text, ha="center", va="bottom", fontsize=6, bbox=behind)
    labels = dict(enumerate(rows)) if not isinstance(rows, Mapping) else rows
    axes.set_xticks([left + (side - 1) / 2 for left in lefts[: len(columns)]], columns)
    axes.set_yticks([tops[row] + (side - 1) / 2 for row in labels], list(labels.values()))
    axes.tick_params(length=0, top=False, labeltop=True, bottom=False, labelbottom=False)
    axes.spines[:].set_visible(False)
    return axes.imshow(mosaic, interpolation="nearest", aspect="equal", **drawing)


def _lines(notes: Sequence[Sequence[str]]) -> int:
    return max((text.count("\n") + 1 for texts in notes for text in texts), default=0)


def map_figure(
    maps: Any,
    label: str,
    query: Query | Sequence[Sequence[Query]] | None = None,
    *,
    xlabel: str = "Layer",
    ylabel: str = "",
    limits: tuple[float, float] | None = None,
    log: bool = False,
    own_scales: bool = False,
    colors: str = ATTENTION,
    cell: float | None = None,
    picture: Any = None,
    **layout: Any,
) -> Figure:
    """A figure of :func:`draw_maps` with one colour bar for all.

    Args:
        label: of the colour bar, with the unit.
        limits: of the colours (default: the smallest and the largest value); values beyond take the last colour.
        log: logarithmic colours.
        own_scales: each map has its own colours, from its least to its largest value.
        cell: side of a map in inches (default: what makes the figure about 7 inches wide).
        picture: (3, H, W) in [0, 1], shown at the left with the query framed.
        layout: of :func:`draw_maps`.
    """
    from matplotlib.colors import LogNorm, Normalize

    if own_scales:
        maps, limits, label = [stretched(of_row) for of_row in maps], (0.0, 1.0), "each map from its least to its largest value"
    across, notes, apart = max(map(len, maps)), layout.get("notes", ()), layout.get("apart", ())
    values = np.concatenate([np.ravel(one) for of_row in maps for one in of_row])
    least, largest = float(np.nanmin(values)), float(np.nanmax(values))
    low, high = limits or (least, largest)
    if high <= low:  # maps of one value
        high = low + max(abs(low), 1.0) * 1e-6

    cell = cell or min(1.5, max(0.5, 7 / across))
    width, beside = across * cell * 1.08 + 1.6, 0.0 if picture is None else 2.0
    height = len(maps) * cell * (1.08 + 0.2 * _lines(notes)) + 0.2 * len(apart) + 0.7
    figure = new_figure(width + beside, max(height, beside + 0.7))
    axes = figure.add_subplot()
    if picture is not None and isinstance(query, tuple):
        axes.remove()
        left, axes = figure.subplots(1, 2, width_ratios=(beside, width))
        show_image(left, picture, query, len(maps[0][0]))
        left.set_anchor("N")
    image = draw_maps(axes, maps, query, cmap=colors, norm=(LogNorm if log else Normalize)(low, high, clip=True), **layout)
    axes.set(xlabel=xlabel, ylabel=ylabel)
    axes.xaxis.set_label_position("top")
    beyond = {(True, True): "both", (True, False): "min", (False, True): "max"}.get((least < low, largest > high), "neither")
    bar = figure.colorbar(image, ax=axes, label=label, fraction=0.03, pad=0.02, aspect=30, extend=beyond)
    if own_scales:
        bar.set_ticks([0, 1], labels=["least", "largest"])
    figure.draw_without_rendering()  # the first layout takes maps as wide as high, and cuts labels off
    return figure


def overlay(image: Any, attention: Any, limits: tuple[float, float]) -> np.ndarray:
    """Attention (h, w) on an image (3, H, W) in [0, 1], as (H, W, 3): grey, and each patch coloured by the map within the limits."""
    from matplotlib import colormaps

    pixels = np.asarray(image, dtype=np.float64).transpose(1, 2, 0)  # (H, W, 3)
    values, (low, high) = np.asarray(attention, dtype=np.float64), limits
    shares = np.clip((values - low) / ((high - low) or 1.0), 0, 1)
    tiled = np.kron(shares, np.ones((pixels.shape[0] // values.shape[0], pixels.shape[1] // values.shape[1])))  # (H, W)
    grey = pixels @ np.array([0.299, 0.587, 0.114])[:, None]  # (H, W, 1)
    return np.asarray(0.45 * grey + 0.55 * colormaps[ATTENTION](tiled)[..., :3])


def overlay_grid(
    images: Sequence[Any],
    maps: Any,
    rows: Sequence[str],
    columns: Sequence[str],
    *,
    limits: tuple[float, float] | None = None,
    label: str = "",
    cell: float | None = None,
) -> Figure:
    """A row of each image (3, H, W) in [0, 1]: the image, and its maps (columns, h, w) on it.

    Args:
        limits: of the colours, which a bar explains (default: each map's own, from 0 to its largest value).
        label: of the bar.
        cell: side of a picture in inches (default: what makes the grid about 8 inches wide).
    """
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import Normalize

    across = 1 + len(columns)
    cell = cell or min(1.8, max(0.7, 8 / across))
    figure = new_figure(across * cell + 1.0, len(images) * cell + 0.5)
    grid = figure.subplots(len(images), across, squeeze=False, gridspec_kw={"wspace": 0.03, "hspace": 0.03})
    for of_row, name, image, of_image in zip(grid, rows, images, maps):
        show_image(of_row[0], image)
        of_row[0].set_ylabel(name, fontsize=8)
        for axes, one in zip(of_row[1:], of_image):
            show_image(axes, overlay(image, one, limits or (0.0, float(one.max()))))
    for axes, name in zip(grid[0], ["Image", *columns]):
        axes.set_title(name, fontsize=8)
    if limits:
        colors = ScalarMappable(Normalize(*limits), ATTENTION)
        figure.colorbar(colors, ax=figure.axes, label=label, fraction=0.03, pad=0.01, aspect=25)
    return figure
