"""Make the page about several runs: results that can be sorted and unfolded, curves over each other, what differs in the configs."""

from collections.abc import Callable
from functools import partial
from html import escape
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from pipeline.config.tables import DATA_SETS, FIGURES, paper_tables
from pipeline.errors import UserError, counted
from pipeline.models import model_entry
from pipeline.page import COLOURS, Figure, Html, Section, figure, html, join, page, table
from pipeline.reports import comparison
from pipeline.reports.comparison import Group, mean_text, results, value_text
from pipeline.reports.curves import Points, numbers, plot_title, smoothed, spread
from pipeline.reports.row_runs import Measured
from pipeline.reports.table_sheet import model_size
from pipeline.runs.folder import RunFolder, read_runs

_DASHES = {"solid": "solid", "dash": "dashed", "dot": "dotted", "dashdot": "double"}  # plotly's name -> that of a border
_POINTS = 30_000  # of all curves of a figure: a page with a hundred runs stays small
_MOST = 400  # of one curve
_ALONG = {key: FIGURES[key] for key in ("params_m", "gmacs", "speed")}  # what accuracies are shown against
_SYMBOLS = ("diamond-open", "square-open", "triangle-up-open", "circle-open")  # of papers


def comparison_page(paths: list[Path]) -> tuple[str, list[Path]]:
    """The page about the runs in these folders, and in the folders that hold some, with speeds from files of `throughput --json`; and
    those paths without a run that can be read. Raises UserError: all of them."""
    measured, places, others = Measured.read(paths)
    runs, unread = read_runs(places)
    notes = unread + others
    if not runs:
        problem = f"{', '.join(map(str, paths))}: no run that can be read ({' '.join(notes)})"
        raise UserError(problem, "pass the output_dir of runs")
    notes += [f"{run.path}: {problem}" for run in runs for problem in run.problems]
    groups = comparison.group_runs(runs)
    data = comparison.by_data(groups)
    sections = []
    for title, make in (("Results", _results), ("Accuracy and size", partial(_sizes, measured=measured)), ("Curves", _curves)):
        sections += [Section(title + f": {of}" * (len(data) > 1), make(same)) for of, same in data.items()]
    script = html("<script>{}</script>", Html(files("pipeline.reports").joinpath("comparison.js").read_text(encoding="utf-8")))
    sections.append(Section("Differences of the configs", join([_differences(groups), script])))
    models = {str(group.keys["model.name"]) for group in groups}
    about = counted(len(groups), "different config") + f" of {min(models)}" * (len(models) == 1) + "."
    about += " A row is a group of runs that differ only in their seed." * (len(groups) < len(runs))
    about += " Accuracies of different data sets do not compare: each set has its own table." * (len(data) > 1)
    lost = [path for path in places if not any(run.path.resolve().is_relative_to(path.resolve()) for run in runs)]
    title = counted(len(runs), "run") + f", {len(unread)} cannot be read" * bool(unread)
    return page(title, about, sections, notes), lost


def _results(groups: list[Group]) -> Html:
    titles = ["#", "Config", "Top-1 (%)", "Best top-1", "Top-5 (%)", "Val. loss", "Epochs", "Images/s", "Runs"]
    head = [html('<th class="{}" tabindex="0">{}</th>', "n" if n > 1 else "", title) for n, title in enumerate(titles)]
    fold = html('<button class="fold" type="button" aria-expanded="false" aria-label="Show the runs">▸</button>')
    row = '<tr{}><td>{}</td><td class="name">{}</td>{}</tr>'
    bodies = []
    for group in groups:
        finished, count = sum(run.state.finished for run in group.runs), len(group.runs)
        state = f"{count}" if finished == count else f"{count}, {finished} finished"
        name = html("{}{}{}", fold, _swatch(group), group.name)
        rows = [html(row, "", group.number, name, _cells(group.runs, state))]
        for run in group.runs:
            label = html("seed {} <code>{}</code>", run.settings.seed, run.path)
            rows.append(html(row, Html(' class="seed" hidden'), "", label, _cells([run], run.state.name)))
        bodies.append(html("<tbody>{}</tbody>", rows))
    several = any(len(group.runs) > 1 for group in groups)
    told = "The last evaluation, of averaged weights where a run keeps them. A click on a title sorts, one on ▸ shows the runs."
    told += " Mean ± standard deviation over the seeds (n − 1)." * several
    whole = html('<div class="wide"><table class="runs"><thead><tr>{}</tr></thead>{}</table></div>', head, bodies)
    evaluated = [group for group in groups if results(group.runs, "top1")]
    return join([whole, html('<p class="quiet">{}</p>', told), figure(_dots(evaluated)) if evaluated else ""])


