"""Read a run folder as a whole: its files, every row of ``metrics.jsonl``, its state, its starts; and find the run folders below a folder."""

import json
import os
from dataclasses import dataclass
from datetime import datetime
from functools import cached_property
from itertools import zip_longest
from pathlib import Path
from typing import Any

import numpy as np

from pipeline.config import Config, config_from_dict, flatten
from pipeline.errors import UserError, exit_reason
from pipeline.runs import CHECKPOINTS, CONFIG, ENVIRONMENT, METRICS
from pipeline.runs.files import RunFiles
from pipeline.runs.rows import MetricRows, Row, is_count, is_number, lines_left_out, read_metrics
from pipeline.runs.state import State, state_of

_DEEPEST = 3  # levels of folders below one that holds runs


class RunFolder(RunFiles):
    """What a run folder tells; every part may be empty. ``problems`` also has what is missing."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.name = path.resolve().name
        self.metrics = self._read_metrics()
        rows = self.metrics.evaluations
        # Which weights were evaluated: ``model`` first, then ``ema``; the averaged ones count where the run keeps an average.
        self.evaluated_weights = sorted({str(row["weights"]) for row in rows}, key=lambda name: (name != "model", name))
        self.counting_weights = (self.evaluated_weights or ["model"])[-1]
        # Their last evaluation; None before the first.
        self.result: Row | None = next((row for row in reversed(rows) if row["weights"] == self.counting_weights), None)
        for name, lost in ((CONFIG, "what was trained is"), (ENVIRONMENT, "the hosts and versions of its starts are")):
            if not (path / name).exists():
                self.problems.append(f"{name} is missing: {lost} not known.")
        self.state: State = state_of(self)
        if self.metrics.half_a_line and not self.state.alive:
            cut = "the run was killed while it wrote it, or the copy was cut off"
            self.problems.append(f"The last line of {METRICS} has no end: {cut}.")

    def _read_metrics(self) -> MetricRows:
        try:
            found = read_metrics(self.path / METRICS)
        except OSError as error:
            found = MetricRows()
            lost = "is missing" if isinstance(error, FileNotFoundError) else f"cannot be read ({error.strerror})"
            self.problems.append(f"{METRICS} {lost}: there are no curves and no evaluations.")
        if found.damaged:
            self.problems.append(lines_left_out(found.damaged, METRICS))
        if found.repeated:
            self.problems.append(f"{found.repeated:,} steps are in {METRICS} more than once: the last row of each counts.")
        return found

    @cached_property
    def settings(self) -> Config:
        """The config, validated. Raises UserError: it cannot be read or is not valid."""
        if not self.config:
            raise UserError(f"{self.path}: {self.problems[0] if self.problems else 'it has no config.'}")
        return config_from_dict(self.config, str(self.path / CONFIG))

    @cached_property
    def flat(self) -> dict[str, Any]:
        """Dotted key -> value of :attr:`settings`; each switch of the model is a key."""
        return flat_config(self.settings)

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

    def best(self) -> Row | None:
        """The evaluation row with the best top-1; the earliest of equals."""
        return max(self.metrics.evaluations, key=lambda row: row["top1"], default=None)

    @cached_property
    def images(self) -> int | None:
        """Training images per epoch; None before the first step."""
        (_, epochs), (_, samples) = self.curve("epoch"), self.curve("samples")
        return round(samples[-1] / epochs[-1]) if len(epochs) and len(samples) and epochs[-1] > 0 else None

    @property
    def val_images(self) -> int | None:
        """Images of an evaluation; None before the first."""
        return int(self.result["count"]) if self.result and self.result.get("count") else None

    @cached_property
    def subset(self) -> float | None:
        """The fraction of the source's images in the shards (``--subset``); None where they are no longer there."""
        try:
            found = json.loads((Path(self.settings.data.path) / "manifest.json").read_bytes())
            return float(found["splits"]["train"]["source"].get("subset", 1.0))
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            return None

    @property
    def classes(self) -> list[str]:
        """Class names in index order, as a checkpoint knows them; empty without one."""
        return list(self.newest_manifest.state.classes) if self.newest_manifest else []

    @property
    def class_names(self) -> list[str]:
        """What to call the classes; empty if no checkpoint says their names."""
        return (self.newest_manifest.state.class_names if self.newest_manifest else None) or self.classes


@dataclass(frozen=True)
class Start:
    """A start, and what it ran on. What no file tells is None."""

    number: int  # counted from 1
    began: float | None  # Unix time in seconds
    ended: float | None  # of its last activity
    step: int | None  # done before it
    reached: int | None  # the last step that it is known to have taken
    repeated: int | None  # steps at the end of it that the next start took again
    hosts: list[str]
    world_size: int | None
    zero_stage: int | None
    device: str | None
    job: str | None
    end: str  # why it ended, in words
    whole: bool  # it ended as it should: at the end of the schedule, by a signal, or not yet

    @property
    def seconds(self) -> float | None:
        """How long it lasted."""
        return None if self.began is None or self.ended is None else max(0.0, self.ended - self.began)


