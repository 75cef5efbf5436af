"""Two runs in one folder: the second is refused, and a killed first one leaves nothing in the way."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from support.launching import REPOSITORY, clean_environment, run_module
from support.runs import step_rows

pytestmark = pytest.mark.multiprocess


def test_a_second_run_is_refused_until_the_first_is_dead(small_run: Path, tmp_path: Path) -> None:
    """Guards against two jobs that write one folder's checkpoints in turns, and against a lock that outlives a crash."""
    run = tmp_path / "run"
    arguments = ["--config", str(small_run), f"output_dir={run}", "log.every_steps=1"]
    command = [sys.executable, "-m", "pipeline.train", *arguments, "train.max_steps=10000"]
    first = subprocess.Popen(
        command, cwd=REPOSITORY, env=clean_environment(), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        while not (run / "metrics.jsonl").exists() or not step_rows(run):
            assert first.poll() is None
            time.sleep(0.2)
        second = run_module("pipeline.train", *arguments, "train.max_steps=1", check=False)
        assert second.returncode == 2
        assert f"{run} is being trained by process {first.pid} on {os.uname().nodename}" in second.stderr
        assert "can have only one run at a time" in second.stderr and "Traceback" not in second.stderr
        assert first.poll() is None
    finally:
        first.send_signal(signal.SIGKILL)
        first.wait()
    run_module("pipeline.train", *arguments, "train.max_steps=1")
    assert [row["step"] for row in step_rows(run)] == [1]
