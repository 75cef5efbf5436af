"""Find what the papers say: the recipe that a run's config comes from, with its figure, and a table by its name."""

import re
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

from pipeline.config import decides_weights, find_recipe, load_config
from pipeline.config.loading import shipped_names, shipped_recipe
from pipeline.config.tables import ABLATIONS, PaperRow, PaperTable, heading, paper_tables
from pipeline.errors import UserError, did_you_mean
from pipeline.runs.folder import RunFolder, flat_config

# No figure of a paper is about these, beside the keys that do not decide the weights.
_OF_THE_RUN = ("seed", "train.precision", "train.teacher_weights", "data.order", "data.block_size", "data.window_blocks")


@dataclass(frozen=True)
class PaperRecipe:
    """The shipped config that is nearest to a run's."""

    name: str  # as ``--config`` takes it
    heading: str  # what it is, with paper and table; empty if it is from no paper
    top1: float | None  # in percent, the paper's; None if it has none
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
    for name in shipped_names():
        recipe = shipped_recipe(name)
        if name.startswith("base/") or recipe is None or _model(recipe) != values["model.name"]:
            continue
        try:
            changed = changes(flat_config(load_config(recipe)), values)
        except UserError:
            continue
        changed.pop("output_dir", None)
        if "model.name" in changed:
            continue
        nearest = PaperRecipe(name, *_told(recipe), changed)
        switches = sum(key.startswith("model.switches.") for key in changed)
        weight = 10 * switches + len(nearest.decisive) + 0.01 * len(changed)
        weight += 0.005 * name.startswith(ABLATIONS)  # of two equal ones the plain config
        found.append((round(1000 * weight), name, nearest))
    return min(found, key=lambda candidate: candidate[:2])[2] if found else None


def _told(recipe: Path | PaperRow) -> tuple[str, float | None]:
    """Heading and top-1 of a shipped config: what its row says, or its file's comments."""
    if isinstance(recipe, PaperRow):
        return heading(recipe), float(recipe.figures["top1"]) if "top1" in recipe.figures else None
    text = recipe.read_text(encoding="utf-8")
    top1 = re.search(r"Paper: (\d+(?:\.\d+)?) % top-1", text)
    headings = re.findall(r"^# (?!\s*Paper:)(.*(?:et al\.|Table|Fig\.|Sec\.|recipe of).*)", text, re.MULTILINE)
    return headings[0].strip() if headings else "", float(top1[1]) if top1 else None


def _model(recipe: Path | PaperRow) -> str:
    """The model that a shipped config, or what it begins from, names: reading all configs in full would take seconds."""
    if isinstance(recipe, PaperRow):
        named = re.search(r"^model\.name=(\S+)", "\n".join(recipe.change), re.MULTILINE)
        base = shipped_recipe(str(recipe.base))
    else:
        text = recipe.read_text(encoding="utf-8")
        named, begun = (re.search(form, text, re.MULTILINE) for form in (r"^  name: (\S+)", r"^base: (\S+)"))
        base = find_recipe(begun[1], recipe.parent) if begun else None
    return named[1] if named else _model(base) if base else "pervit_t"  # the default


def find_table(name: str) -> PaperTable:
    """A table by its name. Raises UserError: there is none of that name."""
    tables = paper_tables()
    if name in tables:
        return tables[name]
    remedy = did_you_mean(name, tables, "`pervit report --table list` lists them.")
    raise UserError(f"--table must be a table of the papers, got {name}: {remedy}")


def list_tables() -> str:
    """A line for each table, below its paper."""
    widest, papers = max(map(len, paper_tables())), []
    for paper, tables in groupby(paper_tables().values(), key=lambda table: table.paper):
        lines = [
            f"  {table.name:<{widest}}  {table.title} ({sum(row.config is not None for row in table.rows)} rows to train)"
            for table in tables
        ]
        papers.append("\n".join([paper, *lines]))
    return "\n\n".join(papers)
