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
from itertools import groupby
from pathlib import Path
from typing import Any

import yaml

from pipeline.config import decides_weights, find_recipe, load_config, shipped_recipes
from pipeline.errors import UserError
from pipeline.runs.folder import RunFolder, flat_config

# No figure of a paper is about these, beside the keys that do not decide the weights.
_OF_THE_RUN = ("seed", "train.precision", "train.teacher_weights", "data.order", "data.block_size", "data.window_blocks")


@dataclass(frozen=True)
class PaperRecipe:
    """The shipped config that is nearest to a run's."""

    file: str  # relative to the folder of configs
    heading: str  # the comment line of the file that names paper and table; empty if there is none
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


def changes(recipe: dict[str, Any], ours: dict[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Dotted key -> the recipe's value and ours, where these differ."""
    return {key: (recipe.get(key), ours.get(key)) for key in {**recipe, **ours} if recipe.get(key) != ours.get(key)}


def paper_recipe(run: RunFolder) -> PaperRecipe | None:
    """The shipped config of the same model that differs in the fewest switches, then keys; None if there is none."""
    try:
        values = run.flat
    except UserError:
        return None
    found: list[tuple[int, str, PaperRecipe]] = []
    for path in sorted(shipped_recipes().rglob("*.yaml")):
        if path.parent.name == "base" or not _may_be_of(path, values["model.name"]):
            continue
        try:
            changed = changes(flat_config(load_config(path)), values)
        except UserError:
            continue
        changed.pop("output_dir", None)
        if "model.name" in changed:
            continue
        text, name = path.read_text(encoding="utf-8"), path.relative_to(shipped_recipes()).as_posix()
        top1 = re.search(r"Paper: (\d+(?:\.\d+)?) % top-1", text)
        headings = re.findall(r"^# (?!\s*Paper:)(.*(?:et al\.|Table|Fig|Sec\.|recipe of).*)", text, re.MULTILINE)
        recipe = PaperRecipe(name, headings[0].strip() if headings else "", float(top1[1]) if top1 else None, changed)
        switches = sum(key.startswith("model.switches.") for key in changed)
        weight = 10 * switches + len(recipe.decisive) + 0.01 * len(changed)
        weight += 0.005 * name.startswith("ablations/")  # of two equal ones the plain config
        found.append((round(1000 * weight), name, recipe))
    return min(found, key=lambda candidate: candidate[:2])[2] if found else None


def _may_be_of(path: Path, model: str) -> bool:
    """Whether a shipped config, or what it begins from, names a model: reading all configs in full would take seconds."""
    named = re.search(r"^  name: (\S+)", path.read_text(encoding="utf-8"), re.MULTILINE)
    base = base_of(path)
    return named[1] == model if named else _may_be_of(base, model) if base else model == "pervit_t"  # the default


def base_of(path: Path) -> Path | None:
    """The file that a config begins from."""
    base = re.search(r"^base: (\S+)", path.read_text(encoding="utf-8"), re.MULTILINE)
    return find_recipe(base[1], path.parent) if base else None


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


@cache
def paper_tables() -> dict[str, PaperTable]:
    """All tables by name, in the order of the files."""
    found = {}
    for path in sorted((Path(__file__).parent / "tables").glob("*.yml")):
        page = yaml.load(path.read_text(encoding="utf-8"), yaml.BaseLoader)  # BaseLoader: 77.40 stays 77.40
        found.update({name: _table(name, {**page, **tree}) for name, tree in page["tables"].items()})
    return found


def _table(name: str, tree: dict[str, Any]) -> PaperTable:
    def row(cells: dict[str, Any]) -> PaperRow:
        figures = {key: cells[key] for key in FIGURES if key in cells}
        return PaperRow(tuple(cells["labels"]), cells.get("config"), figures, float(cells.get("subset", tree.get("subset", 1))))

    return PaperTable(
        name=name,
        paper=tree["paper"],
        title=tree["title"],
        note=tree.get("note", ""),
        columns=tuple(tree["columns"]),
        figures=tuple(tree["figures"]),
        data=DATA_SETS[tree.get("data", "imagenet")],
        reference=tree.get("reference"),
        either=tuple(tree.get("either", ())),
        rows=tuple(map(row, tree["rows"])),
    )


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
    """A line for each table, below its paper."""
    widest, papers = max(map(len, paper_tables())), []
    for paper, tables in groupby(paper_tables().values(), key=lambda table: table.paper):
        lines = [f"  {table.name:<{widest}}  {table.title} ({_to_train(table)} rows to train)" for table in tables]
        papers.append("\n".join([paper, *lines]))
    return "\n\n".join(papers)


def _to_train(table: PaperTable) -> int:
    return sum(row.config is not None for row in table.rows)


def recipe_file(config: str) -> Path:
    """The file of a row's config."""
    ablation = shipped_recipes() / "ablations" / f"{config}.yaml"
    return ablation if ablation.is_file() else find_recipe(config)
