"""A hundred kills within a save: the next start finds an intact checkpoint each time. Takes ten minutes."""

from __future__ import annotations

import random
import time
from pathlib import Path

import pytest

from pipeline.checkpoint.folder import latest_step
from support.ranks import Job, is_saving, seed_from_environment
from support.small_run import SMALL_MODEL

pytestmark = [pytest.mark.soak, pytest.mark.multiprocess, pytest.mark.timeout(7200)]

KILLS, SAVE_SECONDS = 100, 0.3
MODEL = "model.switches={widths: [64, 64, 64, 64]}"  # 20 MB per checkpoint


def test_a_hundred_kills_within_a_save(small_run: Path, tmp_path: Path) -> None:
    """Guards against a checkpoint that is visible before it is complete: each start compares all checksums, loads, and sees that
    every number of weights and averages is the one that was saved at that step."""
    draw, run = random.Random(seed_from_environment()), tmp_path / "run"
    unfinished = 0
    for _ in range(KILLS):
        kill_within_a_save(start_and_check(small_run, run, draw), run, draw)
        unfinished += is_saving(run)
    last = start_and_check(small_run, run, draw)
    last.kill()
    last.wait()
    print(
        f"{KILLS} kills -9 within a save of 2 processes, {unfinished} left one half done: all {KILLS} loads after them succeeded"
    )


def start_and_check(config: Path, run: Path, draw: random.Random) -> Job:
    """Start; see that the newest checkpoint was loaded and holds what was saved."""
    newest = latest_step(run) or 0
    overrides = (f"output_dir={run}", *SMALL_MODEL, MODEL, f"train.zero_stage={draw.choice((1, 3))}", "train.max_steps=1000000")
    job = Job(2, "--config", config, *overrides, module="faults.save_in_a_loop")
    # Until the whole line is there: a rank's output may be read in the middle of it.
    assert job.until(lambda: all("\n" in job.stdout(rank).partition("loaded")[2] for rank in range(2))), job.outputs()
    for rank in range(2):
        assert f"loaded {newest} wrong 0\n" in job.stdout(rank), job.outputs()
        assert "warning" not in job.stderr(rank)
    return job


def kill_within_a_save(job: Job, run: Path, draw: random.Random) -> None:
    """Kill one rank, the other or both, at some moment of one of the next saves."""
    goal = (latest_step(run) or 0) + draw.randrange(3)
    assert job.until(lambda: (latest_step(run) or 0) >= goal), job.outputs()
    assert job.until(lambda: is_saving(run)), job.outputs()
    time.sleep(draw.uniform(0, SAVE_SECONDS))
    job.kill(*draw.choice(((0,), (1,), (0, 1))))
    job.wait_after_kill()
