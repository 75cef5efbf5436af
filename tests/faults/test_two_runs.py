"""Two runs in one folder: the second is refused, and a killed first one leaves nothing in the way."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from support.ranks import Job, run_forked
from support.runs import step_rows
from support.small_run import SMALL_MODEL

pytestmark = pytest.mark.multiprocess


def test_a_second_run_is_refused_until_the_first_is_dead(small_run: Path, tmp_path: Path) -> None:
    """Guards against two jobs that write one folder's checkpoints in turns, and against a lock that outlives a crash."""
    run = tmp_path / "run"
    arguments = ("--config", small_run, f"output_dir={run}", *SMALL_MODEL)
    first = Job(1, *arguments, "train.max_steps=10000")
    try:
        assert first.until(lambda: (run / "metrics.jsonl").exists() and step_rows(run)), first.outputs()
        second = run_forked("pipeline.train", *arguments, "train.max_steps=1", check=False)
        assert second.returncode == 2
        assert f"{run} is being trained by process {first.pids[0]} on {os.uname().nodename}" in second.stderr
        assert "can have only one run at a time" in second.stderr and "Traceback" not in second.stderr
        assert first.runs
    finally:
        first.kill()
        first.wait()
    run_forked("pipeline.train", *arguments, "train.max_steps=1")
    assert [row["step"] for row in step_rows(run)] == [1]
