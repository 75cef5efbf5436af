"""A hundred kills within a save: the next start finds a whole checkpoint each time. Takes ten minutes."""

from __future__ import annotations

import random
import re
import time
from pathlib import Path

import pytest
from faults.ranks import SMALL_MODEL, Job, is_saving, seed_from_environment

from pipeline.checkpoint import latest_step

pytestmark = [pytest.mark.soak, pytest.mark.multiprocess, pytest.mark.timeout(7200)]

KILLS, SAVE_SECONDS = 100, 0.3
MODEL = "model.switches={widths: [64, 64, 64, 64]}"  # 20 MB per checkpoint


def test_a_hundred_kills_within_a_save(small_run: Path, tmp_path: Path) -> None:
    """Guards against a checkpoint that is visible before it is complete: each start compares all checksums, loads, and sees that
    every number of weights and averages is the one that was saved at that step."""
    seed = seed_from_environment()
    print(f"\nPERVIT_SOAK_SEED={seed}")
    draw, run = random.Random(seed), tmp_path / "run"
    unfinished, loads = 0, 0
    for number in range(KILLS + 1):
        newest = latest_step(run) or 0
        overrides = (f"output_dir={run}", *SMALL_MODEL, MODEL, f"train.zero_stage={draw.choice((1, 3))}", "train.max_steps=1000000")
        job = Job(2, "--config", small_run, *overrides, module="faults.save_in_a_loop")
        assert job.until(lambda: "loaded" in job.stdout(0) and "loaded" in job.stdout(1)), job.outputs()
        for rank in range(2):
            assert re.search(r"loaded (\d+) wrong (\d+)", job.stdout(rank)).groups() == (str(newest), "0"), job.outputs()
            assert "warning" not in job.stderr(rank)
        loads += number > 0
        if number < KILLS:
            goal = newest + draw.randrange(3)
            assert job.until(lambda: (latest_step(run) or 0) >= goal), job.outputs()
            assert job.until(lambda: is_saving(run)), job.outputs()
            time.sleep(draw.uniform(0, SAVE_SECONDS))
        job.kill(*draw.choice(((0,), (1,), (0, 1))))
        job.kill() if number == KILLS else job.wait_after_kill()
        unfinished += is_saving(run)
    job.wait()
    print(f"{KILLS} kills -9 within a save of 2 processes, {unfinished} left one half done: {loads} loads of {KILLS} succeeded")
