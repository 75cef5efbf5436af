"""Several run folders: where they are, and what of each a table needs, with what cannot be used and why."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from pipeline.config import Config, config_from_dict, flatten
from pipeline.errors import UserError
from pipeline.reports.run_folder import CONFIG, METRICS, RunFolder, read_run

_DEEPEST = 3  # levels of folders below one that holds runs


@dataclass(frozen=True)
class KnownRun:
    """A run folder whose config can be read.

    Attributes:
        config: as recorded; a key that was not there yet has what runs did then.
    """

    folder: RunFolder
    config: Config

    @property
    def path(self) -> Path:
        return self.folder.path

    @cached_property
    def flat(self) -> dict[str, Any]:
        """Dotted key -> value of the config; each switch of the model is a key."""
        return flat_config(self.config)

    @property
    def result(self) -> dict[str, Any] | None:
        """The last evaluation, of the averaged weights where the run keeps an average."""
        return self.folder.final()

    @cached_property
    def images(self) -> int | None:
        """Training images per epoch; None before the first step."""
        (_, epochs), (_, samples) = self.folder.curve("epoch"), self.folder.curve("samples")
        return round(samples[-1] / epochs[-1]) if len(epochs) and len(samples) and epochs[-1] > 0 else None

    @property
    def val_images(self) -> int | None:
        """Images of an evaluation; None before the first."""
        return int(self.result["count"]) if self.result and self.result.get("count") else None

    @cached_property
    def subset(self) -> float | None:
        """The fraction of the source's images in the shards (``--subset``); None where they are no longer there."""
        try:
            found = json.loads((Path(self.config.data.path) / "manifest.json").read_bytes())
            return float(found["splits"]["train"]["source"].get("subset", 1.0))
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            return None

    @property
    def finished(self) -> bool:
        """Whether the run is through and its last step was evaluated."""
        if self.folder.running or self.result is None or self.result["step"] < self.folder.step:
            return False
        last = self._last_step()
        return last is not None and self.folder.step >= last

    def _last_step(self) -> int | None:
        if self.folder.last_step is not None or not self.config.train.scale_epochs or self.folder.steps_per_epoch is None:
            return self.folder.last_step
        # A log of before the schedule was recorded: train.epochs is of the full set.
        return None if self.subset is None else int(self.config.train.epochs / self.subset * self.folder.steps_per_epoch)


def flat_config(config: Config) -> dict[str, Any]:
    """Dotted key -> value; each switch of the model is a key."""
    flat = flatten(config)
    switches = flat.pop("model.switches") or {}
    return {**flat, **{f"model.switches.{name}": value for name, value in switches.items()}}


def find_runs(paths: list[Path]) -> tuple[list[Path], list[str]]:
    """The run folders among paths and in the folders below them, in the order given, each once.

    Returns:
        The folders; and a sentence for each path where there is none.
    """
    found: dict[Path, Path] = {}
    problems = []
    for path in paths:
        runs = [path] if is_run(path) else _below(path)
        if not runs:
            problems.append(f"{path} {'holds no run folder' if path.is_dir() else 'is not there'}.")
        for run in runs:
            found.setdefault(run.resolve(), run)
    return list(found.values()), problems


def read_runs(paths: list[Path]) -> tuple[list[KnownRun], list[str]]:
    """Read run folders.

    Returns:
        Those whose config can be read; and a sentence for each of the others.
    """
    runs, problems = [], []
    for path in paths:
        try:
            folder = read_run(path)
            if not folder.config:
                raise UserError(f"{path}: {folder.problems[0] if folder.problems else 'it has no config.'}")
            runs.append(KnownRun(folder, config_from_dict(folder.config, str(path / CONFIG))))
        except UserError as error:
            problems.append(str(error))
    return runs, problems


def is_run(path: Path) -> bool:
    """Whether a folder looks like a run's."""
    return (path / METRICS).is_file() or (path / CONFIG).is_file() and (path / "environment.json").is_file()


def _below(path: Path) -> list[Path]:
    found = []
    for folder, names, _ in os.walk(path):
        here = Path(folder)
        if here != path and is_run(here):
            found.append(here)
            names.clear()
        elif len(here.relative_to(path).parts) >= _DEEPEST:
            names.clear()
        names.sort()
    return found
