"""A run that is killed between the row of its last evaluation and its last save, and what everything that reads its folder says of it."""

from __future__ import annotations

import shlex
import signal
from collections.abc import Sequence
from pathlib import Path

import pytest

from pipeline.checkpoint.folder import latest_step
from pipeline.track.position import Position
from pipeline.track.sending import Sender
from pipeline.track.tracker import About, Item, Segment
from support.ranks import Job, run_forked
from support.runs import evaluation_rows, step_rows, write_small_config
from support.small_run import SMALL_MODEL

KEYS = ("train.max_steps=6", "checkpoint.every_steps=4", "eval.every_epochs=10", "log.samples=true")


class NotYet(Exception):
    """Raised instead of a pause: the sender would wait for more."""


class Store:
    """A tracker that takes everything."""

    target = "the store"

    def __init__(self) -> None:
        self.end = ""

    def open(self, segment: Segment, about: About, sent: int) -> int:
        return sent

    def send(self, first: int, items: Sequence[Item]) -> None:
        pass

    def describe(self, about: About) -> None:
        pass

    def close(self, state: str) -> None:
        self.end = state


def tracked(run: Path, folder: Path) -> str:
    """How a sender's connection ends; "waits" if it goes on looking."""

    def pause(seconds: float) -> None:
        raise NotYet

    store, position = Store(), Position(run, "store", "the store", folder)
    try:
        Sender(run, "run", store, position, 0.01, sleep=pause).run()
    except NotYet:
        return "waits"
    finally:
        position.release()
    return store.end


def answers(file: Path, run: Path, folder: Path) -> dict[str, str]:
    """What a sweep's list, a page, a terminal and a sender say of the run."""
    page = folder / "page.html"
    run_forked("pipeline.report", run, "--output", page)
    watched = run_forked("pipeline.watch", run, "--once", COLUMNS="180").stdout
    return {
        "sweep": run_forked("pipeline.sweep", "--list", file).stdout.strip(),
        "report": page.read_text().partition('<p class="subtitle">')[2].partition("</p>")[0],
        "watch": next(line for line in watched.splitlines() if " state " in line),
        "track": tracked(run, folder / "tracked"),
    }


@pytest.mark.multiprocess
def test_a_run_killed_before_its_last_save_is_not_finished(digits_shards: Path, tmp_path: Path) -> None:
    """Guards against a row of the log that passes for a finished run: its checkpoint is of an earlier step, so the same command has
    to train on, and to evaluate again."""
    config, file, run = write_small_config(digits_shards, tmp_path), tmp_path / "sweep.txt", tmp_path / "sweep" / "seed=3"
    words = [*SMALL_MODEL, *KEYS]
    file.write_text(f"all: --config {config} output_dir={run.parent} {shlex.join(words)}\nseed=3\n")
    job = Job(1, "--config", config, *words, "seed=3", f"output_dir={run}", module="faults.killed_before_save")
    assert job.wait() == [-signal.SIGKILL], job.outputs()
    assert step_rows(run)[-1]["step"] == evaluation_rows(run)[-1]["step"] == 6 and latest_step(run) == 4
    evaluated = evaluation_rows(run)

    said = answers(file, run, tmp_path)
    assert said["sweep"].startswith("1  seed=3  killed at step 6 of 6, saved at step 4, top-1")
    assert said["report"] == "pervit_t, killed at step 6 of 6, saved at step 4"
    assert (
        "killed at step 6 of 6, saved at step 4" in said["watch"] and "the same command resumes it from step 4" in said["watch"]
    )
    assert said["track"] == "waits"

    sweep = run_forked("pipeline.sweep", file, OMP_NUM_THREADS="1").stdout
    assert "1 run, 0 finished already" in sweep and "1 of 1 run finished" in sweep, sweep
    assert latest_step(run) == 6 and [row["step"] for row in step_rows(run)] == [1, 2, 3, 4, 5, 6]
    again = evaluation_rows(run)
    of = ("step", "weights", "top1", "class_correct", "count")
    assert [[row[name] for name in of] for row in again] == [[row[name] for name in of] for row in evaluated]
    assert again[0]["time"] > evaluated[0]["time"], "the evaluation was not made again"

    said = answers(file, run, tmp_path)
    assert said["sweep"].startswith("1  seed=3  finished at step 6, top-1") and said["report"] == "pervit_t, finished at step 6"
    assert "finished at step 6" in said["watch"] and said["track"] == "complete"
    assert "1 run, 1 finished already" in run_forked("pipeline.sweep", file).stdout
    nothing = run_forked("pipeline.train", "--config", config, *words, "seed=3", f"output_dir={run}")
    assert f"{run} is complete at step 6: nothing to train." in nothing.stdout
