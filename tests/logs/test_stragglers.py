"""A rank that the others wait for is named with its host wherever one looks, at every ZeRO stage; an even run names none."""

from __future__ import annotations

import os
import signal
import statistics
import time
from pathlib import Path

import pytest
from rich.console import Console
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from pipeline.metrics import COSTLY
from pipeline.reports.run_page import run_page
from pipeline.runs.folder import read_run
from pipeline.watch import screen
from support.ranks import Job, train
from support.runs import step_rows
from support.small_run import SMALL_MODEL

SIZES = ("train.global_batch_size=12", "log.every_steps=4", "data.decode=cpu")
HOST = os.uname().nodename


def trained(config: Path, run: Path, stage: int, sleeps: list[str], steps: int = 8) -> Job:
    more = (f"output_dir={run}", SMALL_MODEL[0], f"train.max_steps={steps}", *SIZES)
    program = {"module": "support.slow_rank", "PERVIT_SLEEP": sleeps}
    return Job(3, "--config", config, *more, f"train.zero_stage={stage}", **program).succeed()  # type: ignore[arg-type]


@pytest.mark.multiprocess
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_rank_that_is_slow_in_its_backward_pass_is_named(stage: int, small_run: Path, tmp_path: Path) -> None:
    """Guards against a slow rank that hides among those that wait for it within their own backward passes."""
    run = tmp_path / "run"
    said = trained(small_run, run, stage, ["0.2", "1.0", "0.2"]).stdout()
    first, rest = step_rows(run)[:4], step_rows(run)[4:]
    assert not any("slowest_rank" in row for row in first), "libraries are loaded in the first step"
    for row in rest:
        assert (row["slowest_rank"], row["slowest_host"]) == (1, HOST), row
        assert COSTLY < row["slowest_cost"] < 1 and row["slowest_compute"] > row["slowest_waiting"]
        assert sum(row[f"slowest_{part}"] for part in ("data", "compute", "waiting")) == pytest.approx(1)
    assert f"rank 1 on {HOST} costs " in said
    if stage:
        return
    shown = EventAccumulator(str(run / "tensorboard")).Reload()
    assert [event.value for event in shown.Scalars("utilization/slowest_rank")] == [1] * 4
    assert shown.Scalars("utilization/slowest_cost")[-1].value == pytest.approx(step_rows(run)[-1]["slowest_cost"])
    console = Console(width=140, record=True)
    live = screen.LiveRun(run)
    live.look()
    console.print(screen.page(live, console))
    assert f"rank 1 on {HOST} costs " in console.export_text()
    page = run_page(read_run(run))
    assert f"node {HOST} cost " in page and "% of the run" in page and "Waiting for a rank" in page


@pytest.mark.multiprocess
@pytest.mark.parametrize("stage", [0, 2])
def test_an_even_run_names_none(stage: int, small_run: Path, tmp_path: Path) -> None:
    """Guards against a node that is drained because one of any number of ranks is always the slowest."""
    trained(small_run, tmp_path / "run", stage, ["0.6"] * 3, steps=12)
    costs = [row["slowest_cost"] for row in step_rows(tmp_path / "run")[4:]]
    assert statistics.median(costs) < COSTLY, costs


@pytest.mark.long
@pytest.mark.multiprocess
def test_a_rank_that_is_stopped_half_of_the_time_is_named(small_run: Path, tmp_path: Path) -> None:
    """Guards against own work that counts CPU time: a process that does not get its core uses none."""
    run = tmp_path / "run"
    job = train(3, small_run, run, *SIZES, "train.max_steps=1000", "log.every_steps=10")
    assert job.until(lambda: len(step_rows(run)) >= 10 if (run / "metrics.jsonl").exists() else False)
    before = len(step_rows(run))
    while len(step_rows(run)) < before + 40 and job.runs:
        job.signal(signal.SIGSTOP, 2)
        time.sleep(0.15)
        job.signal(signal.SIGCONT, 2)
        time.sleep(0.05)
    job.kill()
    job.wait()
    named = [row["slowest_rank"] for row in step_rows(run)[before + 10 :] if row["slowest_cost"] > COSTLY]
    assert named and statistics.mode(named) == 2, step_rows(run)[before:]
    assert read_run(run).metrics.waited_for.keys() == {HOST}


def test_the_report_adds_up_what_each_node_has_cost(tmp_path: Path) -> None:
    """Guards against steps that count alike although a straggler's take longer, and small differences that add up."""
    slow = '"slowest_rank": 5, "slowest_host": "n3", "slowest_data": 0.25, "slowest_compute": 0.75'
    rows = [f'{{"step": {n}, "images_per_second": 50.0, "slowest_cost": 0.5, {slow}}}' for n in range(1, 51)]
    rows += [f'{{"step": {n}, "images_per_second": 100.0, "slowest_cost": 0.09, {slow}}}' for n in range(51, 101)]
    (tmp_path / "metrics.jsonl").write_text("\n".join(rows) + "\n")
    run = read_run(tmp_path)
    assert run.metrics.waited_for == {"n3": pytest.approx(50 * 0.5 * 2 / 150)}
    assert "node n3 cost 33% of the run" in run_page(run)