def _cells(runs: list[RunFolder], state: str) -> list[Html]:
    """What one run, or the runs of a group, reached."""
    epochs = [values[-1] for run in runs if len(values := run.curve("epoch")[1])]
    speeds = [np.median(values) for run in runs if len(values := run.curve("images_per_second")[1])]
    best = [row["top1"] for run in runs if (row := run.best()) is not None]
    top1, top5, losses = (results(runs, figure) for figure in ("top1", "top5", "loss"))
    cells = [mean_text(top1), mean_text(best), mean_text(top5), mean_text(losses, 3)]
    cells += [f"{max(epochs):.1f}" if epochs else "", f"{np.mean(speeds):,.0f}" if speeds else "", state]
    return [html('<td class="n">{}</td>', cell) for cell in cells]


def _look(group: Group) -> tuple[str, str]:
    """Colour, and dash as plotly names it."""
    rounds, place = divmod(group.number - 1, len(COLOURS))
    return COLOURS[place], list(_DASHES)[rounds % len(_DASHES)]


def _swatch(group: Group) -> Html:
    colour, dash = _look(group)
    return html('<span class="swatch" style="border-top-style:{};border-top-color:{}"></span>', _DASHES[dash], colour)


def _dots(groups: list[Group]) -> Figure:
    """The last top-1 of every run, and the mean of each group."""
    traces: list[dict[str, Any]] = []
    for group in groups:
        values, place = results(group.runs, "top1"), f"{group.number} "  # a space: plotly would take numbers for a linear axis
        seeds = [f"seed {run.settings.seed}" for run in group.runs if run.result]
        traces.append({"type": "scatter", "mode": "markers", "x": values, "y": [place] * len(values), "text": seeds, "name": escape(group.name),
                       "hovertemplate": "%{x:.2f} %, %{text}", "marker": {"color": _look(group)[0], "size": 9, "opacity": 0.75}})  # fmt: skip
        if len(values) > 1:
            traces.append({"type": "scatter", "mode": "markers", "x": [float(np.mean(values))], "y": [place], "name": escape(group.name),
                           "hovertemplate": "%{x:.2f} %, mean", "marker": {"color": _look(group)[0], "size": 18, "symbol": "line-ns-open", "line": {"width": 3}}})  # fmt: skip
    layout = {
        "title": plot_title("Top-1 (%), by #; |: mean"),
        "showlegend": False, "hovermode": "closest", "margin": {"l": 30, "t": 34},
        "yaxis": {"type": "category", "categoryorder": "array", "categoryarray": [f"{group.number} " for group in reversed(groups)]},
    }  # fmt: skip
    return Figure(traces, layout, 90 + 26 * len(groups), "Top-1 of each run")


def _sizes(groups: list[Group], measured: Measured) -> Html:
    """Top-1 against parameters, GMACs and images/s, with the papers' figures of the same data: each paper's first figure."""
    classes = groups[0].runs[0].settings.model.num_classes
    images = {run.val_images for group in groups for run in group.runs}
    of_data = next((known for known in DATA_SETS.values() if known.classes == classes and known.val_images in images), None)
    tables = [table for table in paper_tables().values() if of_data in (row.data for row in table.rows)] if of_data else []
    plots = []
    for number, (key, title) in enumerate(_ALONG.items()):
        points: dict[str, dict[str, tuple[float, float]]] = {}  # paper -> label -> figure and top-1
        for its_table in tables:
            for row in its_table.rows:
                if row.data == of_data and row.subset == 1 and not row.test and {key, "top1"} <= row.figures.keys():
                    point = float(row.figures[key]), float(row.figures["top1"])
                    if point not in points.setdefault(its_table.paper, {}).values():
                        points[its_table.paper][", ".join(label for label in row.labels if label not in ("", "–", "✓"))] = point
        traces: list[dict[str, Any]] = [
            {"type": "scatter", "mode": "markers", "name": paper.partition(" (")[0], "x": [x for x, _ in its.values()], "y": [y for _, y in its.values()],
             "text": list(map(escape, its)), "hovertemplate": "%{text}: %{x:.4g}, %{y:.2f} %", "marker": {"symbol": _SYMBOLS[n % len(_SYMBOLS)], "size": 8, "color": COLOURS[-1 - n]}}
            for n, (paper, its) in enumerate(points.items()) if its
        ]  # fmt: skip
        for group in groups:
            top1, x = results(group.runs, "top1"), _figure_of(group, key, measured)
            if top1 and x:
                traces.append({"type": "scatter", "mode": "markers+text", "name": escape(group.name), "x": [x], "y": [float(np.mean(top1))], "text": [f"{group.number}"],
                               "textposition": "top center", "hovertemplate": "%{x:.4g}, %{y:.2f} %", "meta": f"g{group.number}", "showlegend": False,
                               "marker": {"color": _look(group)[0], "size": 11}})  # fmt: skip
        layout = {"title": plot_title(f"Top-1 (%) by {title}"), "hovermode": "closest", "showlegend": number == 0,
                  "xaxis": {"type": "log", "title": {"text": title, "font": {"size": 11}}}}  # fmt: skip
        if any(trace["mode"] == "markers+text" for trace in traces):
            plots.append(figure(Figure(traces, layout, 380, f"Top-1 by {title}")))
    if not plots:
        return html("<p>No run has been evaluated yet.</p>")
    told = "Dots: the runs, numbered as in the results; open marks: what the papers print of the same data. Parameters are counted; GMACs of a run are those that its model's paper prints; images/s are from files of <code>pervit throughput --json</code> among the arguments."
    return html('<p class="quiet">{}</p><div class="plots">{}</div>', Html(told), plots)


