"""Show the curves of the training, and its speed."""

from __future__ import annotations

import numpy as np

from pipeline.logs.console import duration
from pipeline.page import COLOURS, Html, figure, html, join
from pipeline.reports.curves import BINS, Curve, Mark, curve_figure, weights_name, with_mean
from pipeline.runs.folder import RunFolder, Start
from pipeline.runs.rows import is_number


def curves(run: RunFolder, starts: list[Start], paper: float | None) -> Html | None:
    """Loss, accuracy, learning rate and gradient norm; None before the first step."""
    marks = [mark for mark in marks_of(run, starts) if mark.kind == "start"]
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
    plots = _plots(run, marks, shown)
    return join([plots, _how_to_read(run, starts)]) if plots else None


def speed(run: RunFolder, starts: list[Start]) -> Html | None:
    """Throughput, utilization, waiting and memory, with what interrupts the training; None without a step."""

    def percent(name: str) -> tuple[np.ndarray, np.ndarray]:
        steps, values = run.curve(name)
        return steps, 100 * values

    rate, memory = run.curve("images_per_second"), {"now": run.curve("memory_gib"), "peak": run.curve("peak_memory_gib")}
    shown = [
        ("Throughput", [Curve("throughput", *rate)], "images/s"),
        ("Model FLOPs utilization", [Curve("model flops utilization", *percent("mfu"))], "%"),
        ("Waiting for data", [Curve("waiting for data", *percent("data_wait"))], "% of the time"),
        ("Memory of a process", [Curve(name, *found) for name, found in memory.items()], "GiB"),
    ]
    told = (
        html("<p>Half of the steps ran at {} images/s or more.</p>", f"{np.median(rate[1]):,.1f}") if len(rate[1]) else Html("")
    )
    plots = _plots(run, marks_of(run, starts), shown)
    return join([told, _pauses(run), plots]) if plots else None


def _plots(run: RunFolder, marks: list[Mark], shown: list[tuple[str, list[Curve], str]]) -> Html | None:
    """The figures, given as title, curves and unit, that have a point; None if none has."""
    figures = []
    for title, lines, unit in shown:
        if drawn := [line for line in lines if len(line.steps)]:
            log = title == "Gradient norm"
            figures.append(figure(curve_figure(title, drawn, marks, unit, log=log, last=run.state.step)))
    return html('<div class="plots">{}</div>', figures) if figures else None


def marks_of(run: RunFolder, starts: list[Start]) -> list[Mark]:
    """Restarts, evaluations and saves."""
    found = [
        Mark(start.step, f"start {start.number} resumes from step {start.step:,}", "start")
        for start in starts[1:]
        if start.step is not None
    ]
    for row in run.events:
        kind, step = row.get("event"), row["step"]
        if kind in ("evaluation", "save"):
            seconds = f", {duration(row['seconds'])}" if is_number(row.get("seconds")) and row["seconds"] >= 1 else ""
            found.append(Mark(step, f"{kind} at step {step:,}{seconds}", kind))
    return sorted(found, key=lambda mark: mark.step)


def _evaluated(run: RunFolder, name: str, before: str, dash: str = "") -> list[Curve]:
    found = []
    for number, weights in enumerate(run.evaluated_weights):
        steps, values = run.evaluation_curve(name, weights)
        if len(steps):
            colour = COLOURS[(1, 2, 3)[number % 3]]
            found.append(Curve(before + weights_name(weights), steps, values, dots=True, dash=dash, colour=colour))
    return found


def _pauses(run: RunFolder) -> Html:
    """Seconds that evaluations and saves took, over all starts."""
    words = []
    for kind, what in (("evaluation", "evaluations"), ("save", "saves (the part that stalls the training)")):
        if seconds := run.seconds_of(kind):
            words.append(f"{len(seconds)} {what} took {duration(sum(seconds))} in all")
    return html("<p>{}.</p>", "; ".join(words)) if words else Html("")


def _how_to_read(run: RunFolder, starts: list[Start]) -> Html:
    count = len(run.metrics.steps.get("step", ()))
    words = ["the horizontal axis counts steps"]
    if count > 2 * BINS:
        words.append(
            f"{count:,} steps are thinned: each curve shows the least and the greatest value of each of {BINS:,} equal parts, so that no "
            f"peak is lost; means are taken over all steps"
        )
    if len(starts) > 1:
        words.append("dotted lines are restarts")
    words.append("drag to zoom, double-click to go back")
    sentence = "; ".join(words)
    return html('<p class="quiet">{}.</p>', sentence[0].upper() + sentence[1:])
