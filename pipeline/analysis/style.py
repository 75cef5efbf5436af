"""Draw figures, in one look: maps in rows and columns, attention on an image.

Every figure is made with :func:`new_figure`, within :func:`style`; there is no display and no global state of pyplot. Arrays are
NumPy arrays or tensors on the CPU. Layers and heads are counted from 1 in labels.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np

from pipeline.errors import missing_extra
from pipeline.page import RED

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.image import AxesImage

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
        raise missing_extra("drawing figures", "matplotlib", "insight") from None
    with matplotlib.rc_context(_RC):
        yield


def new_figure(width: float, height: float) -> Figure:
    """An empty figure. Args: width, height: inches; text is 9 points, so 7 to 12 inches fill a page."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def numbers(count: int) -> list[str]:
    """Labels of layers or heads, from 1."""
    return [str(number) for number in range(1, count + 1)]


def legend_beside(axes: Axes, **options: Any) -> None:
    """The legend, to the right of the axes."""
    axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), **options)


def bare(axes: Axes) -> None:
    """Leave out ticks and frame."""
    axes.set_xticks([])
    axes.set_yticks([])
    axes.spines[:].set_visible(False)


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


def show_image(axes: Axes, picture: Any, query: tuple[int, int] | None = None, patches: int | None = None) -> None:
    """Show (H, W, 3) or (3, H, W) in [0, 1], with the query framed. Args: patches: along a side of the image."""
    pixels = np.asarray(picture, dtype=np.float64)
    pixels = pixels.transpose(1, 2, 0) if pixels.shape[0] == 3 and pixels.shape[-1] != 3 else pixels
    axes.imshow(np.clip(pixels, 0, 1), interpolation="nearest")
    bare(axes)
    if query is not None and patches:
        mark_query(axes, query, side=len(pixels) / patches)


def gap_of(width: int) -> int:
    """Pixels between maps of that width."""
    return max(1, round(0.08 * width))


def draw_mosaic(
    axes: Axes,
    maps: Any,
    tops: Sequence[int],
    lefts: Sequence[int],
    *,
    query: tuple[int, int] | None = None,
    rows: Mapping[int, str] | None = None,
    columns: Sequence[str] = (),
    side: int = 1,
    **drawing: Any,
) -> AxesImage:
    """Maps in rows and columns of one axes.

    Args:
        maps: (rows, columns, h, w); NaN: left white, as for a head that a layer does not have.
        tops, lefts: first pixel of each row and column.
        query: (row, column) of a patch that each map frames.
        rows: number of a row -> its label.
        columns: labels, above; none: no labels.
        side: of a patch in pixels.
        drawing: of ``imshow``.
    """
    maps = np.asarray(maps, dtype=np.float64)
    height, width = maps.shape[2:]
    mosaic = np.full((tops[-1] + height, lefts[-1] + width), np.nan)
    for row, top in enumerate(tops):
        for column, left in enumerate(lefts):
            mosaic[top : top + height, left : left + width] = maps[row, column]
    image = axes.imshow(mosaic, interpolation="nearest", aspect="equal", **drawing)
    axes.set_xticks([left + (width - 1) / 2 for left in lefts] if len(columns) else [], columns)
    rows = rows or {}
    axes.set_yticks([tops[row] + (height - 1) / 2 for row in rows], list(rows.values()))
    axes.tick_params(length=0, top=False, labeltop=True, bottom=False, labelbottom=False)
    axes.spines[:].set_visible(False)
    if query is not None:
        mark_query(axes, query, [(top, left) for top in tops for left in lefts], side)
    return image


def map_grid(
    maps: Any,
    row_labels: Sequence[str],
    column_labels: Sequence[str],
    *,
    label: str,
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
        maps: (rows, columns, h, w); NaN: left white.
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
    shown = maps[np.isfinite(maps) & (maps > 0 if log else True)]
    low, high = limits or ((float(shown.min()), float(shown.max())) if shown.size else (0.0, 1.0))
    if high <= low:  # maps of one value
        high = low + max(abs(low), 1.0) * 1e-6
    if log:
        low = max(low, high * 1e-12)
        maps = np.where(maps <= low, low, maps)

    cell = cell or min(1.5, max(0.5, 7 / columns))
    side = 0.0 if picture is None else 2.0
    figure = new_figure(columns * cell + 1.6 + side, max(rows * cell * height / width, side) + 0.7)
    if picture is None:
        axes = figure.add_subplot()
    else:
        beside, axes = figure.subplots(1, 2, width_ratios=(side, columns * cell))
        show_image(beside, picture, query, width)
        beside.set_anchor("N")
    tops, lefts = ([place * (size + gap_of(width)) for place in range(n)] for n, size in ((rows, height), (columns, width)))
    named = dict(enumerate(row_labels))
    norm = (LogNorm if log else Normalize)(low, high)
    image = draw_mosaic(axes, maps, tops, lefts, query=query, rows=named, columns=column_labels, cmap=colors, norm=norm)
    if xlabel:
        axes.set_xlabel(xlabel)
        axes.xaxis.set_label_position("top")
    axes.set_ylabel(ylabel)
    figure.colorbar(image, ax=axes, label=label, fraction=0.03, pad=0.02, aspect=30)
    return figure


def overlay(image: Any, attention: Any, *, limits: tuple[float, float] | None = None) -> np.ndarray:
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
    tint = matplotlib.colormaps[MAP_COLORS](tiled)[..., :3]  # (H, W, 3)
    grey = pixels @ np.array([0.299, 0.587, 0.114])
    blended: np.ndarray = 0.45 * grey[..., None] + 0.55 * tint
    return blended


def image_grid(
    images: Sequence[Sequence[Any]], row_labels: Sequence[str], column_labels: Sequence[str], cell: float | None = None
) -> Figure:
    """Pictures in rows and columns, such as an image and its overlays.

    Args:
        images: rows of columns of (H, W, 3) or (3, H, W) in [0, 1].
        cell: side of a picture in inches (default: what makes the grid about 8 inches wide).
    """
    rows, columns = len(images), max(len(row) for row in images)
    cell = cell or min(1.8, max(0.7, 8 / columns))
    figure = new_figure(columns * cell + 1.0, rows * cell + 0.5)
    grid = figure.subplots(rows, columns, squeeze=False, gridspec_kw={"wspace": 0.03, "hspace": 0.03})
    for (row, column), axes in np.ndenumerate(grid):
        bare(axes)
        if row == 0:
            axes.set_title(column_labels[column], fontsize=8)
        if column == 0:
            axes.set_ylabel(row_labels[row], fontsize=8)
        if column < len(images[row]):
            show_image(axes, images[row][column])
    return figure
