"""Show the inside of the model: figures of ``pipeline.analyze``, measures over training, and training images as the model saw them."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np

from pipeline.page import Figure, Html, figure, html, join, jpeg_uri, png_uri
from pipeline.reports.curves import Curve, curve_figure
from pipeline.runs import TENSORBOARD
from pipeline.runs.folder import RunFolder
from pipeline.runs.pictures import IMAGES, PictureFiles
from pipeline.runs.rows import is_number

ANALYSIS = "analysis"
_MOST_FIGURES, _MOST_BYTES = 60, 2_000_000  # of an analysis, in a page of 8 MB
_LINES = 24  # layers, or heads of a layer, that a figure can tell apart
_OF_AN_IMAGE = re.compile(r"image|_\d+$")  # name of a figure of single images
_MEASURES = {
    ("mean_attention_distance", ""): ("Mean attention distance", "patches"),
    ("gate", ""): ("Gate (share of positional attention)", ""),
    ("nonlocality", "phi_p"): ("Nonlocality of Φp", "patches"),
}


def analysis_figures(folder: Path) -> tuple[Html | None, list[str]]:
    """Figures that an analysis left, and what cannot be shown of it."""
    if not (folder / "analysis.json").is_file():
        return None, []
    problems, told = [], {}
    try:
        told = dict(json.loads((folder / "analysis.json").read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError, RecursionError) as error:
        problems.append(f"{folder / 'analysis.json'} is damaged ({' '.join(str(error).split())[:80]}).")
    entries = _entries(told)
    order = {file: place for place, file in enumerate(entries)}

    def place(path: Path) -> tuple[bool, int, Path]:
        """As the analysis lists them, but single images last."""
        name = path.relative_to(folder).as_posix()
        return bool(_OF_AN_IMAGE.search(path.stem)), order.get(name, len(order)), path

    figure_of = '<figure><h3>{0}</h3><img class="sheet" alt="{0}" src="{1}"><figcaption>{2}</figcaption></figure>'
    parts: list[Html] = []
    left_out, size = 0, 0
    for path in sorted(folder.rglob("*.png"), key=place):
        uri = ""
        if len(parts) < _MOST_FIGURES and size < _MOST_BYTES:
            try:
                uri = png_uri(path)
            except (OSError, ValueError):
                problems.append(f"{path} cannot be decoded.")
                continue
        if not uri or size + len(uri) > _MOST_BYTES:
            left_out += 1
            continue
        size += len(uri)
        title, caption = entries.get(path.relative_to(folder).as_posix(), (path.stem.replace("_", " "), ""))
        parts.append(html(figure_of, title, uri, caption))
    if not parts:
        return None, problems
    images = told.get("images")
    count = images.get("count") if isinstance(images, dict) else None
    over = f" over {count:,} images" if is_number(count) else ""
    more = f" {left_out} more figures are in {folder}." if left_out else ""
    return join([html("<p>Made by <code>pipeline.analyze</code>{}.{}</p>", over, more), *parts]), problems


def _entries(told: dict[str, Any]) -> dict[str, tuple[str, str]]:
    """File of a figure, as ``analysis.json`` lists it -> title, and caption with source."""
    found: dict[str, tuple[str, str]] = {}
    listed = told.get("figures")
    for entry in listed if isinstance(listed, list) else []:
        if isinstance(entry, dict) and isinstance(entry.get("files"), list):
            title, caption, source = (str(entry.get(key) or "") for key in ("title", "caption", "source"))
            found |= {str(file): (title, f"{caption} ({source})" if source else caption) for file in entry["files"]}
    return found


def over_training(run: RunFolder) -> Html | None:
    """Curves per layer of what ``eval.analyses`` has written with each evaluation (ConViT, Fig. 5 and 6)."""
    found: dict[tuple[str, str], list[tuple[float, Any]]] = {}  # measure and part -> (epoch, [layer][head]) of each evaluation
    for row in run.metrics.analyses:
        at = row["epoch"] if is_number(row.get("epoch")) else row["step"]
        for name, values in row["analysis"].items():
            for part, layers in values.items() if isinstance(values, dict) else [("", values)]:
                if isinstance(layers, list):
                    found.setdefault((str(name), str(part)), []).append((at, layers))
    figures = [drawn for (name, part), points in found.items() if (drawn := _by_layer(name, part, points))]
    if not figures:
        return None
    note = "A line per layer over epochs: the mean over its heads, from orange (layer 1) to blue (the last)."
    return html('<p class="quiet">{}</p><div class="plots">{}</div>', note, [figure(drawn) for drawn in figures])


def _by_layer(name: str, part: str, points: list[tuple[float, Any]]) -> Figure | None:
    means: dict[int, list[tuple[float, float]]] = {}  # layer -> (epoch, mean over its heads); a layer may be without a measure
    for at, layers in points:
        for layer, heads in enumerate(layers[:_LINES]):
            numbers = [float(value) for value in heads if is_number(value)] if isinstance(heads, list) else []
            if numbers:
                means.setdefault(layer, []).append((at, float(np.mean(numbers))))
    count = min(max(len(layers) for _, layers in points), _LINES)
    curves = []
    for layer in sorted(means):
        epochs, values = np.array(means[layer]).T
        curves.append(Curve(f"layer {layer + 1}", epochs, values, dots=True, colour=_shade(layer / max(1, count - 1))))
    if not curves:
        return None
    title, unit = _MEASURES.get((name, part), (name.replace("_", " ") + (f", {part}" if part else ""), ""))
    return curve_figure(title, curves, unit=unit, height=360)


def _shade(depth: float) -> str:
    """From orange (first layer) to blue (last), legible on light and dark."""
    first, last = np.array([232, 150, 62]), np.array([58, 92, 190])
    return "rgb({},{},{})".format(*np.round(first + depth * (last - first)).astype(int).tolist())


def training_images(run: RunFolder) -> Html | None:
    """The newest picture of a training batch in the event files; None where there is none."""
    found = [picture for picture in PictureFiles(run.path / TENSORBOARD).look() if picture.name == IMAGES]
    try:
        uri = jpeg_uri(found[-1].png(), side=1200)
    except (IndexError, OSError, ValueError):
        return None
    shown = '<p>The first batch of a start, augmented and mixed.</p><img class="sheet" alt="training images" src="{}">'
    return html(shown, uri)
