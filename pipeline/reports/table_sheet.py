"""Put a paper's table together with our results beside it, as cells, for any format."""

import re
import shlex
from dataclasses import dataclass
from functools import cache
from typing import Any

import yaml

from pipeline.config.tables import FIGURES, PaperRow, PaperTable, train_command
from pipeline.models.registry import parameter_count
from pipeline.reports.comparison import mean_and_spread, results, yaml_text
from pipeline.reports.row_runs import WIDTHS, Filled, Setting, recipe_keys, row_has_own_widths
from pipeline.runs.folder import RunFolder, switches_of

_COUNTED = " The last evaluation counts, of the averaged weights where the run keeps an average. ± is the standard deviation over the seeds (n − 1)."
_RULE = (
    "A run belongs to a row if its recorded config is that of the row in every key that decides the weights, apart from the seed and "
    "the precision, and its data has the paper's numbers of classes, training and validation images; the name of its folder does not "
    "count." + _COUNTED
)
_RULE_ANY = (
    "A run belongs to a row if it has the row's model and switches; data, size and recipe may be others, and only runs that are alike "
    "in these stand in one column." + _COUNTED
)
_COUNTS = "Parameters and GMACs of ours are counted; GMACs in the papers' convention, without the matrix products of attention."
_TITLES = {**FIGURES, "top1_difference": "Δ top-1", "seeds": "Seeds"}


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
    """A column: ``group`` is the title above those that belong together, empty above the labels of the rows."""

    group: str
    title: str
    name: str

    @property
    def numeric(self) -> bool:
        return bool(self.group)

    @property
    def is_ours(self) -> bool:
        return self.group.startswith("Ours")

    @property
    def has_spread(self) -> bool:
        return self.is_ours and self.name in ("top1", "top5")

    @property
    def key(self) -> str:
        """Its name in a CSV file."""
        return re.sub(r"\W+", "_", f"{self.group} {self.name}".lower().replace("φ", "phi_")).strip("_")


@dataclass(frozen=True)
class Missing:
    """A row without a run, and what makes one."""

    labels: str
    command: str
    shards: str = ""  # the command that makes the data; empty where the row takes all of it


@dataclass
class Sheet:
    """A table to be written."""

    table: PaperTable
    notes: list[str]  # sentences that a reader has to know before the numbers
    columns: list[Column]
    rows: list[list[str | Number | None]]  # a cell for each column; None is an empty one
    footnotes: list[str]  # how ours were chosen
    missing: list[Missing]
    unused: dict[str, list[str]]  # reason -> runs in no row
    problems: list[str]  # a sentence for each folder that could not be read


def make_sheet(filled: Filled, problems: list[str]) -> Sheet:
    """The cells of a table with the runs of its rows."""
    table = filled.table
    several = len(filled.settings) > 1
    groups = ["Paper", *([f"Ours, {chr(65 + number)}" for number in range(len(filled.settings))] if several else ["Ours"])]
    differ = filled.any_data and table.reference is not None
    columns = [Column("", title, title) for title in table.columns]
    for group in groups:
        names = [*table.figures, *["top1_difference"] * differ, *["seeds"] * (group != "Paper")]
        columns += [Column(group, _TITLES[name], name) for name in names]
    rows: list[list[str | Number | None]] = []
    for number, row in enumerate(table.rows):
        rows.append([*row.labels])
        for column in columns[len(table.columns) :]:
            if column.is_ours:
                rows[-1].append(_ours(column.name, filled, number, groups.index(column.group) - 1))
            else:
                difference = column.name == "top1_difference"
                rows[-1].append(_paper_difference(table, row) if difference else row.figures.get(column.name))
    footnotes = [_RULE_ANY if filled.any_data else _RULE] + [_COUNTS] * bool({"params_m", "gmacs"} & {*table.figures})
    notes = [table.note] if table.note else []
    if filled.any_data:
        notes += _notes(filled, groups[1:])
        footnotes += _details(filled, groups[1:])
    missing = [*(_missing(filled, row) for row in filled.missing()), *_unmeasured(filled)]
    speeds = [speed for row in table.rows if (speed := _speed(filled, row))]
    devices = sorted({f"{speed['device']} with batches of {speed['batch_size']}" for speed in speeds})
    footnotes += [f"Images/s of ours are in fp32, of {' and '.join(devices)}."] * bool(devices)
    return Sheet(table, notes, columns, rows, footnotes, missing, filled.unused, problems)


def _notes(filled: Filled, names: list[str]) -> list[str]:
    if not filled.settings:
        return ["No finished run has the model and the switches of a row."]
    notes = [f"{name}: {_in_short(setting)}." for name, setting in zip(names, filled.settings)]
    if any(setting.changes for setting in filled.settings):
        title = filled.table.data.title
        compare = "compare the differences between rows, not the numbers."
        notes.insert(0, f"The paper's figures are of {title}, ours are not of the same data, size or recipe: {compare}")
    return notes


def _in_short(setting: Setting) -> str:
    """The data, the size of the images and the length of the schedule, where these are not the rows'."""
    size, epochs = setting.changes.get("model.image_size"), setting.changes.get("train.epochs")
    parts = [setting.data] + ([f"{size} pixels"] if size else []) + ([f"{epochs:g} epochs"] if epochs else [])
    return ", ".join(parts) + ("" if setting.changes else ", the rows' recipes")


