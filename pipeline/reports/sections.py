"""Show what lies beside the metrics: figures of ``pipeline.analyze``, measures over training, training images as the model saw
them; the config beside the recipe, the environment, the checkpoints."""

import json
import math
import re
from pathlib import Path
from typing import Any

import numpy as np

from pipeline.checkpoint.folder import reasons_to_keep
from pipeline.checkpoint.manifest import find_damage
from pipeline.errors import counted, size_text
from pipeline.page import Figure, Html, clock, facts, figure, html, join, jpeg_uri, png_uri, shade, table
from pipeline.reports.curves import Curve, curve_figure
from pipeline.reports.papers import PaperRecipe
from pipeline.runs import CHECKPOINTS, TENSORBOARD
from pipeline.runs.files import Checkpoint
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
    ("nonlocality", "phi_p"): ("Nonlocality of Φp", "coordinates of [-1, 1]"),
}
_VERIFIED_BYTES = 4_000_000_000  # of checkpoints that are read for their checksums, the newest first


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
    return join([html("<p>Made by <code>pervit analyze</code>{}.{}</p>", over, more), *parts]), problems


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
        curves.append(Curve(f"layer {layer + 1}", epochs, values, dots=True, colour=shade(layer / max(1, count - 1))))
    if not curves:
        return None
    title, unit = _MEASURES.get((name, part), (name.replace("_", " ") + (f", {part}" if part else ""), ""))
    return curve_figure(title, curves, unit=unit, height=360)


def training_images(run: RunFolder) -> Html | None:
    """The newest picture of a training batch in the event files; None where there is none."""
    found = [picture for picture in PictureFiles(run.path / TENSORBOARD).look() if picture.name == IMAGES]
    try:
        uri = jpeg_uri(found[-1].png(), side=1200)
    except (IndexError, OSError, ValueError):
        return None
    shown = '<p>The first batch of a start, augmented and mixed.</p><img class="sheet" alt="training images" src="{}">'
    return html(shown, uri)


def config_section(run: RunFolder, recipe: PaperRecipe | None) -> Html | None:
    """Every key by section; what differs from the recipe stands out."""
    if not run.config:
        return None
    changed = recipe.changed if recipe else {}
    intro = Html("")
    if recipe:
        words = counted(len(changed), "key") if changed else "no key"
        changes = ((key, _shown(old), _shown(new)) for key, (old, new) in changed.items())
        rows = [(html("<code>{}</code>", key), old, html("<b>{}</b>", new)) for key, old, new in changes]
        differs = table(("key", "recipe", "this run"), rows) if rows else Html("")
        intro = html("<p>Differs in {} from <code>{}</code>.</p>{}", words, recipe.name, differs)
    sections = {key: value for key, value in run.config.items() if isinstance(value, dict)}
    parts = {"": {key: value for key, value in run.config.items() if key not in sections}, **sections}
    columns = []
    for name, values in parts.items():
        differing = {key for key in values if any(f"{each}.".startswith(f"{name}.{key}.".lstrip(".")) for each in changed)}
        cells = [(key, html("<b>{}</b>" if key in differing else "{}", _shown(value))) for key, value in values.items()]
        if cells:
            columns.append(html("<div><h3>{}</h3>{}</div>", name or "run", facts(cells)))
    whole = html('<details><summary class="quiet">All keys</summary><div class="plots">{}</div></details>', columns)
    return join([intro, whole])


def _shown(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, dict):
        return ", ".join(f"{key}: {_shown(part)}" for key, part in value.items()) or "{}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(_shown, value)) + "]"
    return str(value)


def environment_section(run: RunFolder) -> Html | None:
    """Of the last start; earlier ones where they differ."""
    if not run.starts:
        return None
    last = run.starts[-1]
    pairs: list[tuple[object, object]] = [("precision", run.precision)] if run.precision else []
    for key, value in last.items():
        if isinstance(value, dict):
            pairs += [(f"{key}: {name}", told) for name, told in value.items()]
        elif value is not None:
            pairs.append((key.replace("_", " "), _shown(value)))
    changes = [
        f"start {number} had {key.replace('_', ' ')} {_difference(start.get(key), last.get(key))}"
        for number, start in enumerate(run.starts, 1)
        for key in ("python", "packages", "git_commit", "device")
        if start.get(key) != last.get(key)
    ]
    return join([facts(pairs), html("<p>{}.</p>", "; ".join(changes)) if changes else ""])


def _difference(old: Any, new: Any) -> str:
    if isinstance(old, dict) and isinstance(new, dict):
        return ", ".join(f"{key} {_shown(old.get(key))}" for key in {**old, **new} if old.get(key) != new.get(key))
    return _shown(old)


def checkpoints_section(run: RunFolder) -> Html | None:
    """Size and state of each checkpoint; files are compared with their checksums as far as that takes seconds."""
    if not run.checkpoints:
        return html("<p>No checkpoint.</p>") if run.config or run.starts else None
    reasons = reasons_to_keep({found.step: found.manifest for found in run.checkpoints if found.manifest})
    left, rows = _VERIFIED_BYTES, []
    for checkpoint in reversed(run.checkpoints):
        size = checkpoint.bytes
        read = size is not None and size <= left
        left -= size if read and size else 0
        told: tuple[object, ...] = ("?", "?", "?", "")
        if checkpoint.manifest and size is not None:
            state = checkpoint.manifest.state
            told = (size_text(size), state.world_size, state.zero_stage, reasons.get(checkpoint.step, ""))
        rows.append((f"{checkpoint.step:,}", clock(checkpoint.written), *told, _verified(checkpoint, read)))
    head = ("step", "written", "size", "processes", "ZeRO", "kept as", "files")
    newest = run.newest_manifest
    parameters = f"{sum(math.prod(shape) for shape in newest.shapes.values()):,} parameters. " if newest else ""
    note = html("<p>{}All files are in <code>{}/</code>.</p>", parameters, CHECKPOINTS)
    return join([note, table(head, rows, numeric=(0, 2, 3, 4))])


def _verified(checkpoint: Checkpoint, contents: bool) -> Html:
    if checkpoint.manifest is None:
        return html('<span class="bad">damaged: {}</span>', checkpoint.problem)
    try:
        problems = find_damage(checkpoint.folder, checkpoint.manifest.files, contents)
    except OSError as error:
        return html('<span class="bad">cannot be read ({})</span>', error.strerror)
    if problems and not checkpoint.folder.exists():
        return html("removed meanwhile, the run continues")
    if problems:
        return html('<span class="bad">damaged: {}</span>', "; ".join(problems))
    whole = html('<span class="good">intact, checksums match</span>')
    return whole if contents else html("sizes match; checksums not read, they take long")
