"""A run folder as plain data, for reports: it reads whatever is there, and says in sentences what is missing or damaged.

Nothing here needs PyTorch, and nothing is written: a run may go on while its folder is read.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from pipeline.checkpoint.folder import FOLDER, step_folder
from pipeline.checkpoint.manifest import MANIFEST, CheckpointManifest
from pipeline.checkpoint.overview import read_manifests
from pipeline.config import parse_value
from pipeline.errors import UserError
from pipeline.reports.metric_rows import MetricRows, is_number, read_metrics
from pipeline.reports.tolerant import one_line, read_entries, read_lock, read_rows, read_text

CONFIG, ENVIRONMENT, METRICS, EVENTS = "config.yaml", "environment.json", "metrics.jsonl", "events.jsonl"
RESTARTS, LOCK, TENSORBOARD = "restarts.json", ".lock", "tensorboard"


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint's folder; ``manifest`` is None where it cannot be read, and ``problem`` says why."""

    step: int
    folder: Path
    manifest: CheckpointManifest | None
    problem: str | None
    written: float | None  # Unix time in seconds

    @property
    def bytes(self) -> int | None:
        """Size of its files by the manifest."""
        return sum(file.bytes for file in self.manifest.files) if self.manifest else None


@dataclass(frozen=True)
class RunFolder:
    """What a run folder tells; every part may be empty.

    Attributes:
        path: as it was given.
        config: section -> key -> value, as in ``config.yaml``, or as the newest checkpoint has it.
        precision: the first line of ``config.yaml``: the precision and why it was chosen.
        metrics: ``metrics.jsonl``.
        starts: entries of ``environment.json``, one per start.
        events: rows of ``events.jsonl``: starts, evaluations, saves, ends.
        restarts: entries of ``restarts.json``, which job scripts write.
        checkpoints: ascending by step.
        holder: what ``.lock`` says of the process that trains, or that ended without releasing the folder.
        running: whether a process holds the lock now.
        problems: what is missing or damaged, a sentence each.
    """

    path: Path
    config: dict[str, Any] = field(default_factory=dict)
    precision: str = ""
    metrics: MetricRows = field(default_factory=MetricRows)
    starts: list[dict[str, Any]] = field(default_factory=list)
    events: list[dict[str, Any]] = field(default_factory=list)
    restarts: list[dict[str, Any]] = field(default_factory=list)
    checkpoints: list[Checkpoint] = field(default_factory=list)
    holder: dict[str, Any] = field(default_factory=dict)
    running: bool = False
    problems: list[str] = field(default_factory=list)

    @property
    def name(self) -> str:
        """The folder's name."""
        return self.path.resolve().name

    def value(self, key: str, default: Any = None) -> Any:
        """A value of the config by its dotted key; ``default`` where there is none."""
        section, _, name = key.rpartition(".")
        values = self.config.get(section) if section else self.config
        return values.get(name, default) if isinstance(values, dict) else default

    def number(self, key: str) -> float | None:
        """A number of the config by its dotted key; None where there is none."""
        value = self.value(key)
        return value if is_number(value) else None

    def curve(self, name: str) -> tuple[np.ndarray, np.ndarray]:
        """Steps and values of a column of the training rows, (n,) each, without those that are not there."""
        steps, values = self.metrics.steps.get("step", np.empty(0)), self.metrics.steps.get(name)
        if values is None:
            return np.empty(0), np.empty(0)
        there = ~np.isnan(values)
        return steps[there], values[there]

    def evaluation_curve(self, name: str, weights: str) -> tuple[np.ndarray, np.ndarray]:
        """The same of the evaluations of ``model`` or ``ema``: ``top1``, ``top5``, ``loss``."""
        rows = [row for row in self.metrics.evaluations if row["weights"] == weights and is_number(row.get(name))]
        return np.array([row["step"] for row in rows], float), np.array([row[name] for row in rows], float)

    @property
    def evaluated_weights(self) -> list[str]:
        """Which weights were evaluated: ``model`` first, then ``ema``."""
        return sorted({str(row["weights"]) for row in self.metrics.evaluations}, key=lambda name: (name != "model", name))

    def best(self, weights: str | None = None) -> dict[str, Any] | None:
        """The evaluation row with the best top-1, of these weights or of any; the earliest of equals."""
        rows = [row for row in self.metrics.evaluations if weights in (None, row["weights"])]
        return max(rows, key=lambda row: row["top1"], default=None)

    def final(self, weights: str | None = None) -> dict[str, Any] | None:
        """The last evaluation, of these weights; None: of the average where the run kept one, else of the weights."""
        wanted = weights or (self.evaluated_weights or ["model"])[-1]
        return next((row for row in reversed(self.metrics.evaluations) if row["weights"] == wanted), None)

    @property
    def step(self) -> int:
        """The last step that the folder knows of."""
        steps = self.metrics.steps.get("step", np.empty(0))
        saved = [checkpoint.step for checkpoint in self.checkpoints]
        evaluated = [row["step"] for row in self.metrics.evaluations[-1:]]
        return int(max([0, *steps[-1:], *saved, *evaluated]))

    @property
    def steps_per_epoch(self) -> float | None:
        """From the last row with both; None before there is one."""
        steps, epochs = self.curve("epoch")
        return float(steps[-1] / epochs[-1]) if len(steps) and epochs[-1] > 0 else None

    @property
    def last_step(self) -> int | None:
        """The end of the schedule: as the run has recorded it, else from the config; None if neither tells."""
        recorded = [row["last_step"] for row in self.events if is_number(row.get("last_step"))]
        if recorded:
            return int(recorded[-1])
        most, epochs, per_epoch = self.number("train.max_steps"), self.number("train.epochs"), self.steps_per_epoch
        if epochs is None or per_epoch is None or self.value("train.scale_epochs"):
            return None if most is None else int(most)
        whole = math.ceil((epochs + (self.number("optim.cooldown_epochs") or 0)) * per_epoch - 1e-6)
        return whole if most is None else min(whole, int(most))

    @property
    def finished(self) -> bool:
        """Whether the last step of the schedule was taken and nothing is left to do."""
        return not self.running and self.last_step is not None and self.step >= self.last_step

    @property
    def newest_manifest(self) -> CheckpointManifest | None:
        """Of the newest checkpoint that can be read."""
        return next((each.manifest for each in reversed(self.checkpoints) if each.manifest), None)

    @property
    def classes(self) -> list[str]:
        """Class names in index order, as a checkpoint knows them; empty without one."""
        return list(self.newest_manifest.state.classes) if self.newest_manifest else []

    @property
    def class_names(self) -> list[str]:
        """What to call the classes; empty if no checkpoint says their names."""
        return (self.newest_manifest.state.class_names if self.newest_manifest else None) or self.classes


