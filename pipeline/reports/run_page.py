"""Put the page about one run together: its result beside the paper's, the story of its starts, the other sections."""

from pathlib import Path
from typing import Any

import numpy as np

from pipeline.errors import UserError, counted, first_few
from pipeline.page import Html, Section, clock, html, join, page, table
from pipeline.reports import sections
from pipeline.reports.curves import curves, speed, weights_name
from pipeline.reports.mistakes import Pictures, mistakes
from pipeline.reports.papers import PaperRecipe, paper_recipe
from pipeline.reports.predictions import find_predictions, read_predictions
from pipeline.runs.folder import RunFolder, Start, starts_of
from pipeline.runs.rows import is_number
from pipeline.stores.place import Place, parse_place
from pipeline.terminal import duration

_NAMED = 50  # bad samples, skipped steps
_HOSTS = 4  # of a start that are named
_KEYS = 6  # of the config that differ from the recipe
_EVALUATIONS = 12  # in the table


def run_page(run: RunFolder, predictions: Path | None = None, shards: Place | None = None, analysis: Path | None = None) -> str:
    """The HTML of a run's page. ``predictions``, ``shards``, ``analysis``: where these are; None: in the run folder, or where
    its config says. Raises UserError: one that was given cannot be read, or plotly is not installed."""
    starts, recipe, problems = starts_of(run), paper_recipe(run), list(run.problems)
    if analysis and not (analysis / "analysis.json").is_file():
        raise UserError(f"--analysis {analysis} has no analysis.json", "make it with `pervit analyze`")
    inside, inside_problems = sections.analysis_figures(analysis or run.path / sections.ANALYSIS)
    problems += inside_problems
    paper = recipe.top1 if recipe and recipe.comparable else None
    analyze = f"pervit analyze {run.path} --data SHARDS --output {run.path / sections.ANALYSIS}"
    parts: dict[str, Html | None] = {
        "Result": _result(run, recipe, starts),
        "Curves": curves(run, starts, paper),
        "Speed": speed(run, starts),
        "Story of the run": join([_starts(starts), _skipped(run), _bad_samples(run)]),
        "Classes and mistakes": _mistakes(run, predictions, shards, problems),
        "Inside the model": inside or _how("Not analyzed yet. This command makes the figures", analyze),
        "Over training": sections.over_training(run),
        "Training images": sections.training_images(run),
        "Config": sections.config_section(run, recipe),
        "Environment": sections.environment_section(run),
        "Checkpoints": sections.checkpoints_section(run),
    }
    shown = [Section(title, body, closed=title == "Environment") for title, body in parts.items() if body]
    model = run.value("model.name")
    return page(run.name, f"{model}, {run.state}" if isinstance(model, str) else run.state, shown, problems)


def _how(words: str, command: str) -> Html:
    parts = join([html("<span>{}</span>", word) for word in command.split(" ")], " ")  # lines break between them, not in --data
    return html("<p>{}:</p><pre><code>{}</code></pre>", words, parts)


def _mistakes(run: RunFolder, predictions: Path | None, shards: Place | None, problems: list[str]) -> Html:
    path, data = find_predictions(run.path, predictions), run.value("data.path")
    if path is None:
        place = shards or (data if isinstance(data, str) else "SHARDS")
        command = f"pervit evaluate --checkpoint {run.path} --data {place} --predictions {run.path / 'predictions.parquet'}"
        return _how("No results per image yet. This command makes them", command)
    try:
        found = read_predictions(path)
    except UserError as error:
        if predictions:
            raise
        problems.append(str(error))
        return html("<p>{}</p>", error)
    pictures, why = None, ""
    try:
        if shards or isinstance(data, str):
            pictures = Pictures(shards or parse_place(data), run.classes)
    except (UserError, OSError):
        if shards:
            raise
        why = f"No pictures: the run's data.path {data} is not there. Add --data SHARDS."
    return mistakes(found, run.class_names or (pictures.classes if pictures else []), pictures, why)


def _result(run: RunFolder, recipe: PaperRecipe | None, starts: list[Start]) -> Html:
    """Tiles with the figures that one asks for first, the comparison in words, the evaluations."""
    tiles: list[tuple[str, str, str]] = []
    final, best, losses, epochs = run.result, run.best(), run.curve("loss")[1], run.curve("epoch")[1]
    if final and best:
        of_final, of_best = (f"{weights_name(row['weights'])}, step {row['step']:,}" for row in (final, best))
        images = f", {final['count']:,} images" if is_number(final.get("count")) else ""
        tiles.append(("Top-1, last evaluation", f"{final['top1']:.2f} %", of_final + images))
        if best is not final:
            tiles.append(("Top-1, best", f"{best['top1']:.2f} %", of_best))
        if is_number(final.get("top5")):
            tiles.append(("Top-5", f"{final['top5']:.2f} %", "same evaluation as top-1"))
        if is_number(final.get("loss")):
            tiles.append(("Validation loss", f"{final['loss']:.4f}", "cross-entropy"))
    if recipe and recipe.top1 is not None:
        tiles.append(("Paper", f"{recipe.top1:g} %", recipe.name + ("" if recipe.comparable else "; not this recipe")))
    if len(window := losses[-100:]):
        shown = f"mean of the last {len(window)} steps" if len(window) > 1 else "one step"
        tiles.append(("Training loss", f"{window.mean():.4f}", shown))
    if len(epochs):
        planned = (run.number("train.epochs") or 0) + (run.number("optim.cooldown_epochs") or 0)
        tiles.append(("Epochs", f"{epochs[-1]:.4g}", f"of {planned:g} planned" if planned else ""))
    if time := sum(start.seconds or 0 for start in starts):
        tiles.append(("Time", duration(time), counted(len(starts), "start")))
    tile = '<div class="tile"><div class="name">{}</div><div class="value">{}</div><div class="more">{}</div></div>'
    nothing = Html("") if final else html("<p>No evaluation yet.</p>")
    shown_tiles = html('<div class="tiles">{}</div>', [html(tile, *told) for told in tiles])
    return join([shown_tiles, nothing, _comparison(run, recipe, final), _evaluations(run)])


