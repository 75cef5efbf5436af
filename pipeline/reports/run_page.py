"""Put the page about one run together from its sections, and tell the story of its starts."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from pipeline.errors import UserError
from pipeline.logs.console import duration
from pipeline.page import Html, Section, clock, html, join, page, table
from pipeline.reports.papers import paper_recipe
from pipeline.reports.predictions import Pictures, find_predictions, read_predictions
from pipeline.reports.sections.inside import ANALYSIS, analysis_figures, over_training, training_images
from pipeline.reports.sections.mistakes import mistakes
from pipeline.reports.sections.setup import checkpoints_section, config_section, environment_section
from pipeline.reports.sections.summary import summary
from pipeline.reports.sections.training import curves, speed
from pipeline.runs.folder import RunFolder, Start, starts_of
from pipeline.stores.place import Place, parse_place

_NAMED = 50  # bad samples, skipped steps
_HOSTS = 4  # of a start that are named


@dataclass(frozen=True)
class Sources:
    """What lies beside the run folder; None: in the run folder, or where its config says."""

    predictions: Path | None = None
    data: Place | None = None
    analysis: Path | None = None


def run_page(run: RunFolder, sources: Sources) -> str:
    """The HTML of a run's page.

    Raises:
        UserError: a source that was given cannot be read, or plotly is not installed.
    """
    starts, recipe, problems = starts_of(run), paper_recipe(run), list(run.problems)
    inside, inside_problems = analysis_figures(_analysis_folder(run, sources))
    problems += inside_problems
    paper = recipe.top1 if recipe and recipe.comparable else None
    parts: list[tuple[str, Html | None, bool]] = [
        ("Result", summary(run, recipe, starts), False),
        ("Curves", curves(run, starts, paper), False),
        ("Speed", speed(run, starts), False),
        ("Story of the run", history(run, starts), False),
        ("Classes and mistakes", _mistakes(run, sources, problems), False),
        ("Inside the model", inside or _no_analysis(run), False),
        ("Over training", over_training(run), False),
        ("Training images", training_images(run), False),
        ("Config", config_section(run, recipe), False),
        ("Environment", environment_section(run), True),
        ("Checkpoints", checkpoints_section(run), False),
    ]
    sections = [Section(title, body, closed) for title, body, closed in parts if body]
    model = run.value("model.name")
    subtitle = html("{}{}", f"{model}, " if isinstance(model, str) else "", run.state)
    return page(run.name, subtitle, sections, problems)


def _analysis_folder(run: RunFolder, sources: Sources) -> Path:
    if sources.analysis is None:
        return run.path / ANALYSIS
    if not (sources.analysis / "analysis.json").is_file():
        raise UserError(f"--analysis {sources.analysis} has no analysis.json", "make it with `python -m pipeline.analyze`")
    return sources.analysis


def _no_analysis(run: RunFolder) -> Html:
    command = f"python -m pipeline.analyze {run.path} --data SHARDS --output {run.path / ANALYSIS}"
    return html("<p>Not analyzed yet. This command makes the figures:</p><pre><code>{}</code></pre>", command)


def _mistakes(run: RunFolder, sources: Sources, problems: list[str]) -> Html:
    path = find_predictions(run.path, sources.predictions)
    data = run.value("data.path")
    if path is None:
        shards = sources.data or (data if isinstance(data, str) else "SHARDS")
        command = f"python -m pipeline.evaluate --checkpoint {run.path} --data {shards} --predictions {run.path / 'predictions.parquet'}"
        return html("<p>No results per image yet. This command makes them:</p><pre><code>{}</code></pre>", command)
    try:
        found = read_predictions(path)
    except UserError as error:
        if sources.predictions:
            raise
        problems.append(str(error))
        return html("<p>{}</p>", error)
    pictures, why = None, ""
    if sources.data:
        pictures = Pictures(sources.data, run.classes)
    elif isinstance(data, str):
        try:
            pictures = Pictures(parse_place(data), run.classes)
        except (UserError, OSError):
            why = f"No pictures: the run's data.path {data} is not there. Add --data SHARDS."
    return mistakes(found, run.class_names or (pictures.classes if pictures else []), pictures, why)


def history(run: RunFolder, starts: list[Start]) -> Html:
    """Starts as a table, then what went wrong."""
    return join([_sentence(run, starts), _table(starts), _skipped(run), _bad_samples(run)])


def _sentence(run: RunFolder, starts: list[Start]) -> Html:
    if not starts:
        return html("<p>No file tells how this run was started.</p>")
    repeated = sum(start.repeated or 0 for start in starts)
    words = [f"{len(starts)} start{'s' * (len(starts) != 1)}"]
    broken = sum(not start.whole for start in starts)
    if broken:
        words.append(f"{broken} ended by a failure")
    if repeated:
        words.append(f"{repeated:,} steps were taken twice")
    return html("<p>{}.</p>", ", ".join(words))


def _table(starts: list[Start]) -> Html:
    if not starts:
        return Html("")
    columns: dict[str, list[object]] = {
        "start": [start.number for start in starts],
        "began": [clock(start.began) for start in starts],
        "lasted": [
            "" if start.began is None or start.ended is None else duration(max(0.0, start.ended - start.began))
            for start in starts
        ],
        "steps": ["" if start.step is None else f"{start.step:,} to {_count(start.reached) or '?'}" for start in starts],
        "of these repeated": [_count(start.repeated or None) for start in starts],
        "processes": [html("{} on {}", start.world_size or "?", _hosts(start)) for start in starts],
        "ZeRO": [_count(start.zero_stage) for start in starts],
        "job": [start.job or "" for start in starts],
        "ended": [html('<span class="{}">{}</span>', "" if start.whole else "bad", start.end) for start in starts],
    }
    kept = {name: cells for number, (name, cells) in enumerate(columns.items()) if number < 4 or any(map(str, cells))}
    numeric = [number for number, name in enumerate(kept) if name == "of these repeated"]
    return table(list(kept), list(zip(*kept.values())), numeric=numeric)


def _count(number: int | None) -> str:
    return "" if number is None else f"{number:,}"


def _hosts(start: Start) -> str:
    more = f" and {len(start.hosts) - _HOSTS} more" if len(start.hosts) > _HOSTS else ""
    return ", ".join(start.hosts[:_HOSTS]) + more or "?"


def _skipped(run: RunFolder) -> Html:
    steps, counts = run.curve("skipped_steps")
    if not len(steps) or counts[-1] <= 0:
        return Html("")
    at = steps[np.flatnonzero(np.diff(np.concatenate([[0.0], counts])) > 0)]
    named = ", ".join(f"{int(step):,}" for step in at[:_NAMED]) + (", ..." if len(at) > _NAMED else "")
    return html("<h3>Skipped steps</h3><p>{} with a gradient that is not finite: step {}.</p>", f"{int(counts.max()):,}", named)


def _bad_samples(run: RunFolder) -> Html:
    """Names from the newest checkpoint; the counts from the log, which may know of more."""
    manifest = run.newest_manifest
    named = manifest.state.bad_samples if manifest else {}
    steps, counts = run.curve("bad_samples")
    count = max(len(named), int(counts.max()) if len(counts) else 0)
    if not count:
        return html("<p>No sample was found that cannot be used.</p>") if len(steps) else Html("")
    replaced = run.curve("replaced")[1]
    words = f"{count:,} training sample{'s' * (count != 1)} cannot be used"
    if len(replaced) and replaced.sum() > 0:
        words += f"; {int(replaced.sum()):,} images of {int(replaced.size):,} steps were replaced by others"
    items = [html("<li>{}</li>", sentence) for sentence in list(named.values())[:_NAMED]]
    missing = count - len(items)
    if missing > 0:
        items.append(html("<li>{} more, which the run's output names.</li>", f"{missing:,}"))
    return html("<h3>Samples that cannot be used</h3><p>{}.</p><ul>{}</ul>", words, items)