def _details(filled: Filled, names: list[str]) -> list[str]:
    """All that differs from the rows' recipes, for each column of ours."""
    found = []
    for column, (name, setting) in enumerate(zip(names, filled.settings)):
        if not setting.changes:
            continue
        changes = ", ".join(f"{key}={yaml_text(value)}" for key, value in setting.changes.items())
        found.append(f"{name}, differences from the rows' recipes: {changes}.")
        rows = filled.table.rows
        widened = {
            rows[number].labels[0]: str(runs[0].flat.get(WIDTHS))
            for (number, place), runs in sorted(filled.runs.items())
            if place == column and row_has_own_widths(rows[number])
        }
        if widened:
            told = "; ".join(f"{label}: {widths}" for label, widths in widened.items())
            found.append(f"{name}, widths of the rows that are widened to equal cost: {told}.")
    return found


def _ours(name: str, filled: Filled, number: int, setting: int) -> str | Number | None:
    """A cell of ours: of a row, by its number, in a setting."""
    row, runs = filled.table.rows[number], filled.runs.get((number, setting), [])
    if row.test:
        runs = [run for run in runs if filled.measured.evaluated(run, row)]
    if name == "speed":
        return Number(speed["fp32"], digits=1) if (speed := _speed(filled, row)) else None
    if name == "seeds":
        return str(len(runs)) if runs else None
    if name == "top1_difference":
        return _our_difference(filled, runs, setting)
    if name in ("top1", "top5"):
        tests = [test[name] for run in runs if row.test and (test := filled.measured.evaluated(run, row))]
        found = mean_and_spread(tests if row.test else results(runs, name))
        return None if found is None else Number(*found)
    if row.config is None or filled.any_data and not runs:
        return None
    keys = runs[0].flat if runs else recipe_keys(row.config)
    model = {key: value for key, value in keys.items() if key.startswith("model.")}
    value = model_size(yaml.safe_dump(model), name)
    return Number(value, digits=2 if value >= 1 else 3)


def _speed(filled: Filled, row: PaperRow) -> dict[str, Any] | None:
    return filled.measured.speed_of(recipe_keys(str(row.config))) if row.config and "speed" in filled.table.figures else None


@cache
def model_size(keys: str, figure: str) -> float:
    """Millions of parameters, or GMACs in the papers' convention, of the ``model.`` keys of a config."""
    flat = yaml.safe_load(keys)
    name, size, classes = (flat[f"model.{key}"] for key in ("name", "image_size", "num_classes"))
    if figure == "gmacs":
        from pipeline.models.flops import count

        return count(name, size, classes, switches_of(flat)).gmacs_modules
    return parameter_count(name, classes, size, switches_of(flat)) / 1e6


def _paper_difference(table: PaperTable, row: PaperRow) -> Number | None:
    reference = next(other for other in table.rows if other.config == table.reference)
    if "top1" not in row.figures or row.config == table.reference:
        return None
    digits = max(len(shown.figures["top1"].partition(".")[2]) for shown in (row, reference))
    return Number(float(row.figures["top1"]) - float(reference.figures["top1"]), digits=digits, signed=True)


def _our_difference(filled: Filled, runs: list[RunFolder], setting: int) -> Number | None:
    reference = filled.runs.get(([row.config for row in filled.table.rows].index(filled.table.reference), setting), [])
    ours, theirs = mean_and_spread(results(runs, "top1")), mean_and_spread(results(reference, "top1"))
    return None if ours is None or theirs is None or runs == reference else Number(ours[0] - theirs[0], signed=True)


def _missing(filled: Filled, row: PaperRow) -> Missing:
    labels = ", ".join(label for label in row.labels if label not in ("", "✓", "–"))
    if filled.any_data and filled.settings:
        command = _command_like(filled, row)
        return Missing(labels + "; WIDTHS: for equal cost at this size" * ("WIDTHS" in command), command)
    return Missing(labels, train_command(str(row.config), f"seed=0 output_dir=runs/{_stem(row)}_0"), row.shards_command)


def _unmeasured(filled: Filled) -> list[Missing]:
    """What evaluates the runs that a row's test has not seen yet, and measures the models without a speed."""
    found = []
    for number, row in enumerate(filled.table.rows):
        for run in filled.runs.get((number, 0), []) if row.test else ():
            if not filled.measured.evaluated(run, row):
                (switch, value), *_ = row.test.items()
                file = f"{run.path}/{switch}_{str(value).lower()}.json"
                command = f"pervit evaluate --checkpoint {run.path} --data {run.settings.data.path} --switch {switch}={str(value).lower()} --json {file}"
                found.append(Missing(", ".join(row.labels), command))
    rows = [row for row in filled.table.rows if row.config and "speed" in filled.table.figures and not _speed(filled, row)]
    if rows:
        names = [str(row.config) if row.base else recipe_keys(str(row.config))["model.name"] for row in rows]
        command = f"pervit throughput {' '.join(dict.fromkeys(names))} --json throughput.json"
        found.append(Missing("Images/s, on a GPU", command))
    return found


def _command_like(filled: Filled, row: PaperRow) -> str:
    """The command of a run of the row in the first setting."""
    example = next(runs[0] for (_, column), runs in filled.runs.items() if column == 0)
    recipe, ours = recipe_keys(str(row.config)), example.flat
    changes = {"data.path": ours["data.path"], **filled.settings[0].changes}
    changes["train.micro_batch_size"] = ours["train.micro_batch_size"]
    if row_has_own_widths(row) and WIDTHS in changes:
        changes[WIDTHS] = "WIDTHS"
    overrides = [f"{key}={yaml_text(value)}" for key, value in changes.items() if recipe.get(key) != value]
    end = [f"seed={ours['seed']}", f"output_dir=runs/{_stem(row)}_any_{ours['seed']}"]
    return " ".join([f"pervit train --config {row.config}", *map(shlex.quote, [*overrides, *end])])


def _stem(row: PaperRow) -> str:
    """The name of its config without ``ablations/``, as run folders have it."""
    return str(row.config).rpartition("/")[2]
