"""Put a paper's table together with our results beside it, as cells, for any format."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import yaml

from pipeline.config import find_recipe
from pipeline.reports.comparison import mean_and_spread, results
from pipeline.reports.papers import FIGURES, PaperRow, PaperTable, recipe_file
from pipeline.reports.row_runs import Filled, Setting, recipe_keys, row_has_own_widths
from pipeline.runs.folder import RunFolder, flat_config

_COUNTED = " The last evaluation counts, of the averaged weights where the run keeps an average. ± is the standard deviation over the seeds (n − 1)."
RULE = (
    "A run belongs to a row if its recorded config is that of the row in every key that decides the weights, apart from the seed and "
    "the precision, and its data has the paper's numbers of classes, training and validation images; the name of its folder does not "
    "count." + _COUNTED
)
RULE_ANY = (
    "A run belongs to a row if it has the row's model and switches; data, size and recipe may be others, and only runs that are alike "
    "in these stand in one column." + _COUNTED
)
COUNTS = "Parameters and GMACs of ours are counted; GMACs in the papers' convention, without the matrix products of attention."


@dataclass(frozen=True)
class Number:
    """A cell of ours: a mean, with the spread over the seeds where there are several."""

    value: float
    spread: float | None = None
    digits: int = 2
    signed: bool = False

    def __str__(self) -> str:
        text = f"{self.value:{'+' * self.signed}.{self.digits}f}".replace("-", "−")
        return text if self.spread is None else f"{text} ± {self.spread:.{self.digits}f}"


@dataclass(frozen=True)
class Column:
    """A column: ``group`` is the title above those that belong together; ``key`` its name in a CSV file."""

    group: str
    title: str
    key: str
    numeric: bool = True


@dataclass(frozen=True)
class Missing:
    """A row without a run, and what makes one."""

    labels: str
    command: str
    shards: str  # the command that makes the data; empty where the row takes all of it


@dataclass
class Sheet:
    """A table to be written."""

    name: str
    title: str
    paper: str
    notes: list[str]  # sentences that a reader has to know before the numbers
    columns: list[Column]
    rows: list[list[str | Number | None]]  # a cell for each column; None is an empty one
    footnotes: list[str]  # how ours were chosen
    missing: list[Missing]
    unused: dict[str, list[str]] = field(default_factory=dict)  # reason -> runs in no row
    problems: list[str] = field(default_factory=list)  # a sentence for each folder that could not be read


def make_sheet(filled: Filled, problems: Iterable[str] = ()) -> Sheet:
    """The cells of a table with the runs of its rows."""
    table = filled.table
    columns = [Column("", title, _key(title), numeric=False) for title in table.columns]
    columns += [Column("Paper", FIGURES[figure], f"paper_{figure}") for figure in table.figures]
    differ = filled.any_data and table.reference is not None
    if differ:
        columns.append(Column("Paper", "Δ top-1", "paper_top1_difference"))
    names = ["Ours"] if len(filled.settings) < 2 else [f"Ours, {chr(65 + n)}" for n in range(len(filled.settings))]
    for name in names:
        key = _key(name)
        columns += [Column(name, FIGURES[figure], f"{key}_{figure}") for figure in table.figures]
        columns += [Column(name, "Δ top-1", f"{key}_top1_difference")] * differ + [Column(name, "Seeds", f"{key}_seeds")]
    rows = []
    for number, row in enumerate(table.rows):
        cells: list[str | Number | None] = [*row.labels, *(row.figures.get(figure) for figure in table.figures)]
        if differ:
            cells.append(_paper_difference(table, row))
        for setting in range(len(names)):
            runs = filled.runs.get((number, setting), [])
            cells += [_our_figure(figure, row, runs, filled.any_data) for figure in table.figures]
            cells += [_our_difference(filled, runs, setting)] if differ else []
            cells.append(str(len(runs)) if runs else None)
        rows.append(cells)
    return Sheet(
        name=table.name,
        title=table.title,
        paper=table.paper,
        notes=_notes(filled, names),
        columns=columns,
        rows=rows,
        footnotes=[RULE_ANY if filled.any_data else RULE]
        + [COUNTS] * bool({"params_m", "gmacs"} & {*table.figures})
        + (_details(filled, names) if filled.any_data else []),
        missing=[_missing(filled, row) for row in filled.missing(0)],
        unused=filled.unused,
        problems=list(problems),
    )


def _notes(filled: Filled, names: list[str]) -> list[str]:
    table, notes = filled.table, [filled.table.note] if filled.table.note else []
    if not filled.any_data:
        return notes
    if not filled.settings:
        return [*notes, "No finished run has the model and the switches of a row."]
    if any(setting.changes for setting in filled.settings):
        notes.append(
            f"The paper's figures are of {table.data.title}, ours are not of the same data, size or recipe: compare the differences "
            f"between rows, not the numbers."
        )
    return [*notes, *(f"{name}: {_in_short(setting)}." for name, setting in zip(names, filled.settings))]


def _in_short(setting: Setting) -> str:
    """The data, the size of the images and the length of the schedule, where these are not the rows'."""
    size, epochs = setting.changes.get("model.image_size"), setting.changes.get("train.epochs")
    parts = [setting.data] + ([f"{size} pixels"] if size else []) + ([f"{epochs:g} epochs"] if epochs else [])
    return ", ".join(parts) + ("" if setting.changes else ", the rows' recipes")


