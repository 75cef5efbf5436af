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
    shown = [
        ("Throughput", [Curve("throughput", *rates)], "images/s"),
        ("Model FLOPs utilization", [Curve("model flops utilization", mfu_steps, 100 * mfu)], "%"),
        ("Waiting for data", [Curve("waiting for data", wait_steps, 100 * waits)], "% of the time"),
        ("Memory of a process", [Curve("now", *run.curve("memory_gib")), Curve("peak", *run.curve("peak_memory_gib"))], "GiB"),
    ]
    plots = _plots(run, [*_restarts(starts), *_pauses(run)], shown)
    told = f"Half of the steps ran at {np.median(rates[1]):,.1f} images/s or more" if len(rates[1]) else ""
    paragraphs = [html("<p>{}.</p>", words) for words in (told, _time_of_pauses(run)) if words]
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
    for kind, what in (("evaluation", "evaluations"), ("save", "saves (the part that stalls the training)")):
        if seconds := run.seconds_of(kind):
            words.append(f"{len(seconds)} {what} took {duration(sum(seconds))} in all")
    return "; ".join(words)


def _how_to_read(run: RunFolder, starts: list[Start]) -> Html:
    words = ["The horizontal axis counts steps"]
    if (count := len(run.metrics.steps.get("step", ()))) > 2 * BINS:
        words.append(
            f"{count:,} steps are thinned: each curve shows the least and the greatest value of each of {BINS:,} equal parts, so that no "
            f"peak is lost; means are taken over all steps"
        )
    if len(starts) > 1:
        words.append("dotted lines are restarts")
    return html('<p class="quiet">{}; drag to zoom, double-click to go back.</p>', "; ".join(words))
