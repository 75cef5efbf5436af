"""Find what the papers say: the recipe that a run's config comes from, with its figure, and the papers' tables as data.

In ``tables/*.yml`` every value is text as the paper prints it. A row with a ``config`` is a shipped one's, which a run can match
(:mod:`pipeline.reports.row_runs`); a row without one is another model's, with the paper's figures only. A table is named like its configs in
``configs/ablations/``.
"""

from __future__ import annotations

import difflib
import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from pipeline.config import decides_weights, find_recipe, load_config, shipped_recipes
from pipeline.errors import UserError
from pipeline.runs.folder import RunFolder, flat_config

_TOP1 = re.compile(r"Paper: (\d+(?:\.\d+)?) % top-1")
# No figure of a paper is about these, beside the keys that do not decide the weights.
_OF_THE_RUN = ("seed", "train.precision", "train.teacher_weights", "data.order", "data.block_size", "data.window_blocks")


@dataclass(frozen=True)
class PaperRecipe:
    """The shipped config that is nearest to a run's."""

    file: str  # relative to the folder of configs
    heading: str  # the comment line of the file that names paper and table
    top1: float | None  # in percent, from the file's comment ``Paper: ... % top-1``; None if the paper has none
    changed: dict[str, tuple[Any, Any]]  # keys in which the run differs: the recipe's value and the run's

    @property
    def decisive(self) -> list[str]:
        """Those of the changed keys that decide what is trained."""
        return [key for key in self.changed if decides(key)]

    @property
    def comparable(self) -> bool:
        """Whether the run trains what the paper's figure is of."""
        return not self.decisive


def decides(key: str) -> bool:
    """Whether a key of the config decides what a paper's figure is of."""
    return decides_weights(key) and key not in _OF_THE_RUN


def paper_recipe(run: RunFolder) -> PaperRecipe | None:
    """The shipped config of the same model that differs in the fewest switches, then keys; None if there is none."""
    try:
        values = run.flat
    except UserError:
        return None
    found: list[tuple[int, str, PaperRecipe]] = []
    folder = shipped_recipes()
    for path in sorted(folder.rglob("*.yaml")):
        text = path.read_text(encoding="utf-8")
        if path.parent.name == "base" or not _may_be_of(text, str(values["model.name"]), folder, path):
            continue
        try:
            recipe_keys = flat_config(load_config(path))
        except UserError:
            continue
        keys = [key for key in {**recipe_keys, **values} if key != "output_dir"]
        changed = {key: (recipe_keys.get(key), values.get(key)) for key in keys if recipe_keys.get(key) != values.get(key)}
        if "model.name" in changed:
            continue
        name = path.relative_to(folder).as_posix()
        recipe = PaperRecipe(name, _heading(text), _top1(text), changed)
        switches = sum(key.startswith("model.switches.") for key in changed)
        weight = 10 * switches + len(recipe.decisive) + 0.01 * len(changed)
        weight += 0.005 * name.startswith("ablations/")  # of two equal ones the plain config
        found.append((round(1000 * weight), name, recipe))
    return min(found, key=lambda candidate: candidate[:2])[2] if found else None


def _may_be_of(text: str, model: str, folder: Path, path: Path) -> bool:
    """Whether a config, or what it begins from, names a model: reading all configs in full would take seconds."""
    named = re.search(r"^  name: (\S+)", text, re.MULTILINE)
    if named:
        return named[1] == model
    base = re.search(r"^base: (\S+)", text, re.MULTILINE)
    if not base:
        return model == "pervit_t"  # the default
    try:
        below = (path.parent / base[1]).resolve()
        return _may_be_of(below.read_text(encoding="utf-8"), model, folder, below)
    except (OSError, RecursionError):
        return False


def _heading(text: str) -> str:
    """The comment line of a config that names paper and table; empty if there is none."""
    lines = [line[2:].strip() for line in text.splitlines() if line.startswith("# ")]
    named = [line for line in lines if re.search(r"et al\.|Table|Fig|Sec\.|recipe of", line) and not line.startswith("Paper:")]
    return named[0] if named else ""


def _top1(text: str) -> float | None:
    found = _TOP1.search(text)
    return float(found[1]) if found else None