def _details(filled: Filled, names: list[str]) -> list[str]:
    """All that differs from the rows' recipes, for each column of ours."""
    found = []
    for column, (name, setting) in enumerate(zip(names, filled.settings)):
        if setting.changes:
            changes = ", ".join(f"{key}={_value(value)}" for key, value in setting.changes.items())
            found.append(f"{name}, differences from the rows' recipes: {changes}.")
        widened = {
            filled.table.rows[number].labels[0]: str(runs[0].flat.get("model.switches.widths"))
            for (number, place), runs in sorted(filled.runs.items())
            if place == column and setting.changes and row_has_own_widths(filled.table.rows[number])
        }
        if widened:
            told = "; ".join(f"{label}: {widths}" for label, widths in widened.items())
            found.append(f"{name}, widths of the rows that are widened to equal cost: {told}.")
    return found


def _our_figure(figure: str, row: PaperRow, runs: list[RunFolder], any_data: bool) -> Number | None:
    if figure in ("top1", "top5"):
        found = mean_and_spread(results(runs, figure))
        return None if found is None else Number(*found)
    if row.config is None or any_data and not runs:
        return None
    keys = runs[0].flat if runs else recipe_keys(row.config)
    model = {name: value for name, value in keys.items() if name.startswith("model.")}
    params, gmacs = _size(yaml.safe_dump(model), figure == "gmacs")
    value = params / 1e6 if figure == "params_m" else gmacs
    return Number(value, digits=2 if value >= 1 else 3)


@cache
def _size(keys: str, macs: bool) -> tuple[int, float]:
    """Parameters, and GMACs in the papers' convention where they are asked for, of the ``model.`` keys of a config."""
    keys_of = yaml.safe_load(keys)
    switches = {key.rpartition(".")[2]: value for key, value in keys_of.items() if key.startswith("model.switches.")}
    name, size, classes = (keys_of[f"model.{key}"] for key in ("name", "image_size", "num_classes"))
    if macs:
        from pipeline.models.flops import count

        counted = count(name, size, classes, switches)
        return counted.params, counted.gmacs_modules
    import torch

    from pipeline.models import create_model

    with torch.device("meta"):
        model = create_model(name, classes, size, switches=switches)
    return sum(parameter.numel() for parameter in model.parameters()), 0.0


def _paper_difference(table: PaperTable, row: PaperRow) -> Number | None:
    reference = next(other for other in table.rows if other.config == table.reference)
    if "top1" not in row.figures or row.config == table.reference:
        return None
    digits = max(len(shown.figures["top1"].partition(".")[2]) for shown in (row, reference))
    return Number(float(row.figures["top1"]) - float(reference.figures["top1"]), digits=digits, signed=True)


def _our_difference(filled: Filled, runs: list[RunFolder], setting: int) -> Number | None:
    numbers = [number for number, row in enumerate(filled.table.rows) if row.config == filled.table.reference]
    reference = filled.runs.get((numbers[0], setting), [])
    ours, theirs = mean_and_spread(results(runs, "top1")), mean_and_spread(results(reference, "top1"))
    if ours is None or theirs is None or runs == reference:
        return None
    return Number(ours[0] - theirs[0], signed=True)


def _missing(filled: Filled, row: PaperRow) -> Missing:
    path = recipe_file(str(row.config))
    header = path.read_text(encoding="utf-8")
    labels = ", ".join(label for label in row.labels if label not in ("", "✓", "–"))
    if filled.any_data and filled.settings:
        command = _command_like(filled, row)
        chosen = "WIDTHS" in command
        return Missing(f"{labels}; WIDTHS: for equal cost at this size" if chosen else labels, command, "")
    patterns = r"^#\s+or: (.*\S)", r"^# (.*pipeline\.train --config \S+)"
    found = next(filter(None, (re.search(pattern, header, re.MULTILINE) for pattern in patterns)), None)
    command = found[1] if found else f"python -m pipeline.train --config {path.stem}"
    return Missing(labels, f"{command} seed=0 output_dir=runs/{row.config}_0", _shards_command(path))


def _command_like(filled: Filled, row: PaperRow) -> str:
    """The command of a run of the row in the first setting."""
    example = next(runs[0] for (_, column), runs in filled.runs.items() if column == 0)
    recipe, ours = recipe_keys(str(row.config)), example.flat
    changes = {"data.path": ours["data.path"], **filled.settings[0].changes}
    changes["train.micro_batch_size"] = ours["train.micro_batch_size"]
    if row_has_own_widths(row) and "model.switches.widths" in changes:
        changes["model.switches.widths"] = "WIDTHS"
    overrides = [f"{key}={_value(value)}" for key, value in changes.items() if recipe.get(key) != value]
    config = recipe_file(str(row.config))
    name = f"ablations/{config.stem}" if config.parent.name == "ablations" else config.stem
    end = [f"seed={ours['seed']}", f"output_dir=runs/{row.config}_any_{ours['seed']}"]
    return " ".join(["python -m pipeline.train --config", name, *map(shlex.quote, [*overrides, *end])])


def _shards_command(path: Any) -> str:
    """The command for a config's shards, from its header or its bases'."""
    text = path.read_text(encoding="utf-8")
    found = re.search(r"^# The shards: (.*\S)", text, re.MULTILINE)
    base = re.search(r"^base: (\S+)", text, re.MULTILINE)
    if found or base is None:
        return found[1] if found else ""
    from pipeline.config import load_config

    beneath = find_recipe(base[1], path.parent)
    same = flat_config(load_config(beneath))["data.path"] == flat_config(load_config(path))["data.path"]
    return _shards_command(beneath) if same else ""


def _value(value: Any) -> str:
    """As a command takes it."""
    return yaml.safe_dump(value, default_flow_style=True, width=10_000, allow_unicode=True).split("\n")[0]


def _key(title: str) -> str:
    return re.sub(r"\W+", "_", title.lower().replace("φ", "phi_")).strip("_")