def read_run(path: Path) -> RunFolder:
    """Read a run folder.

    Args:
        path: a run's ``output_dir``.

    Raises:
        UserError: there is no such folder, or nothing in it is of a run.
    """
    if not path.is_dir():
        what = "is a file" if path.exists() else "does not exist"
        raise UserError(f"{path} {what}, a run folder needed", "pass the output_dir of a run")
    if not any((path / name).exists() for name in (CONFIG, ENVIRONMENT, METRICS, FOLDER)):
        raise UserError(
            f"{path} is no run folder: it has no {CONFIG}, {ENVIRONMENT}, {METRICS} or {FOLDER}/",
            "pass the output_dir of a run",
        )
    problems: list[str] = []
    checkpoints = _checkpoints(path, problems)
    config, precision = _config(path, checkpoints, problems)
    metrics = _metrics(path, problems)
    starts = read_entries(path / ENVIRONMENT, problems, "the starts of the run, their hosts and versions are not known")
    holder, running = read_lock(path / LOCK)
    if metrics.half_a_line and not running:
        problems.append(
            f"The last line of {METRICS} has no end: the run was killed while it wrote it, or the copy was cut off."
        )
    return RunFolder(
        path=path,
        config=config,
        precision=precision,
        metrics=metrics,
        starts=starts,
        events=read_rows(path / EVENTS, problems),
        restarts=read_entries(path / RESTARTS, problems, ""),
        checkpoints=checkpoints,
        holder=holder,
        running=running,
        problems=problems,
    )


def _config(path: Path, checkpoints: list[Checkpoint], problems: list[str]) -> tuple[dict[str, Any], str]:
    text = read_text(path / CONFIG, problems, "what was trained is not known")
    first = text.partition("\n")[0]
    precision = first[2:].strip() if first.startswith("# ") else ""
    tree: Any = None
    if text:
        try:
            tree = parse_value(text)
        except ValueError as error:
            problems.append(f"{CONFIG} is damaged ({one_line(error)}).")
    if isinstance(tree, dict) and tree:
        return {str(key): value for key, value in tree.items()}, precision
    if text and tree is None and not problems:
        problems.append(f"{CONFIG} is damaged (it holds no keys).")
    for checkpoint in reversed(checkpoints):
        if checkpoint.manifest:
            problems.append(f"The config shown is that of the checkpoint of step {checkpoint.step}.")
            return dict(checkpoint.manifest.state.config), precision
    return {}, precision


def _metrics(path: Path, problems: list[str]) -> MetricRows:
    try:
        found = read_metrics(path / METRICS)
    except FileNotFoundError:
        problems.append(f"{METRICS} is missing: there are no curves and no evaluations.")
        return MetricRows()
    except OSError as error:
        problems.append(f"{METRICS} cannot be read ({error.strerror}): there are no curves and no evaluations.")
        return MetricRows()
    if found.damaged:
        problems.append(f"{found.damaged:,} line{'s' * (found.damaged != 1)} of {METRICS} cannot be read and are left out.")
    if found.repeated:
        problems.append(f"{found.repeated:,} steps are in {METRICS} more than once: the last row of each counts.")
    return found


def _checkpoints(path: Path, problems: list[str]) -> list[Checkpoint]:
    try:
        manifests = read_manifests(path)
    except OSError as error:
        problems.append(f"{FOLDER}/ cannot be read ({error.strerror}).")
        return []
    found = []
    for step, manifest in manifests.items():
        folder = step_folder(path, step)
        sentence = str(manifest) if isinstance(manifest, UserError) else None
        if sentence:
            problems.append(sentence)
        found.append(Checkpoint(step, folder, None if isinstance(manifest, UserError) else manifest, sentence, _age(folder)))
    return found


def _age(folder: Path) -> float | None:
    for path in (folder / MANIFEST, folder):
        try:
            return path.stat().st_mtime
        except OSError:
            continue
    return None
