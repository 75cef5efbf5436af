"""A file system that becomes read-only under a run for good, as ext4 does by itself after an error of its disk."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from faults.power import Disk
from pipeline.checkpoint.folder import latest_step
from pipeline.errors import USER_ERROR
from support.ranks import train, wait_for_steps
from support.runs import step_rows, write_small_config

pytestmark = pytest.mark.multiprocess

OPTIONS = ("train.max_steps=12", "checkpoint.every_steps=3", "checkpoint.retry_seconds=3", "seed=3")


@pytest.mark.long
def test_a_run_whose_disk_becomes_read_only(digits_shards: Path, disk: Disk, tmp_path: Path) -> None:
    """Guards against a run that trains on for hours without a checkpoint or a log, hangs, or ends with a traceback, and against anything
    that was written before and is lost then."""
    config, run = write_small_config(digits_shards, tmp_path), disk.folder / "run"
    train(2, config, tmp_path / "straight", *OPTIONS).succeed()
    job = train(2, config, run, *OPTIONS)
    assert job.until(lambda: latest_step(run) == 3) and wait_for_steps(job, run, 1), job.outputs()
    subprocess.run(["mount", "-o", "remount,abort", disk.folder], capture_output=True)  # EROFS for all, also for open files
    assert job.wait() == [USER_ERROR] * 2, job.outputs()
    sentences = [job.stderr(rank).splitlines()[-1] for rank in range(2)]
    assert any(sentence.startswith(f"error: {run}/") for sentence in sentences), job.outputs()
    for sentence in sentences:  # of its own file, or of the rank that met it first
        assert re.match(rf"error: (rank [01] \(host \S+, pid \d+\) ended at step \d+, \S.*: )?{run}/", sentence), job.outputs()
        # The kernel says the one to who writes or opens, the other to who syncs what it had taken before.
        assert re.search(r"\((Read-only file system|Input/output error)\)", sentence), job.outputs()
        assert "Traceback" not in job.outputs(), job.outputs()
    disk.restart()
    saved = latest_step(run)
    assert saved and saved >= 3 and [row["step"] for row in step_rows(run)][:saved] == list(range(1, saved + 1))
    again = train(2, config, run, *OPTIONS).succeed()
    assert f"resuming {run} from step {saved}" in again.stdout()
    assert [row["loss"] for row in step_rows(run)] == [row["loss"] for row in step_rows(tmp_path / "straight")]
