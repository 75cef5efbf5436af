"""Show how the run was set up: its config beside the recipe, its environment, its checkpoints."""

from __future__ import annotations

import math
from typing import Any

from pipeline.checkpoint.overview import reasons_to_keep, size_text
from pipeline.checkpoint.verification import find_damage
from pipeline.errors import counted
from pipeline.page import Html, clock, facts, html, join, table
from pipeline.reports.papers import PaperRecipe
from pipeline.runs import CHECKPOINTS
from pipeline.runs.files import Checkpoint
from pipeline.runs.folder import RunFolder

_VERIFIED_BYTES = 4_000_000_000  # of checkpoints that are read for their checksums, the newest first


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
        intro = html("<p>Differs in {} from <code>configs/{}</code>.</p>{}", words, recipe.file, differs)
    parts: dict[str, dict[str, Any]] = {"": {}}
    for key, value in run.config.items():
        if isinstance(value, dict):
            parts[key] = value
        else:
            parts[""][key] = value
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
    notes = html("<p>{}.</p>", "; ".join(changes)) if changes else Html("")
    return join([facts(pairs), notes])


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