def _comparison(run: RunFolder, recipe: PaperRecipe | None, final: dict[str, Any] | None) -> Html:
    """The paper's figure for this config, or why there is none."""
    if recipe is None:
        return Html("")
    about = f": {recipe.heading.rstrip('.')}" if recipe.heading else ""
    head = html("The nearest recipe is <code>{}</code>{}.", recipe.name, about)
    if recipe.top1 is None:
        return html("<p>{} No paper has a top-1 figure for it.</p>", head)
    head = html("{} The paper has {} % top-1 for it.", head, f"{recipe.top1:g}")
    if not recipe.comparable:
        keys = [html("<code>{}</code>", key) for key in recipe.decisive[:_KEYS]]
        more = f" and {len(recipe.decisive) - _KEYS} more" if len(recipe.decisive) > _KEYS else ""
        differs = "<p>{} This run differs from it in {}{}, so the two figures are not of the same training.</p>"
        return html(differs, head, join(keys, ", "), more)
    if final is None:
        return html("<p>{}</p>", head)
    gap = final["top1"] - recipe.top1
    words = "the same" if abs(gap) < 0.005 else f"{abs(gap):.2f} points {'above' if gap > 0 else 'below'} it"
    unfinished = "" if run.state.finished else " so far, the schedule has not ended"
    colour = "good" if gap >= -0.2 else "bad" if run.state.finished else ""
    return html('<p>{} This run has {} %: <b class="{}">{}</b>{}.</p>', head, f"{final['top1']:.2f}", colour, words, unfinished)


def _evaluations(run: RunFolder) -> Html:
    rows = run.metrics.evaluations
    if len(rows) < 2:
        return Html("")

    def cells(row: dict[str, Any]) -> list[str]:
        forms = {"epoch": ".2f", "top1": ".2f", "top5": ".2f", "loss": ".4f"}
        epoch, *results = (format(row[name], form) if is_number(row.get(name)) else "" for name, form in forms.items())
        time = clock(row["time"]) if is_number(row.get("time")) else ""
        return [f"{row['step']:,}", epoch, weights_name(row["weights"]), *results, time]

    shown = [cells(row) for row in reversed(rows[-_EVALUATIONS:])]
    title = f"The last {len(shown)} of {len(rows)} evaluations" if len(rows) > len(shown) else "Evaluations"
    head = ("step", "epoch", "weights", "top-1 %", "top-5 %", "loss", "time")
    return html("<h3>{}</h3>{}", title, table(head, shown, numeric=(0, 1, 3, 4, 5)))


def _starts(starts: list[Start]) -> Html:
    """What became of the starts, and a line for each; columns of which nothing is known are left out."""
    if not starts:
        return html("<p>No file tells how this run was started.</p>")
    words = [counted(len(starts), "start")]
    if broken := sum(not start.whole for start in starts):
        words.append(f"{broken} ended by a failure")
    if repeated := sum(start.repeated or 0 for start in starts):
        words.append(f"{repeated:,} steps were taken twice")
    columns: dict[str, list[object]] = {
        "start": [start.number for start in starts],
        "began": [clock(start.began) for start in starts],
        "lasted": ["" if start.seconds is None else duration(start.seconds) for start in starts],
        "steps": ["" if start.step is None else f"{start.step:,} to {_count(start.reached) or '?'}" for start in starts],
        "of these repeated": [_count(start.repeated or None) for start in starts],
        "processes": [html("{} on {}", start.world_size or "?", _hosts(start)) for start in starts],
        "ZeRO": [_count(start.zero_stage) for start in starts],
        "job": [start.job or "" for start in starts],
        "ended": [html('<span class="{}">{}</span>', "" if start.whole else "bad", start.end) for start in starts],
    }
    kept = {name: cells for number, (name, cells) in enumerate(columns.items()) if number < 4 or any(map(str, cells))}
    numeric = [number for number, name in enumerate(kept) if name == "of these repeated"]
    return join([html("<p>{}.</p>", ", ".join(words)), table(list(kept), list(zip(*kept.values())), numeric=numeric)])


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
    named = first_few([f"{int(step):,}" for step in at], _NAMED)
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
    if missing := count - len(items):
        items.append(html("<li>{} more, which the run's output names.</li>", f"{missing:,}"))
    return html("<h3>Samples that cannot be used</h3><p>{}.</p><ul>{}</ul>", words, items)
