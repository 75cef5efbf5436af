"""The page about one run, put together from its sections."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from pipeline.errors import UserError
from pipeline.page import Html, Section, html, page
from pipeline.reports.paper import paper_recipe
from pipeline.reports.pictures import Pictures
from pipeline.reports.predictions import find_predictions, read_predictions
from pipeline.reports.run_folder import RunFolder
from pipeline.reports.sections.history import history
from pipeline.reports.sections.inside import ANALYSIS, analysis_figures, over_training, training_images
from pipeline.reports.sections.mistakes import mistakes
from pipeline.reports.sections.setup import checkpoints_section, config_section, environment_section
from pipeline.reports.sections.summary import state_of, summary
from pipeline.reports.sections.training import curves, speed
from pipeline.reports.story import starts_of
from pipeline.stores.place import Place, parse_place


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
    subtitle = html("{}{}", f"{model}, " if isinstance(model, str) else "", state_of(run))
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