_FOLDER = Path(__file__).parent / "tables"
FIGURES = {"params_m": "Parameters (M)", "gmacs": "GMACs", "top1": "Top-1 (%)", "top5": "Top-5 (%)"}


@dataclass(frozen=True)
class DataSet:
    """What tells a data set by a run's folder: numbers of classes, training and validation images."""

    title: str
    classes: int
    images: int
    val_images: int


DATA_SETS = {
    "imagenet": DataSet("ImageNet-1k", 1000, 1_281_167, 50_000),
    "cifar10": DataSet("CIFAR-10", 10, 50_000, 10_000),
    "cifar100": DataSet("CIFAR-100", 100, 50_000, 10_000),
}


@dataclass(frozen=True)
class PaperRow:
    """A row of a table."""

    labels: tuple[str, ...]  # its cells under the table's columns
    config: str | None  # name of a shipped config, None for another model's row
    figures: dict[str, str]  # key of :data:`FIGURES` -> what the paper prints
    subset: float  # fraction of the training images


@dataclass(frozen=True)
class PaperTable:
    """A table or figure of a paper."""

    name: str  # as its configs in ``configs/ablations/`` begin
    paper: str
    title: str
    note: str
    columns: tuple[str, ...]
    figures: tuple[str, ...]  # keys of :data:`FIGURES`, the columns of numbers
    data: DataSet
    reference: str | None  # config of the row from which differences are taken; None where rows differ in more than one thing
    either: tuple[str, ...]  # config keys of which a run has to have a value where the row's config has one, whatever it is
    rows: tuple[PaperRow, ...]

    @property
    def subsets(self) -> set[float]:
        """The fractions of the training images that its rows were trained on."""
        return {row.subset for row in self.rows if row.config}


@cache
def paper_tables() -> dict[str, PaperTable]:
    """All tables by name, in the order of the files."""
    found = {}
    for path in sorted(_FOLDER.glob("*.yml")):
        page = yaml.load(path.read_text(encoding="utf-8"), yaml.BaseLoader)  # BaseLoader: 77.40 stays 77.40
        found.update({name: _table(name, tree, page) for name, tree in page["tables"].items()})
    return found


def find_table(name: str) -> PaperTable:
    """A table by its name.

    Raises:
        UserError: there is none of that name.
    """
    tables = paper_tables()
    if name in tables:
        return tables[name]
    close = difflib.get_close_matches(name, tables, n=1)
    remedy = f"did you mean {close[0]}?" if close else "`python -m pipeline.report --table list` lists them."
    raise UserError(f"--table must be a table of the papers, got {name}: {remedy}")


def list_tables() -> str:
    """A line for each table."""
    widest = max(map(len, paper_tables()))
    lines, paper = [], ""
    for table in paper_tables().values():
        if table.paper != paper:
            lines += ["", table.paper] if paper else [table.paper]
            paper = table.paper
        rows = sum(row.config is not None for row in table.rows)
        lines.append(f"  {table.name:<{widest}}  {table.title} ({rows} rows to train)")
    return "\n".join(lines)


def recipe_file(config: str) -> Path:
    """The file of a row's config."""
    ablation = shipped_recipes() / "ablations" / f"{config}.yaml"
    return ablation if ablation.is_file() else find_recipe(config)


def _table(name: str, tree: dict[str, Any], page: dict[str, Any]) -> PaperTable:
    subset = tree.get("subset", page.get("subset", "1"))
    return PaperTable(
        name=name,
        paper=page["paper"],
        title=tree["title"],
        note=tree.get("note", ""),
        columns=tuple(tree["columns"]),
        figures=tuple(tree["figures"]),
        data=DATA_SETS[tree.get("data", page.get("data", "imagenet"))],
        reference=tree.get("reference"),
        either=tuple(tree.get("either", ())),
        rows=tuple(_row(row, subset) for row in tree["rows"]),
    )


def _row(row: dict[str, Any], subset: str) -> PaperRow:
    figures = {key: row[key] for key in FIGURES if key in row}
    return PaperRow(tuple(row["labels"]), row.get("config"), figures, float(row.get("subset", subset)))
