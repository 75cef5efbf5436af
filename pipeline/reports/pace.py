"""How fast a run was: what a plan takes in place of its model's figures."""

from __future__ import annotations

from pathlib import Path
from statistics import median

import numpy as np

from pipeline.config import config_from_dict
from pipeline.errors import UserError
from pipeline.planning.measured import Measured
from pipeline.reports.metric_rows import is_number
from pipeline.reports.run_folder import CONFIG, METRICS, read_run
from pipeline.reports.story import Start, starts_of

_FEWEST = 5  # steps that are measured


def read_pace(path: Path) -> Measured:
    """The pace of a run's newest start that has enough steps; the first rows of a start, which warm up and compile, are left out.

    Args:
        path: a run folder.

    Raises:
        UserError: it is no run folder, its config cannot be read, or it has too few steps.
    """
    run = read_run(path)
    if not run.config:
        raise UserError(f"{path / CONFIG} cannot be read, a run's config needed", "pass another run")
    config = config_from_dict(run.config, str(path / CONFIG))
    columns = run.metrics.steps
    needed = "step", "images_per_second"
    if any(name not in columns for name in needed):
        raise UserError(f"{path / METRICS} has no training steps, {_FEWEST} or more needed", "pass a run that has trained")
    steps, rates = columns["step"], columns["images_per_second"]
    for start in reversed(starts_of(run)):
        first = (start.step or 0) + config.log.every_steps  # the last row of those that were written first
        mine = (steps > first) & (steps <= (start.reached or np.inf)) & ~np.isnan(rates)
        if mine.sum() >= _FEWEST and start.world_size:
            break
    else:
        raise UserError(
            f"{path / METRICS} has fewer than {_FEWEST} steps after the first {config.log.every_steps} of a start, which warm up",
            "pass a run that has trained longer",
        )
    waits = columns.get("data_wait", np.full(len(steps), np.nan))[mine]
    evaluations = [row["seconds"] for row in run.events if row.get("event") == "evaluation" and is_number(row.get("seconds"))]
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
        start_seconds=_start_seconds(start, steps, columns.get("time")),
    )


def _start_seconds(start: Start, steps: np.ndarray, times: np.ndarray | None) -> float | None:
    """From a start to the end of its first step."""
    if start.began is None or times is None:
        return None
    ends = times[(steps == (start.step or 0) + 1) & ~np.isnan(times)]
    took = float(ends[0]) - start.began if len(ends) else -1.0
    return took if took >= 0 else None
