"""How a run stands, by its checkpoints, its events, its lock and the time of its last row."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from pipeline.runs.files import RunFiles
from pipeline.runs.state import State, state_of
from support.checkpoints import save_small, save_state
from support.launching import clean_environment

NOW = 1_800_000_000.0
START = {"event": "start", "step": 0, "time": NOW - 600, "number": 1, "last_step": 20}
END = {"event": "end", "step": 20, "time": NOW - 10, "reason": "the end of the schedule", "whole": True}
HOLD = "import os, sys, time; from pipeline.files import lock_bytes; from pathlib import Path; path = Path(sys.argv[1]); "
HOLD += "print(lock_bytes(os.open(path, os.O_RDWR), path), flush=True); time.sleep(600)"


def write(run: Path, steps: int, *events: dict, host: str | None = None, last_row: float = NOW - 20) -> Path:
    """A run with a row per step, its events, and a lock file that names a process on a host."""
    run.mkdir(exist_ok=True)
    rows = [{"step": step, "time": last_row - (steps - step), "lr": 0.1} for step in range(1, steps + 1)]
    for name, entries in (("metrics.jsonl", rows), ("events.jsonl", events)):
        (run / name).write_text("".join(json.dumps(entry) + "\n" for entry in entries))
    (run / ".lock").write_text(json.dumps({"pid": 1, "host": host, "slurm_job": None, "since": "today"}) if host else "")
    for path in (run / ".lock", run / "checkpoints"):
        if path.exists():
            os.utime(path, (NOW - 900, NOW - 900))
    return run


def state(run: Path, now: float = NOW) -> State:
    return state_of(RunFiles(run), now)


def test_only_a_checkpoint_finishes_a_run(tmp_path: Path) -> None:
    """Guards against a run that counts as finished by a row, by a damaged checkpoint, or before its evaluation."""
    run = tmp_path / "run"
    save_state(run, 10, 20)
    write(run, 20, START, END)
    assert state(run).name == "stopped" and state(run).saved == 10
    folder = save_state(run, 20, 20, evaluation_due=True)
    assert state(run).name == "stopped"
    (folder / "checkpoint.json").unlink()
    folder.rmdir()
    save_state(run, 20, 20)
    assert str(state(run)) == "finished at step 20"
    (run / "checkpoints" / "step-00000020" / "checkpoint.json").write_text("{}")
    assert state(run).name == "stopped" and state(run).saved == 10


def test_the_end_is_that_of_the_newest_start(tmp_path: Path) -> None:
    """Guards against a run that was extended and counts as finished, and one whose events are lost and counts as unfinished."""
    run = tmp_path / "run"
    save_state(run, 20, 20)
    write(run, 20, START, END, {**START, "last_step": 30}, {**END, "whole": False, "reason": "stopped by SIGTERM"})
    assert str(state(run)) == "stopped at step 20 of 30" and state(run).reason == "stopped by SIGTERM"
    (run / "events.jsonl").unlink()
    assert state(run).finished


def test_a_part_that_was_cut_is_no_end(tmp_path: Path) -> None:
    """Guards against a checkpoint whose manifest alone is there."""
    run = tmp_path / "run"
    folder = save_small(run, 10)
    write(run, 10, {**START, "last_step": 10}, END)
    assert state(run).finished
    (part,) = folder.glob("part-*")
    part.write_bytes(part.read_bytes()[:-1])
    assert state(run).name == "stopped" and "bytes" in " ".join(RunFiles(run).problems)


def test_a_copy_without_checkpoints_tells_by_its_end(tmp_path: Path) -> None:
    """Guards against pages and tables without the runs that were copied without their weights."""
    assert state(write(tmp_path / "run", 20, START, END)).finished
    assert state(write(tmp_path / "run", 20, START)).name == "killed"


def test_who_holds_the_lock(tmp_path: Path) -> None:
    """Guards against a dead process that trains, a living one that was killed, and a lock of another node that is not seen here."""
    here, run = socket.gethostname(), tmp_path / "run"
    save_state(run, 10, 20)
    assert str(state(write(run, 15, START, host=here))) == "killed at step 15 of 20, saved at step 10"
    assert state(write(run, 15, START, host="node7")).name == "running"
    assert state(write(run, 15, START, host="node7"), NOW + 200).name == "killed"
    command = [sys.executable, "-c", HOLD, str(run / ".lock")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=clean_environment()) as holder:
        try:
            assert holder.stdout and holder.stdout.readline() == "True\n"
            found = state(run)
            assert found.name == "running" and found.alive and found.seconds_left == 5
            assert state(run, NOW + 200).name == "hung"
            slow = {"event": "evaluation", "step": 15, "time": NOW - 20, "seconds": 100}
            assert state(write(run, 15, START, slow, host=here), NOW + 200).name == "running", (
                "evaluations take longer than rows"
            )
            starting = {**START, "time": NOW}
            assert state(write(run, 15, START, starting, host=here), NOW + 900).name == "running", (
                "a start may compile for long"
            )
            assert str(state(write(run, 0, START, host=here))) == "killed at step 10 of 20" or state(run).alive
        finally:
            holder.kill()


@pytest.mark.parametrize(
    ("prepare", "name"), [("nothing", "waiting"), ("folder", "waiting"), ("lock", "killed"), ("start", "killed")]
)
def test_before_the_first_step(prepare: str, name: str, tmp_path: Path) -> None:
    """Guards against a run that has not begun and counts as stopped, and a start that was killed and counts as not begun."""
    run = tmp_path / "run"
    if prepare != "nothing":
        write(run, 0, *([START] if prepare == "start" else []), host=socket.gethostname() if prepare == "lock" else None)
    assert state(run).name == name and not state(run).alive
    if name == "waiting":
        assert str(state(run)) == "not begun"


@pytest.mark.parametrize("hours", [-3, 3])
def test_a_clock_that_was_set(hours: int, tmp_path: Path) -> None:
    """Guards against "-1269 s left", and against a run that hangs, or has ended, by rows of the clock before. ``hours``: ahead."""
    run = write(tmp_path / "run", 15, START, host="node7", last_row=NOW - 20 - 3600 * hours)
    rows = [{"step": step, "time": NOW - 20 - (18 - step), "lr": 0.1} for step in (16, 17, 18)]
    with open(run / "metrics.jsonl", "a") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)
    found = state(run)
    assert found.name == "running" and found.silence == 20
    assert found.seconds_left == 2 if hours < 0 else 2 < found.seconds_left < 3600  # until the log's end has only rows of after
    assert state(run, NOW + 4 * 3600).name == "killed"


@pytest.mark.parametrize(("schedule", "seconds"), [("[]", 5), ("[[0, 16], [2, 32]]", 2 + 4 * 3), ("[[0, -1]]", 5)])
def test_larger_images_take_longer(schedule: str, seconds: float, tmp_path: Path) -> None:
    """Guards against half of the true time left, where data.size_schedule makes images larger later; a damaged one counts as none."""
    run = write(tmp_path / "run", 0, START, host="node7")
    rows = [{"step": step, "time": NOW - 20 - (15 - step), "epoch": step / 8.5, "lr": 0.1} for step in range(1, 16)]
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (run / "config.yaml").write_text(f"model: {{image_size: 32}}\ndata: {{size_schedule: {schedule}}}\n")
    assert state(run).seconds_left == pytest.approx(seconds)  # epoch 2 begins at step 17


def test_evaluations_of_many_classes(tmp_path: Path) -> None:
    """Guards against a run that is "not begun" because the end of its log, as far as it is read, is within an evaluation's row: that of
    100,000 classes has 600 kB."""
    run = write(tmp_path / "run", 15, START, host="node7")
    for weights in ("model", "ema"):
        row = {
            "step": 15,
            "time": NOW - 19,
            "weights": weights,
            "top1": 1.0,
            "class_correct": [0] * 100_000,
            "class_count": [5] * 100_000,
        }
        with open(run / "metrics.jsonl", "a") as file:
            file.write(json.dumps(row) + "\n")
    found = state(run)
    assert (found.name, found.step, found.silence, found.seconds_left) == ("running", 15, 19, 5)
