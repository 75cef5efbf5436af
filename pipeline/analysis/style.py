"""Draw figures, in one look: values by layer here, maps and images in :mod:`pipeline.analysis.maps`.

Every figure is made with :func:`new_figure`, within :func:`style`; there is no display and no global state of pyplot. Arrays are
NumPy arrays or tensors on the CPU. Layers and heads are counted from 1 in labels.
"""

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import numpy as np

from pipeline.lazy import import_library
from pipeline.page import BLUE, COLOURS, GREY

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
else:  # matplotlib is imported when a figure is drawn
    Axes = Figure = Any

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


def style() -> AbstractContextManager:
    """The look of all figures, while they are drawn and written. Raises UserError: matplotlib is not installed."""
    return import_library("matplotlib", "drawing figures", extra="insight").rc_context(_RC)


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


def legend_beside(axes: Axes, place: float = 1.0, **options: Any) -> None:
    """The legend, to the right of the axes. Args: place: above 1 where a second scale is there."""
    axes.legend(loc="center left", bbox_to_anchor=(place, 0.5), **options)


def layer_plot(
    values: Any,
    ylabel: str,
    title: str = "",
    *,
    part: str = "head",
    points: bool = False,
    dashed: tuple[str, float | Sequence[float | None] | None] = ("", None),
    stages: Sequence[int | None] = (),
    word: str = "stage",
    ylim: tuple[float | None, float | None] = (None, None),
    color: str = BLUE,
    axes: Axes | None = None,
) -> Figure:
    """One bar per head, grouped by layer, with a line through the layers' means, as PerViT's Fig. 7 and 8.

    Args:
        values: (layers, heads), or a list of layers with different numbers of heads; what is not finite, and a layer that is None,
            has no bar.
        ylabel: quantity and unit.
        part: what a bar is; points: small points instead of bars, where there are many.
        dashed: name of a value to compare with, and the value, of all layers or of each; None: there is none.
        stages: of the layers, from 1; None: it has none. A change is marked, and its ``word`` and number are above.
        axes: to draw into (default: a figure of its own).
    """
    from matplotlib.colors import to_rgb

    light = tuple((1 + channel) / 2 for channel in to_rgb(color))  # not transparent, so that no grid shows through
    layers, means, most = range(1, len(values) + 1), [], 1
    axes = axes or new_figure(max(5.0, (0.27 if points else 0.55) * len(values) + 1.0), 2.8).add_subplot()
    for layer, of_layer in zip(layers, values):
        heads = np.asarray([np.nan] if of_layer is None else of_layer, dtype=np.float64)
        finite, most = np.isfinite(heads), max(most, len(heads))
        width = (0.44 if points else 0.8) / len(heads)
        places = layer + width * (np.arange(len(heads)) - (len(heads) - 1) / 2)
        if not points:
            axes.bar(places[finite], heads[finite], width * 0.9, color=light, linewidth=0)
        elif len(heads) > 1:
            axes.plot(places, heads, ".", color=color, alpha=0.45, markersize=4, label=part if layer == 1 else None)
        means.append(heads[finite].mean() if finite.any() else np.nan)
    axes.plot(layers, means, color="black", marker="o", markersize=3, label=f"mean of the {part}s" if most > 1 else part)
    name, level = dashed
    if level is not None:
        levels, centers = np.broadcast_to(np.asarray(level, dtype=np.float64), len(layers)), np.array(layers)
        axes.hlines(levels, centers - 0.5, centers + 0.5, GREY, "--", label=name, linewidths=1.0)
    axes.set(xlabel="Layer", ylabel=ylabel, title=title, xlim=(0.4, len(layers) + 0.6), ylim=ylim)
    axes.set_xticks(layers[:: 2 if len(layers) > 16 else 1])
    axes.grid(axis="y")
    _mark_stages(axes, layers, stages, word)
    if stages:
        legend_beside(axes)
    else:
        axes.legend(loc="lower right", bbox_to_anchor=(1.0, 1.0), borderaxespad=0.1, ncols=2)
    figure = axes.get_figure(root=True)
    assert figure is not None
    return figure


def layer_plots(panels: Mapping[str, Any], ylabel: str, one_scale: bool = False) -> Figure:
    """Several of :func:`layer_plot` under each other, one colour each. Args: panels: title -> values."""
    layers = max(len(values) for values in panels.values())
    figure = new_figure(max(5.0, 0.55 * layers + 1.0), 2.3 * len(panels) + 0.2)
    grid = figure.subplots(len(panels), 1, sharex=True, sharey=one_scale, squeeze=False)
    for axes, (title, values), color in zip(grid[:, 0], panels.items(), COLOURS * 9, strict=False):
        layer_plot(values, ylabel, title, color=color, axes=axes, ylim=(0, None))
        if axes is not grid[-1, 0]:
            axes.set_xlabel("")
    return figure


def patches_beside(figure: Figure, per_unit: float) -> Figure:
    """The figure, with a second scale on the right of its axes: patches, of which a unit has ``per_unit``."""
    for axes in list(figure.axes):
        scale = axes.secondary_yaxis("right", functions=(lambda y: np.multiply(y, per_unit), lambda y: np.divide(y, per_unit)))
        scale.set_ylabel("patches")
        scale.spines["right"].set_visible(True)
    return figure


def _mark_stages(axes: Axes, layers: Sequence[int], stages: Sequence[int | None], word: str) -> None:
    for layer, before, after in zip(layers, stages, stages[1:]):
        if before != after:
            axes.axvline(layer + 0.5, color="#BBBBBB", linewidth=0.8)
    for stage in {stage: None for stage in stages if stage is not None}:
        middle = np.mean([layer for layer, other in zip(layers, stages) if other == stage])
        above: dict[str, Any] = {"xycoords": ("data", "axes fraction"), "xytext": (0, 3), "textcoords": "offset points"}
        axes.annotate(f"{word} {stage}", (float(middle), 1.0), **above, ha="center", fontsize=7, color=GREY)