def starts_of(run: RunFolder) -> list[Start]:
    """All starts, in their order."""
    events: list[list[Row]] = []  # of each start, its own first
    for row in run.events:
        if row.get("event") == "start":
            events.append([row])
        elif events:
            events[-1].append(row)
    both = enumerate(zip_longest(run.starts, events, events[1:]), 1)  # entry, events, and those of the next start
    count = max(len(run.starts), len(events))
    return [_start(run, n, entry or {}, own or [], (next_ or [{}])[0], n == count) for n, (entry, own, next_) in both]


def _start(run: RunFolder, number: int, entry: dict[str, Any], own: list[Row], following: Row, last: bool) -> Start:
    opened = own[0] if own else {}
    reached = run.state.step if last else following.get("reached")
    if not is_count(reached):
        reached = max((row["step"] for row in own), default=None)
    rows = [*own, *(run.metrics.evaluations[-1:] if last else [])]
    times = [row["time"] for row in rows if is_number(row.get("time"))]
    if last:
        times += run.curve("time")[1][-1:].tolist()
    began = _time_of(entry.get("started")) or opened.get("time")
    end, whole = _end(run, own, last, began, following.get("time"))
    hosts, slurm = entry.get("hosts"), entry.get("slurm")
    return Start(
        number=number,
        began=began,
        ended=max(times, default=None),
        step=opened.get("step"),
        reached=reached,
        repeated=max(0, reached - following["step"]) if reached is not None and following else None,
        hosts=[str(host) for host in hosts] if isinstance(hosts, list) else [],
        world_size=_count(entry.get("world_size")) or _count(opened.get("world_size")),
        zero_stage=_count(opened.get("zero_stage")),
        device=entry.get("device") if isinstance(entry.get("device"), str) else None,
        job=str(slurm["job"]) if isinstance(slurm, dict) and slurm.get("job") else None,
        end=end,
        whole=whole,
    )


def _end(run: RunFolder, own: list[Row], last: bool, began: float | None, until: Any) -> tuple[str, bool]:
    """Why a start ended, and whether as it should."""
    if last and run.state.alive:
        return "is running", True
    for row in reversed(own):
        if row.get("event") == "end" and isinstance(row.get("reason"), str):
            return row["reason"], row.get("whole") is True or row["reason"].startswith("stopped by")
    for entry in reversed(run.restarts):
        when, code = _time_of(entry.get("time")), entry.get("exit_code")
        if when is not None and (began or 0) <= when and (not is_number(until) or when <= until):
            why = exit_reason(code) if is_count(code) else "a process failed"
            return f"the job was restarted: {why} (exit code {code})", False
    return "ended without a word: killed, or its machine failed" if own else "not recorded", not own


def _time_of(text: Any) -> float | None:
    """Unix time of what ``environment.json`` and ``restarts.json`` have, such as 2026-11-22T15:42:47+0000."""
    try:
        return datetime.strptime(text, "%Y-%m-%dT%H:%M:%S%z").timestamp()
    except (ValueError, TypeError, OverflowError):
        return None


def _count(value: Any) -> int | None:
    return value if is_count(value) else None


def read_run(path: Path) -> RunFolder:
    """Read a run folder, a run's ``output_dir``. Raises UserError: there is no such folder, or nothing in it is of a run."""
    problem = ""
    if not path.is_dir():
        problem = "must be a run folder, got a file" if path.exists() else "does not exist"
    elif not any((path / name).exists() for name in (CONFIG, ENVIRONMENT, METRICS, CHECKPOINTS)):
        problem = f"is not a run folder: it has no {CONFIG}, {ENVIRONMENT}, {METRICS} or {CHECKPOINTS}/"
    if problem:
        raise UserError(f"{path} {problem}", "pass the output_dir of a run")
    return RunFolder(path)


def read_runs(paths: list[Path]) -> tuple[list[RunFolder], list[str]]:
    """Read the runs of :func:`find_runs`: those with a valid config; a sentence for each other, and each path without one."""
    runs: list[RunFolder] = []
    folders, problems = find_runs(paths)
    for path in folders:
        try:
            run = read_run(path)
            run.settings  # noqa: B018 - raises if it is not valid
            runs.append(run)
        except UserError as error:
            problems.append(str(error))
    return runs, problems


def find_runs(paths: list[Path]) -> tuple[list[Path], list[str]]:
    """Run folders among paths and below them, in the order given, each once; and a sentence for each path without one."""
    found: dict[Path, Path] = {}
    problems = []
    for path in paths:
        runs = [path] if is_run(path) else _below(path)
        if not runs:
            problems.append(f"{path} {'holds no run folder' if path.is_dir() else 'does not exist'}.")
        for run in runs:
            found.setdefault(run.resolve(), run)
    return list(found.values()), problems


def is_run(path: Path) -> bool:
    """Whether a folder looks like a run's."""
    return (path / METRICS).is_file() or (path / CONFIG).is_file() and (path / ENVIRONMENT).is_file()


def flat_config(config: Config) -> dict[str, Any]:
    """Dotted key -> value; each switch of the model is a key."""
    flat = flatten(config)
    switches = flat.pop("model.switches") or {}
    return {**flat, **{f"model.switches.{name}": value for name, value in switches.items()}}


def switches_of(flat: dict[str, Any]) -> dict[str, Any]:
    """The switches of the model in a flat config, by name."""
    return {name.removeprefix("model.switches."): flat[name] for name in flat if name.startswith("model.switches.")}


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
