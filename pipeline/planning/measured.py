"""Read what was measured before: a run's own steps, or those that a check of a GPU has recorded, the most similar to the plan."""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from pipeline.config import AUTO, Config, load_config
from pipeline.errors import UserError, counted
from pipeline.hardware import gpu_of_driver
from pipeline.models.registry import parameter_count
from pipeline.planning.memory import Subject
from pipeline.runs import METRICS
from pipeline.runs.folder import read_run, starts_of

_FEWEST = 5  # steps of an earlier run that are measured
_FORMAT = 1  # of a GPU's record


@dataclass(frozen=True)
class Measured:
    """What a run has measured."""

    source: str
    config: Config
    world_size: int  # its processes
    nodes: int  # their hosts
    stage: int  # of ZeRO
    device: str  # as it calls itself
    step_seconds: float  # median of its optimizer steps, waiting for data included
    steps: int
    data_wait: float  # share of a step spent waiting for data
    evaluation_seconds: float | None = None  # median of its evaluations; None: none is recorded
    start_seconds: float | None = None  # median from a start to its first step; None: not recorded
    case: str = ""  # of a GPU's record

    def subject(self, planned: Subject) -> Subject:
        """The run itself, on the planned kind of GPU."""
        there = Subject(self.config, self.nodes, max(1, self.world_size // self.nodes), planned.gpu)
        return there.changed({"train.precision": planned.precision, "train.zero_stage": self.stage})


def read_measured(path: Path) -> Measured:
    """Measure a run's newest start that has enough steps; the first rows of a start, which warm up and compile, are left out.
    Raises UserError: it is not a run folder, its config cannot be read, or it has too few steps."""
    run = read_run(path)
    config, columns = run.settings, run.metrics.steps
    if "images_per_second" not in columns:
        raise UserError(f"{path / METRICS} must have at least {_FEWEST} training steps, got 0", "pass a run that has trained")
    steps, rates = columns["step"], columns["images_per_second"]
    for start in reversed(starts_of(run)):
        done = start.step or 0
        first = done + config.log.every_steps  # the last row of those that were written first
        mine = (steps > first) & (steps <= (start.reached or np.inf)) & ~np.isnan(rates)
        if mine.sum() >= _FEWEST and start.world_size:
            break
    else:
        steps_of = f"steps after the first {config.log.every_steps} of a start, which warm up"
        raise UserError(f"{path / METRICS} must have at least {_FEWEST} {steps_of}", "pass a run that has trained longer")
    waits = columns.get("data_wait", np.full(len(steps), np.nan))[mine]
    evaluations = run.seconds_of("evaluation")
    first_ends = columns["time"][steps == done + 1] if "time" in columns else np.empty(0)
    began = float(first_ends[0]) - start.began if len(first_ends) and start.began is not None else -1.0
    hosts = len(start.hosts) or 1
    return Measured(
        source=str(path),
        config=config,
        world_size=start.world_size,
        nodes=hosts if start.world_size % hosts == 0 else 1,
        stage=start.zero_stage or 0,
        device=start.device or "",
        step_seconds=config.train.global_batch_size / float(np.median(rates[mine])),
        steps=int(mine.sum()),
        data_wait=0.0 if np.isnan(waits).all() else float(np.nanmedian(waits)),
        evaluation_seconds=median(evaluations) if evaluations else None,
        start_seconds=began if began >= 0 else None,
    )


def difference(measured: Measured, planned: Subject) -> str | None:
    """Why the run's figures say nothing about the plan; None if they do. Another number of processes, batch sizes, ZeRO stage and
    activation checkpointing are not an obstacle: the model of time knows them."""
    ours, theirs = planned.config, measured.config
    for name in ("name", "image_size", "num_classes", "switches", "options"):
        if getattr(ours.model, name) != getattr(theirs.model, name):
            return f"its model.{name} is {getattr(theirs.model, name)}, not {getattr(ours.model, name)}"
    if theirs.train.precision not in ("auto", planned.precision):
        return f"its train.precision is {theirs.train.precision}, not {planned.precision}"
    return _other_device(measured.device, planned)


def _other_device(device: str, planned: Subject) -> str | None:
    known = gpu_of_driver(device)
    on_gpu = any(maker in device.lower() for maker in ("nvidia", "tesla", "geforce"))
    if not (known is not None and known.chip == planned.gpu.chip if planned.gpu else not on_gpu):
        return f"it ran on {device}, and the plan is for {'CPUs' if planned.gpu is None else planned.gpu.name}"
    return None


def read_record(path: Path, planned: Subject) -> Measured:
    """Read the step of a GPU's record (``make gpu-check``) that is most similar to the plan: in its model's size, compiling, ZeRO stage
    and micro-batch, in this order. Batches are in memory there, so that it waited for no data. Raises UserError: it is no such
    record, has no steps, or is of another kind of GPU or precision."""
    must = f"--gpu-record must be a record of make gpu-check, got {path}"
    try:
        record = json.loads(path.read_text())
        if record["format"] != _FORMAT:
            raise UserError(f"{must}, whose format is {record['format']}, not {_FORMAT}", "write it again with this version")
        device = str(record["gpu"]["name"])
        rows = [row for row in record["rows"] if row["stage"] == "step" and row.get("source") == "memory"]
        steps = [step for row in rows if (row.get("ms") or 0) > 0 and (step := _recorded(path, device, row))]
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise UserError(f"{must} ({type(error).__name__}: {error})", "pass another file") from None
    if not steps:
        raise UserError(f"{must}, which has no steps with batches in memory", "run make gpu-check to its end")
    native = planned.changed({"train.precision": AUTO}).precision
    other = None if planned.precision == native else f"its steps are in {native}, not {planned.precision}"
    if why := _other_device(device, planned) or other:
        problem = f"--gpu-record must be of the planned kind of GPU, got {path}: {why}"
        raise UserError(problem, "pass another record, or leave it out")
    models = [config.model for config in (planned.config, *(step.config for step in steps))]
    sizes = {m.name: parameter_count(m.name, m.num_classes, m.image_size, m.arguments) for m in models}

    def distance(step: Measured) -> tuple[float, ...]:
        there = step.subject(planned)
        size = sizes[step.config.model.name] / sizes[planned.config.model.name]
        images = step.config.train.micro_batch / planned.config.train.micro_batch
        return abs(math.log(size)), there.compile != planned.compile, there.stage != planned.stage, abs(math.log(images))

    return min(steps, key=distance)


def _recorded(path: Path, device: str, row: Mapping[str, Any]) -> Measured | None:
    """None: of a config that is not there."""
    batch, world, stage, kind = row["micro_batch"], row["world_size"], row["zero_stage"], row["compile"]
    sizes = (f"train.micro_batch_size={batch}", f"train.global_batch_size={batch * world}", f"train.compile={kind}")
    try:
        config = load_config(row["model"], [*sizes, "train.activation_checkpointing=false"])
    except UserError:
        return None
    case = f"{row['model']}, micro-batch {batch}, train.compile={kind} on {counted(world, 'process')}"
    return Measured(str(path), config, world, 1, stage, device, row["ms"] / 1e3, steps=0, data_wait=0.0, case=case)
