"""The figure of the paper that a run is to be compared with, and the recipe that its config comes from."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipeline.config import Config, config_from_dict, flatten, load_config, shipped_recipes
from pipeline.errors import UserError
from pipeline.reports.run_folder import RunFolder

_TOP1 = re.compile(r"Paper: (\d+(?:\.\d+)?) % top-1")
_OF_THE_RECIPE = ("model.", "data.", "augment.", "train.", "optim.")
_NOT_OF_IT = ("data.path", "data.decode", "data.num_threads", "data.prefetch", "data.read_ahead", "train.micro_batch_size",
              "train.zero_stage", "train.compile", "train.precision", "train.teacher_weights", "data.max_bad_samples",
              "train.activation_checkpointing", "train.deterministic", "train.max_skipped_steps")  # fmt: skip
_FAR = 3  # keys of the recipe that may differ before a comparison with the paper would mislead


@dataclass(frozen=True)
class PaperRecipe:
    """The shipped config that is nearest to a run's.

    Attributes:
        file: relative to the folder of configs.
        heading: the comment lines of the file that name paper and table.
        top1: in percent, from the file's comment ``Paper: ... % top-1``; None if the paper has none.
        changed: keys in which the run differs, with the recipe's value and the run's.
    """

    file: str
    heading: str
    top1: float | None
    changed: dict[str, tuple[Any, Any]]

    @property
    def decisive(self) -> list[str]:
        """Those of the changed keys that decide what is trained."""
        return [key for key in self.changed if key.startswith(_OF_THE_RECIPE) and key not in _NOT_OF_IT]

    @property
    def comparable(self) -> bool:
        """Whether the run trains what the paper's figure is of."""
        return not self.decisive


def paper_recipe(run: RunFolder) -> PaperRecipe | None:
    """The shipped config of the same model that differs in the fewest switches, then keys; None if there is none."""
    if not run.config:  # it would be read as the defaults, which are PerViT-T's
        return None
    try:
        values = _keys(config_from_dict(run.config, source=str(run.path)))
    except UserError:
        return None
    found: list[tuple[int, str, PaperRecipe]] = []
    folder = shipped_recipes()
    for path in sorted(folder.rglob("*.yaml")):
        text = path.read_text(encoding="utf-8")
        if path.parent.name == "base" or not _may_be_of(text, str(values["model.name"]), folder, path):
            continue
        try:
            its = _keys(load_config(path))
        except UserError:
            continue
        keys = [key for key in {**its, **values} if key != "output_dir"]
        changed = {key: (its.get(key), values.get(key)) for key in keys if its.get(key) != values.get(key)}
        if "model.name" in changed:
            continue
        name = path.relative_to(folder).as_posix()
        recipe = PaperRecipe(name, _heading(text), _top1(text), changed)
        switches = sum(key.startswith("model.switches.") for key in changed)
        weight = 10 * switches + len(recipe.decisive) + 0.01 * len(changed)
        weight += 0.005 * name.startswith("ablations/")  # of two equal ones the plain config
        found.append((round(1000 * weight), name, recipe))
    return min(found, key=lambda each: each[:2])[2] if found else None


def _keys(config: Config) -> dict[str, Any]:
    """Dotted key -> value, a switch of the model as a key of its own."""
    values = flatten(config)
    switches = values.pop("model.switches")
    return {**values, **{f"model.switches.{name}": value for name, value in switches.items()}}


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