def _figure_of(group: Group, key: str, measured: Measured) -> float | None:
    """Millions of parameters, GMACs or images/s of a group's model; None where they are not known."""
    flat, settings = group.runs[0].flat, group.runs[0].settings.model
    if key == "speed":
        return float(found["fp32"]) if (found := measured.speed_of(flat)) else None
    try:
        if key == "params_m":
            return model_size(yaml.safe_dump({name: value for name, value in flat.items() if name.startswith("model.")}), key)
        entry = model_entry(settings.name)
        return entry.paper_gmacs if not settings.switches and settings.image_size == entry.image_size else None
    except (UserError, RuntimeError):  # of a package that is not here
        return None


def _curves(groups: list[Group]) -> Html:
    sizes = {run.images for group in groups for run in group.runs if run.images}
    along = "epoch" if len(sizes) < 2 else "millions of images seen"

    def curve(name: str, evaluated: bool, smooth: bool, run: RunFolder) -> Points:
        steps, values = run.evaluation_curve(name, run.counting_weights) if evaluated else run.curve(name)
        return _seen(run, steps, along), smoothed(values, max(5, len(values) // 50)) if smooth else values

    kinds = {  # title -> name of the values, whether of evaluations, whether smoothed
        "Top-1 (%)": ("top1", True, False),
        "Training loss, smoothed": ("loss", False, True),
        "Validation loss": ("loss", True, False),
        "Learning rate": ("lr", False, False),
        "Images/s": ("images_per_second", False, True),
    }
    figures = [_over_each_other(title, groups, partial(curve, *kind), along) for title, kind in kinds.items()]
    plots = [figure(shown) for shown in figures if any(len(trace["x"]) > 1 for trace in shown.traces)]
    if not plots:
        return html("<p>No run has taken two steps yet.</p>")
    chip = '<button class="chip" type="button" aria-pressed="true" data-group="g{0}">{1}{0} · {2}</button>'
    chips = [html(chip, group.number, _swatch(group), group.name) for group in groups]
    told = "One colour for the runs of a config: thin the runs, thick their mean. A click on a name hides its curves."
    return html('<div class="chips">{}</div><p class="quiet">{}</p><div class="plots">{}</div>', chips, told, plots)


def _seen(run: RunFolder, steps: np.ndarray, along: str) -> np.ndarray:
    """Steps on the horizontal axis: (n,) epochs or millions of images."""
    seen = steps * float(run.settings.train.global_batch_size)
    return seen / run.images if along == "epoch" and run.images else seen / 1e6


def _over_each_other(title: str, groups: list[Group], curve: Callable[[RunFolder], Points], along: str) -> Figure:
    most = min(_MOST, max(40, _POINTS // sum(len(group.runs) for group in groups)))
    traces = []
    for group in groups:
        curves = [curve(run) for run in group.runs]
        mean = comparison.mean_curve(curves)
        for run, points in zip(group.runs, curves):
            if len(points[0]):
                traces.append(_trace(group, points, most, mean is not None, f"{group.number}, seed {run.settings.seed}"))
        if mean is not None:
            traces.append(_trace(group, mean, most, False, f"{group.number}, mean"))
    layout = {
        "title": plot_title(title), "showlegend": False, "hovermode": "closest",
        "xaxis": {"title": {"text": along, "font": {"size": 11}}},
    }  # fmt: skip
    return Figure(traces, layout, 320, title)


def _trace(group: Group, points: Points, most: int, faint: bool, name: str) -> dict[str, Any]:
    kept = spread(len(points[0]), most)
    few = len(kept) <= 30
    colour, dash = _look(group)
    return {
        "type": "scatter", "mode": "lines+markers" if few else "lines", "x": numbers(points[0][kept]), "y": numbers(points[1][kept]),
        "name": name, "meta": f"g{group.number}", "opacity": 0.4 if faint else 1,
        "line": {"color": colour, "width": 1 if faint else 2.2, "dash": dash}, "marker": {"size": 4 if faint else 6},
        "hovertemplate": "%{x:.3~g}: %{y:.4~g}",
    }  # fmt: skip


def _differences(groups: list[Group]) -> Html:
    differing = comparison.differing_keys(groups)
    if not differing:
        return html("<p>The configs differ in nothing but the seed.</p>")
    head = ["key", *(html("{}{}", _swatch(group), group.number) for group in groups)]
    rows = [[html("<code>{}</code>", key), *map(value_text, values)] for key, values in differing.items()]
    named = html('<p class="quiet">Empty: the default, or not there for this model. Numbers as in the results.</p>')
    return join([named, table(head, rows, css="keys")])
