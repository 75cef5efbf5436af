"""Curves of the training, and its speed."""

from __future__ import annotations

import numpy as np

from pipeline.page import COLOURS, Figure, Html, figure, html, join
from pipeline.reports.curves import BINS, Curve, Mark, curve_figure, with_mean
from pipeline.reports.metric_rows import is_number
from pipeline.reports.run_folder import RunFolder
from pipeline.reports.story import Start, duration

_NAMES = {"model": "weights", "ema": "averaged weights"}


def curves(run: RunFolder, starts: list[Start], paper: float | None) -> Html | None:
    """Loss, accuracy, learning rate and gradient norm; None before the first step."""
    marks = [mark for mark in marks_of(run, starts) if mark.kind == "start"]
    figures: list[Figure] = []
    steps, losses = run.curve("loss")
    if len(steps):
        its = with_mean("training", steps, losses)
        its += [each for each in _evaluated(run, "loss", "validation, ")]
        figures.append(curve_figure("Loss", its, marks, last=run.step))
    accuracy = _evaluated(run, "top1", "top-1, ") + _evaluated(run, "top5", "top-5, ", dash="dot")
    if accuracy:
        if paper is not None:
            ends = np.array([0.0, float(run.last_step or run.step)])
            accuracy.append(Curve(f"paper, {paper:g}", ends, np.full(2, paper), dash="dash", colour="#8a9096"))
        figures.append(curve_figure("Accuracy", accuracy, marks, unit="%", last=run.step))
    steps, rates = run.curve("lr")
    if len(steps):
        figures.append(curve_figure("Learning rate", [Curve("learning rate", steps, rates)], marks, last=run.step))
    steps, norms = run.curve("grad_norm")
    if len(steps):
        positive = norms > 0
        its = with_mean("gradient norm", steps[positive], norms[positive], COLOURS[1])
        figures.append(curve_figure("Gradient norm", its, marks, log=True, last=run.step))
    if not figures:
        return None
    return join([html('<div class="plots">{}</div>', [figure(each) for each in figures]), _how_to_read(run, starts)])


def speed(run: RunFolder, starts: list[Start]) -> Html | None:
    """Throughput, utilization, waiting and memory, with what interrupts the training; None without a step."""
    marks = marks_of(run, starts)
    figures = []
    for name, title, unit, factor in (
        ("images_per_second", "Throughput", "images/s", 1.0),
        ("mfu", "Model FLOPs utilization", "%", 100.0),
        ("data_wait", "Waiting for data", "% of the time", 100.0),
    ):
        steps, values = run.curve(name)
        if len(steps):
            figures.append(curve_figure(title, [Curve(title.lower(), steps, factor * values)], marks, unit, last=run.step))
    memory = [(name, *run.curve(name)) for name in ("memory_gib", "peak_memory_gib")]
    its = [Curve({"memory_gib": "now", "peak_memory_gib": "peak"}[name], x, y) for name, x, y in memory if len(x)]
    if its:
        figures.append(curve_figure("Memory of a process", its, marks, "GiB", last=run.step))
    if not figures:
        return None
    rate = run.curve("images_per_second")[1]
    told = html("<p>Half of the steps ran at {} images/s or more.</p>", f"{np.median(rate):,.1f}") if len(rate) else Html("")
    return join([told, _pauses(run), html('<div class="plots">{}</div>', [figure(each) for each in figures])])


def marks_of(run: RunFolder, starts: list[Start]) -> list[Mark]:
    """Restarts, evaluations and saves, as far as files tell them."""
    found = []
    for start in starts[1:]:
        if start.step is not None:
            found.append(Mark(start.step, f"start {start.number} goes on from step {start.step:,}", "start"))
    told: set[tuple[str, int]] = set()
    for row in run.events:
        kind, step = row.get("event"), row.get("step")
        if kind in ("evaluation", "save") and is_number(step):
            seconds = f", {duration(row['seconds'])}" if is_number(row.get("seconds")) and row["seconds"] >= 1 else ""
            told.add((kind, int(step)))
            found.append(Mark(step, f"{kind} at step {int(step):,}{seconds}", kind))
    for row in run.metrics.evaluations:
        if ("evaluation", row["step"]) not in told:
            told.add(("evaluation", row["step"]))
            found.append(Mark(row["step"], f"evaluation at step {row['step']:,}", "evaluation"))
    for checkpoint in run.checkpoints:
        if ("save", checkpoint.step) not in told:
            found.append(Mark(checkpoint.step, f"save at step {checkpoint.step:,}", "save"))
    return sorted(found, key=lambda mark: mark.step)


def _evaluated(run: RunFolder, name: str, before: str, dash: str = "") -> list[Curve]:
    found = []
    for number, weights in enumerate(run.evaluated_weights):
        steps, values = run.evaluation_curve(name, weights)
        if len(steps):
            colour = COLOURS[(1, 2, 3)[number % 3]]
            found.append(Curve(before + _NAMES.get(weights, weights), steps, values, dots=True, dash=dash, colour=colour))
    return found


def _pauses(run: RunFolder) -> Html:
    """Seconds that evaluations and saves took, over all starts."""
    words = []
    for kind, what in (("evaluation", "evaluations"), ("save", "saves (the part that stalls the training)")):
        seconds = [row["seconds"] for row in run.events if row.get("event") == kind and is_number(row.get("seconds"))]
        if seconds:
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
