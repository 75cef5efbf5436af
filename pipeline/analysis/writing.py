"""Write an analysis: ``analysis.json``, the figures as PNG and SVG, and ``index.html``, which has them all inside.

Everything is made in a hidden folder first and then renamed, the page last: an analysis that fails leaves the previous one unchanged.
"""

import base64
import json
import os
import platform
import re
import shutil
from importlib.metadata import version
from pathlib import Path
from typing import Any

from pipeline.analysis.chapter import Findings, Plot
from pipeline.analysis.style import style
from pipeline.errors import UserError
from pipeline.files import sync_folder
from pipeline.page import Html, Section, facts, html, join, page, table

ANALYSIS, PAGE, FIGURES = "analysis.json", "index.html", "figures"
_DOTS_PER_INCH = 150
_HIDDEN = ".analysis.tmp"


def analysis_page(result: dict[str, Any], shown: list[Html]) -> str:
    """The page. Args: result: what is in ``analysis.json``; shown: its figures, in their order."""
    models = result.get("models", {})  # of several: name, which is its folder's, to where it is from
    linked = [(html('<a href="{0}/index.html">{0}</a>', name), source) for name, source in models.items()]
    sections = [Section("What was analyzed", table((), linked) if models else facts(_facts(result).items()), name="analyzed")]
    sections += [Section(entry["title"], picture, name=entry["name"]) for entry, picture in zip(result["figures"], shown)]
    if result["omitted"]:
        omitted = table((), result["omitted"].items())
        sections.append(Section("Figures that this analysis does not have", omitted, name="omitted"))
    numbers = html(
        'Every number behind the figures, with its unit, is in <a href="analysis.json">analysis.json</a>. Layers and heads are counted '
        "from 1 in the figures and from 0 in the file."
    )
    return page(f"Inside {result['model']}", numbers, sections, plots=False)


def _facts(result: dict[str, Any]) -> dict[str, str]:
    origin, images = result["origin"], result["images"]
    step = "" if origin["step"] is None else f", step {origin['step']:,}"
    weights = "fresh, not trained" if origin["weights"] == "fresh" else f"{origin['checkpoint']}{step} ({origin['weights']})"
    rows = {"Weights": weights, "Input": f"{result['image_size']} x {result['image_size']} pixels"}
    if result["switches"]:
        rows["Switches"] = ", ".join(f"{name}={value}" for name, value in result["switches"].items())
    rows["Images"] = "none"
    if images:
        left_out = f"; {images['left_out']} could not be used" if images["left_out"] else ""
        where = f"{images['data']}, {images['split']}" if images["split"] else images["data"]
        rows["Images"] = f"{images['count']:,} of {images['of']:,} ({where}), chosen with seed {images['seed']}{left_out}"
    if result["examples"]:
        rows["Examples"] = "; ".join(f"{example['key']} ({example['label']})" for example in result["examples"])
    return rows


def prepare_output(folder: Path) -> None:
    """Create the folder and check, before the work begins, that figures can be drawn and files be written to it. Raises
    UserError: they cannot; matplotlib is not installed."""
    with style():
        pass
    if folder.exists() and not folder.is_dir():
        raise UserError(f"--output must be a folder, got the file {folder}", "choose another name")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"--output {folder} cannot be created ({error.strerror})", "choose another folder") from None
    for place in (folder, folder / FIGURES):
        if place.exists() and not os.access(place, os.W_OK):
            raise UserError(f"--output {folder}: {place} cannot be written", "change its permissions, or choose another folder")


def write_analysis(folder: Path, about: dict[str, Any], findings: Findings) -> dict[str, Any]:
    """Write an analysis instead of a former one, into a folder from :func:`prepare_output`; returns what is in ``analysis.json``.
    ``about``: ``model``, ``origin``, ``images`` and what else describes the analysis; JSON. Raises UserError: matplotlib is not
    installed; OSError: from the system; ``filename`` is set."""
    hidden = folder / _HIDDEN
    shutil.rmtree(hidden, ignore_errors=True)
    try:
        (hidden / FIGURES).mkdir(parents=True)
        drawn = [_draw(plot, hidden / FIGURES) for plot in findings.plots]
        entries, shown = [entry for entry, _ in drawn], [picture for _, picture in drawn]
        versions = {"python": platform.python_version(), **{name: version(name) for name in ("torch", "numpy", "matplotlib")}}
        found = {"measures": findings.measures, "units": findings.units, "figures": entries, "omitted": findings.omitted}
        result = {**about, **found, "versions": versions}
        files = [Path(file) for entry in entries for file in entry["files"]] + [Path(ANALYSIS), Path(PAGE)]
        (hidden / ANALYSIS).write_text(_json(result), encoding="utf-8")
        (hidden / PAGE).write_text(analysis_page(result, shown), encoding="utf-8")
        former = _former_files(folder)
        (folder / FIGURES).mkdir(exist_ok=True)
        for file in files:  # the page is the last
            os.replace(hidden / file, folder / file)
        sync_folder(folder)
        for file in former - set(files):
            (folder / file).unlink(missing_ok=True)
        return result
    finally:
        shutil.rmtree(hidden, ignore_errors=True)


def _draw(plot: Plot, folder: Path) -> tuple[dict[str, Any], Html]:
    """Draw a figure into the folder; returns its entry in ``analysis.json``, and what the page shows."""
    png, svg = (folder / f"{plot.name}.{suffix}" for suffix in ("png", "svg"))
    with style():
        figure = plot.draw()
        figure.savefig(png, dpi=_DOTS_PER_INCH)
        figure.savefig(svg, dpi=_DOTS_PER_INCH, metadata={"Date": None})
        width, _ = figure.get_size_inches()
    entry: dict[str, Any] = {name: getattr(plot, name) for name in ("name", "title", "caption", "source")}
    entry["files"] = [f"{FIGURES}/{file.name}" for file in (png, svg)]
    links = [html('<a href="{}">{}</a>', file, file.rpartition(".")[2].upper()) for file in entry["files"]]
    picture = html(
        '<figure><div class="drawing" tabindex="0"><img width="{}" src="data:image/png;base64,{}" alt="{}"></div>'
        '<p>{}</p><p class="quiet">{}</p></figure>',
        round(96 * width),  # CSS pixels
        base64.b64encode(png.read_bytes()).decode(),
        plot.title,
        plot.caption,
        join([*filter(None, [plot.source]), *links], " · "),
    )
    return entry, picture


def _former_files(folder: Path) -> set[Path]:
    """The figures of a former analysis, by its ``analysis.json``."""
    try:
        listed = [file for figure in json.loads((folder / ANALYSIS).read_text())["figures"] for file in figure["files"]]
    except (OSError, ValueError, KeyError, TypeError):
        return set()
    return {Path(file) for file in listed if isinstance(file, str) and Path(file).parent == Path(FIGURES)}


def _json(value: Any) -> str:
    """JSON in which lists of numbers take one line."""
    text = json.dumps(value, indent=1, allow_nan=False, ensure_ascii=False) + "\n"
    return re.sub(r'\[\n[^\[\]{}"]*\]', lambda found: " ".join(found[0].split()), text)
