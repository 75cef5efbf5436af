"""Read how fast an earlier run was: its figures replace those of the model of time."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from statistics import median

from pipeline.config import Config
from pipeline.errors import UserError
from pipeline.hardware import gpu_of_driver
from pipeline.planning.memory import Subject
from pipeline.runs import METRICS

_FEWEST = 5  # steps that are measured


@dataclass(frozen=True)
class Measured:
    """What a run has measured."""

    source: str
    config: Config
    # Its processes, on how many hosts, and its ZeRO stage.
    world_size: int
    nodes: int
    stage: int
    device: str  # as it calls itself
    step_seconds: float  # median of its optimizer steps, waiting for data included
    steps: int
    data_wait: float  # share of a step spent waiting for data
    evaluation_seconds: float | None = None  # median of its evaluations; None: none is recorded
    start_seconds: float | None = None  # median from a start to its first step; None: not recorded

    def subject(self, planned: Subject) -> Subject:
        """The run itself, on the planned kind of GPU."""
        there = Subject(self.config, self.nodes, max(1, self.world_size // self.nodes), planned.gpu)
        return there.changed("train", precision=planned.precision, zero_stage=self.stage)


def read_measured(path: Path) -> Measured:
    """Measure a run's newest start that has enough steps; the first rows of a start, which warm up and compile, are left out.

    Raises:
        UserError: it is not a run folder, its config cannot be read, or it has too few steps.
    """
    import numpy as np

    from pipeline.runs.folder import read_run, starts_of
    from pipeline.runs.rows import is_number

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
        raise UserError(
            f"{path / METRICS} must have at least {_FEWEST} steps after the first {config.log.every_steps} of a start, which warm up",
            "pass a run that has trained longer",
        )
    waits = columns.get("data_wait", np.full(len(steps), np.nan))[mine]
    evaluations = [row["seconds"] for row in run.events if row.get("event") == "evaluation" and is_number(row.get("seconds"))]
    first_ends = columns["time"][steps == done + 1] if "time" in columns else np.empty(0)
    began = float(first_ends[0]) - start.began if len(first_ends) and start.began is not None else -1.0
    hosts = len(start.hosts) or 1
    return Measured(
        source=str(path),
        config=config,
        world_size=start.world_size,
        nodes=hosts if start.world_size % hosts == 0 else 1,
        stage=(start.zero_stage if start.zero_stage is not None else config.train.zero_stage) if start.world_size > 1 else 0,
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
    for name in ("name", "image_size", "num_classes", "switches"):
        if getattr(ours.model, name) != getattr(theirs.model, name):
            return f"its model.{name} is {getattr(theirs.model, name)}, not {getattr(ours.model, name)}"
    if theirs.train.precision not in ("auto", planned.precision):
        return f"its train.precision is {theirs.train.precision}, not {planned.precision}"
    known = gpu_of_driver(measured.device)
    on_gpu = any(maker in measured.device.lower() for maker in ("nvidia", "tesla", "geforce"))
    same = known is not None and known.chip == planned.gpu.chip if planned.gpu else not on_gpu
    if not same:
        return f"it ran on {measured.device}, and the plan is for {'CPUs' if planned.gpu is None else planned.gpu.name}"
    return None
