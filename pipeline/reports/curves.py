"""Draw curves as plotly figures, long ones thinned so that no spike is lost; show those of a training, and its speed."""

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

import numpy as np

from pipeline.errors import counted
from pipeline.page import COLOURS, Figure, Html, figure, html, join
from pipeline.runs.folder import RunFolder, Start
from pipeline.runs.rows import is_number
from pipeline.terminal import duration

Points = tuple[np.ndarray, np.ndarray]  # x and y, (n,) each
BINS = 1000  # of a thinned curve: two points each, the least and the greatest
_MOST_MARKS, _MOST_LINES = 400, 50  # of a kind; of starts, which are lines too
_DIGITS = 6  # significant ones of a value in a page
_MARKS = (  # kind, symbol, size, colour, name in the legend, height
    ("start", "line-ns-open", 12, COLOURS[7], "restarts", 0.02),
    ("evaluation", "triangle-up", 7, COLOURS[2], "evaluations", 0.09),
    ("save", "square", 7, COLOURS[4], "saves", 0.02),
)


@dataclass(frozen=True)
class Curve:
    """Values over steps, (n,) each."""

    name: str
    steps: np.ndarray
    values: np.ndarray
    faint: bool = False
    dots: bool = False
    dash: str = ""
    colour: str = ""


@dataclass(frozen=True)
class Mark:
    """A moment of the run: a start, an evaluation, a save."""

    step: float
    text: str
    kind: str  # "start", "evaluation", "save"


def thinned(steps: np.ndarray, values: np.ndarray, bins: int = BINS) -> Points:
    """At most 2 · ``bins`` points of a curve, (n,) each: the least and the greatest value of each bin, in their order."""
    if len(steps) <= 2 * bins:
        return steps, values
    edges = np.linspace(0, len(steps), bins + 1).astype(int)
    kept = []
    for begin, end in zip(edges, edges[1:]):
        part = values[begin:end]
        kept += sorted({begin + int(np.argmin(part)), begin + int(np.argmax(part))})
    return steps[kept], values[kept]


def spread(count: int, most: int) -> np.ndarray:
    """At most ``most`` of ``count`` places, evenly, with both ends."""
    return np.unique(np.linspace(0, count - 1, min(count, most)).astype(int))


def smoothed(values: np.ndarray, width: int) -> np.ndarray:
    """The mean over a window of ``width`` values around each, (n,) -> (n,); shorter at both ends."""
    sums = np.concatenate([[0.0], np.cumsum(values)])
    place = np.arange(len(values))
    half = width // 2
    begin, end = np.maximum(0, place - half), np.minimum(len(values), place + half + 1)
    return (sums[end] - sums[begin]) / (end - begin)


