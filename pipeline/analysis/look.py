"""Basics of every figure: colours, fonts, an empty figure, pictures and marked patches. :mod:`~pipeline.analysis.style` has them too."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

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


def bare(axes: Axes) -> None:
    """Leave out ticks and frame."""
    axes.set_xticks([])
    axes.set_yticks([])
    axes.spines[:].set_visible(False)


def show(axes: Axes, picture: Any) -> int:
    """Show (H, W, 3) or (3, H, W) in [0, 1]; returns H."""
    pixels = np.asarray(picture, dtype=np.float64)
    pixels = pixels.transpose(1, 2, 0) if pixels.shape[0] == 3 and pixels.shape[-1] != 3 else pixels
    axes.imshow(np.clip(pixels, 0, 1), interpolation="nearest")
    bare(axes)
    return len(pixels)
