"""The clock of the day is set forwards and back by hours while a run trains, on all of its ranks or on one."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from faults import refusing
from pipeline.runs.files import RunFiles
from pipeline.runs.state import state_of
from support.ranks import Job, run_forked, train, wait_for_steps
from support.runs import step_rows
from support.small_run import SMALL_MODEL

pytestmark = [pytest.mark.multiprocess, pytest.mark.skipif(not refusing.compiler(), reason="needs a C compiler")]

CLOCK = Path(__file__).with_name("clock.c")
STEPS = 16
OPTIONS = (f"train.max_steps={STEPS}", "checkpoint.every_steps=5", "distributed.silence_timeout=30", "seed=3")


@pytest.mark.long
def test_a_clock_that_is_set_during_a_run(small_run: Path, tmp_path: Path) -> None:
    """Guards against ranks that count as lost, a lock that counts as abandoned, rows that are dropped, and a negative time left."""
    straight, run = tmp_path / "straight", tmp_path / "run"
    train(2, small_run, straight, *OPTIONS).succeed()
    clocks = [tmp_path / f"clock-{rank}" for rank in range(2)]
    for clock in clocks:
        clock.write_text("0")
    words = ("--config", small_run, f"output_dir={run}", "log.samples=true", *SMALL_MODEL, *OPTIONS)
    with refusing.preloaded(CLOCK):
        job = Job(2, *words, PERVIT_CLOCK_FILE=[str(clock) for clock in clocks])
        for hours in ((3, 3), (3, -2), (-5, -5)):
            assert wait_for_steps(job, run, 3), job.outputs()
            for clock, ahead in zip(clocks, hours):
                clock.write_text(str(3600 * ahead))
        assert wait_for_steps(job, run, 3), job.outputs()
        found = state_of(RunFiles(run))
        assert found.name == "running" and (found.seconds_left or 0) >= 0, found
        job.succeed()
    assert not job.stderr(0) and not job.stderr(1), job.outputs()
    rows, expected = step_rows(run), step_rows(straight)
    assert [(row["step"], row["loss"]) for row in rows] == [(row["step"], row["loss"]) for row in expected]
    assert all(row["images_per_second"] > 0 and 0 <= row["data_wait"] <= 1 for row in rows)
    assert max(row["time"] for row in rows) - min(row["time"] for row in rows) > 7 * 3600, "the clock was set"
    assert f"finished at step {STEPS}" in run_forked("pipeline.watch", run, "--once").stdout
    run_forked("pipeline.report", run, "--output", tmp_path / "page.html")
    told = run_forked("pipeline.audit", run, "--windows", 1, "--output", tmp_path / "audit.html", check=False)
    assert told.returncode == 0, told.stdout + told.stderr
    assert json.loads((run / "events.jsonl").read_text().splitlines()[-1])["event"] == "end"