def with_mean(name: str, steps: np.ndarray, values: np.ndarray, colour: str = COLOURS[0]) -> list[Curve]:
    """A noisy curve: each step, faint, and the mean over about a hundredth of the run."""
    width = max(5, len(steps) // 100)
    if len(steps) < 30:
        return [Curve(name, steps, values, colour=colour)]
    mean = Curve(f"mean of {width} steps", steps, smoothed(values, width), colour=colour)
    return [Curve("each step", steps, values, faint=True, colour=colour), mean]


def curve_figure(
    title: str, curves: Sequence[Curve], marks: Sequence[Mark] = (), unit: str = "", log: bool = False, last: float | None = None,
    height: int = 300,
) -> Figure:  # fmt: skip
    """Curves over steps in one figure, with its marks as lines (starts) and signs at the bottom; ``last`` is the end of the axis."""
    traces = [_trace(curve, COLOURS[number % len(COLOURS)]) for number, curve in enumerate(curves)]
    for kind, symbol, size, colour, name, place in _MARKS:
        if same := [mark for mark in marks if mark.kind == kind]:
            same = [same[i] for i in spread(len(same), _MOST_MARKS)]
            traces.append({
                "type": "scatter", "mode": "markers", "name": name, "x": [mark.step for mark in same], "y": [place] * len(same),
                "text": [escape(mark.text) for mark in same], "hovertemplate": "%{text}<extra></extra>", "yaxis": "y2",
                "marker": {"symbol": symbol, "color": colour, "size": size, "line": {"width": 2, "color": colour}},
            })  # fmt: skip
    starts = [mark.step for mark in marks if mark.kind == "start"][:_MOST_LINES]
    shapes = [{"type": "line", "x0": x, "x1": x, "yref": "paper", "y0": 0, "y1": 1, "opacity": 0.6,
               "line": {"color": COLOURS[7], "width": 1, "dash": "dot"}} for x in starts]  # fmt: skip
    values = np.concatenate([curve.values[curve.values > 0] for curve in curves]) if log else np.empty(0)
    decades = float(np.log10(values.max() / values.min())) if len(values) else 0.0
    vertical = {"type": "log", "dtick": 1, "minor": {"showgrid": True}} if log and decades > 1 else {}
    layout: dict[str, Any] = {
        "title": plot_title(title + (f" ({unit})" if unit else "")),
        "xaxis": {"tickformat": "~s"}, "yaxis": vertical,
        "showlegend": len(traces) > 1, "shapes": shapes,
    }  # fmt: skip
    if last:
        layout["xaxis"]["range"] = [0, 1.01 * last]
    if marks:
        layout["yaxis2"] = {"overlaying": "y", "range": [0, 1], "visible": False, "fixedrange": True}
    return Figure(traces, layout, height, title)


def _trace(curve: Curve, colour: str) -> dict[str, Any]:
    steps, values = thinned(curve.steps, curve.values)
    dotted = curve.dots or len(steps) <= 60 and not curve.faint
    line = {"color": curve.colour or colour, "width": 1 if curve.faint else 2, **({"dash": curve.dash} if curve.dash else {})}
    return {
        "type": "scatter", "mode": "lines+markers" if dotted else "lines", "name": escape(curve.name),
        "x": numbers(steps), "y": numbers(values), "opacity": 0.35 if curve.faint else 1, "line": line, "marker": {"size": 5},
    }  # fmt: skip


def plot_title(text: str) -> dict[str, object]:
    """The title of a figure, at its upper left."""
    return {"text": escape(text), "font": {"size": 13}, "x": 0, "xanchor": "left", "y": 0.985, "yanchor": "top"}


def numbers(values: np.ndarray) -> list[float | int | None]:
    """Plain numbers of a few digits, for a page."""
    plain = [float(value) if np.isfinite(value) else None for value in values]
    return [value if value is None else int(value) if value.is_integer() else float(f"{value:.{_DIGITS}g}") for value in plain]


def weights_name(weights: object) -> str:
    """What to call the weights that an evaluation is of."""
    return {"model": "weights", "ema": "averaged weights"}.get(str(weights), str(weights))


def curves(run: RunFolder, starts: list[Start], paper: float | None) -> Html | None:
    """Loss, accuracy, learning rate and gradient norm; None before the first step."""
    norm_steps, norms = run.curve("grad_norm")
    positive = norms > 0
    accuracy = _evaluated(run, "top1", "top-1, ") + _evaluated(run, "top5", "top-5, ", dash="dot")
    if accuracy and paper is not None:
        ends = np.array([0.0, float(run.state.last_step or run.state.step)])
        accuracy.append(Curve(f"paper, {paper:g}", ends, np.full(2, paper), dash="dash", colour="#8a9096"))
    shown = [
        ("Loss", [*with_mean("training", *run.curve("loss")), *_evaluated(run, "loss", "validation, ")], ""),
        ("Accuracy", accuracy, "%"),
        ("Learning rate", [Curve("learning rate", *run.curve("lr"))], ""),
        ("Gradient norm", with_mean("gradient norm", norm_steps[positive], norms[positive], COLOURS[1]), ""),
    ]
    plots = _plots(run, _restarts(starts), shown)
    return join([plots, _how_to_read(run, starts)]) if plots else None


def speed(run: RunFolder, starts: list[Start]) -> Html | None:
    """Throughput, utilization, waiting and memory, with what interrupts the training; None without a step."""
    rates, (mfu_steps, mfu), (wait_steps, waits) = map(run.curve, ("images_per_second", "mfu", "data_wait"))
    cost_steps, costs = run.curve("slowest_cost")
    shown = [
        ("Throughput", [Curve("throughput", *rates)], "images/s"),
        ("Model FLOPs utilization", [Curve("model flops utilization", mfu_steps, 100 * mfu)], "%"),
        ("Waiting for data", [Curve("waiting for data", wait_steps, 100 * waits)], "% of the time"),
        ("Waiting for a rank", [Curve("waiting for a rank", cost_steps, 100 * costs)], "% of the time"),
        ("Memory of a process", [Curve("now", *run.curve("memory_gib")), Curve("peak", *run.curve("peak_memory_gib"))], "GiB"),
    ]
    plots = _plots(run, [*_restarts(starts), *_pauses(run)], shown)
    told = f"Half of the steps ran at {np.median(rates[1]):,.1f} images/s or more" if len(rates[1]) else ""
    slow = "; ".join(f"node {host} cost {cost:.0%} of the run" for host, cost in run.metrics.waited_for.items() if cost >= 0.01)
    why = f"{slow}: its ranks were late, and the others waited for them" if slow else ""
    paragraphs = [html("<p>{}.</p>", words) for words in (told, why, _time_of_pauses(run)) if words]
    return join([*paragraphs, plots]) if plots else None


def _plots(run: RunFolder, marks: list[Mark], shown: list[tuple[str, list[Curve], str]]) -> Html | None:
    """The figures, given as title, curves and unit, that have a point; None if none has."""
    figures, marks = [], sorted(marks, key=lambda mark: mark.step)
    for title, lines, unit in shown:
        if drawn := [line for line in lines if len(line.steps)]:
            log = title == "Gradient norm"
            figures.append(figure(curve_figure(title, drawn, marks, unit, log=log, last=run.state.step)))
    return html('<div class="plots">{}</div>', figures) if figures else None


def _restarts(starts: list[Start]) -> list[Mark]:
    text = "start {} resumes from step {:,}"
    return [Mark(start.step, text.format(start.number, start.step), "start") for start in starts[1:] if start.step is not None]


def _pauses(run: RunFolder) -> list[Mark]:
    found = []
    for row in run.events:
        if (kind := row.get("event")) in ("evaluation", "save"):
            seconds = f", {duration(row['seconds'])}" if is_number(row.get("seconds")) and row["seconds"] >= 1 else ""
            found.append(Mark(row["step"], f"{kind} at step {row['step']:,}{seconds}", kind))
    return found


def _evaluated(run: RunFolder, name: str, before: str, dash: str = "") -> list[Curve]:
    found = []
    for number, weights in enumerate(run.evaluated_weights):
        steps, values = run.evaluation_curve(name, weights)
        if len(steps):
            colour = COLOURS[(1, 2, 3)[number % 3]]
            found.append(Curve(before + weights_name(weights), steps, values, dots=True, dash=dash, colour=colour))
    return found


def _time_of_pauses(run: RunFolder) -> str:
    """Seconds that evaluations and saves took, over all starts."""
    words = []
    for kind, what in (("evaluation", ""), ("save", " (the part that stalls the training)")):
        if seconds := run.seconds_of(kind):
            words.append(f"{counted(len(seconds), kind)}{what} took {duration(sum(seconds))} in all")
    return "; ".join(words)


def _how_to_read(run: RunFolder, starts: list[Start]) -> Html:
    words = ["The horizontal axis counts steps"]
    if (count := len(run.metrics.steps.get("step", ()))) > 2 * BINS:
        shown = f"each curve shows the least and the greatest value of each of {BINS:,} equal parts, so that no peak is lost"
        words.append(f"{count:,} steps are thinned: {shown}; means are taken over all steps")
    if len(starts) > 1:
        words.append("dotted lines are restarts")
    return html('<p class="quiet">{}; drag to zoom, double-click to go back.</p>', "; ".join(words))
