"""The start of a training: what it says, and a signal before its first step."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from pipeline.checkpoint.folder import latest_step, saved_steps
from pipeline.errors import PREEMPTED
from support.ranks import Job, train
from support.runs import step_rows
from support.small_run import SMALL_MODEL

pytestmark = pytest.mark.multiprocess

STOPPED = "stopped by a signal before the first step of this start: nothing new to save; the same command begins where this one would have"


def words(job: Job) -> list[str]:
    """What rank 0 has said, without date and time."""
    return re.findall(r"^\d{4}-\d\d-\d\d \d\d:\d\d:\d\d (.*)$", job.stdout(), re.MULTILINE)


def stopped_start(place: str, config: Path, run: Path, steps: int) -> list[str]:
    """A start of two processes of which one gets SIGTERM; what rank 0 has said."""
    arguments = ("--config", config, f"output_dir={run}", *SMALL_MODEL, f"train.max_steps={steps}")
    job = Job(2, place, 1, *arguments, module="faults.signalled_start")
    assert job.wait() == [PREEMPTED] * 2, job.outputs()
    assert not (job.stderr(0) + job.stderr(1)).count("Traceback")
    said = words(job)
    assert sum("stopped" in line for line in said) == 1
    return said


def test_a_signal_before_the_first_step(small_run: Path, tmp_path: Path) -> None:
    """Guards against a checkpoint that is promised and not there, a start that ends with another code or trains on, one that the
    next start cannot follow, and a start in silence."""
    run = tmp_path / "run"
    loading = stopped_start("pipeline.config.load_config", small_run, run, steps=2)
    assert loading[1:] == [STOPPED], "what will not train need not be built"
    building = stopped_start("pipeline.training.building.build_engine", small_run, run, steps=2)
    assert f"a new run: {run}" in building and building[-1] == STOPPED
    assert latest_step(run) is None
    trained = words(train(2, small_run, run, "train.max_steps=2").succeed())
    begun = [
        "pervit_t into",
        "data:",
        "a new run:",
        "building pervit_t",
        "building the optimizer",
        "opening",
        "precision",
    ]
    assert [line[: len(start)] for line, start in zip(trained, begun, strict=False)] == begun
    assert [row["step"] for row in step_rows(run)] == [1, 2]

    resuming = stopped_start("pipeline.training.building.build_engine", small_run, run, steps=4)
    assert f"resuming {run} from step 2" in resuming and resuming[-1] == STOPPED
    assert saved_steps(run) == [2] and [row["step"] for row in step_rows(run)] == [1, 2]
    train(2, small_run, run, "train.max_steps=4").succeed()
    assert [row["step"] for row in step_rows(run)] == [1, 2, 3, 4] and latest_step(run) == 4
