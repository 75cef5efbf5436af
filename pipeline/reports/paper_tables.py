"""The papers' tables as data: ``tables/*.yml``, in which every value is text as the paper prints it.

A row with a ``config`` is a shipped one's, which a run can match (:mod:`pipeline.reports.row_runs`); a row without one is another
model's, with the paper's figures only. A table is named like its configs in ``configs/ablations/``.
"""

from __future__ import annotations

import difflib
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from pipeline.config import find_recipe, shipped_recipes
from pipeline.errors import UserError

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
    """A row of a table.

    Attributes:
        labels: its cells under the table's columns.
        config: name of a shipped config, None for another model's row.
        figures: key of :data:`FIGURES` -> what the paper prints.
        subset: fraction of the training images.
    """

    labels: tuple[str, ...]
    config: str | None
    figures: dict[str, str]
    subset: float


@dataclass(frozen=True)
class PaperTable:
    """A table or figure of a paper.

    Attributes:
        name: as its configs in ``configs/ablations/`` begin.
        figures: keys of :data:`FIGURES`, the columns of numbers.
        reference: config of the row from which differences are taken; None where rows differ in more than one thing.
        either: config keys of which a run has to have a value where the row's config has one, whatever it is.
    """

    name: str
    paper: str
    title: str
    note: str
    columns: tuple[str, ...]
    figures: tuple[str, ...]
    data: DataSet
    reference: str | None
    either: tuple[str, ...]
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
    raise UserError(f"--table {name} is no table of the papers: {remedy}")


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
