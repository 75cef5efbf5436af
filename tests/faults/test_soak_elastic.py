"""Every number of processes and ZeRO stage goes on as every other: the table of loss differences. Takes a quarter of an hour."""

from __future__ import annotations

import itertools
import shutil
from pathlib import Path

import pytest

from faults.history import loss_difference
from pipeline.checkpoint.folder import latest_step
from support.ranks import Job, train
from support.runs import step_rows

pytestmark = [pytest.mark.soak, pytest.mark.multiprocess, pytest.mark.timeout(7200)]

SAVED, LAST = 4, 7  # steps
LOSS_LIMIT = 1e-5
SETTINGS = list(itertools.product((0, 1, 2, 3), (1, 2, 4)))  # stage, processes
OPTIONS = (f"checkpoint.every_steps={SAVED}", "optim.lr_batch_size=16")


def train_to(job: Job, run: Path, step: int) -> list[dict]:
    """Train until a step is in the log, then kill all; returns the rows of the steps after the checkpoint."""

    def rows() -> list[dict]:
        path = run / "metrics.jsonl"
        return [row for row in step_rows(run) if SAVED < row["step"] <= step] if path.exists() else []

    assert job.until(lambda: len(rows()) == step - SAVED and latest_step(run)), job.outputs()
    job.kill()
    job.wait()
    return rows()


def test_from_every_stage_and_world_size_to_every_other(small_run: Path, tmp_path: Path) -> None:
    """Guards against a pair that was forgotten."""
    before, differences = {}, {}
    for stage, size in SETTINGS:
        run = tmp_path / f"from-{stage}-{size}"
        before[stage, size] = train_to(train(size, small_run, run, *OPTIONS, f"train.zero_stage={stage}"), run, LAST)
        assert latest_step(run) == SAVED
    for source, (stage, size) in itertools.product(SETTINGS, SETTINGS):
        run = tmp_path / "resumed"
        shutil.copytree(tmp_path / f"from-{source[0]}-{source[1]}", run)
        (run / "metrics.jsonl").unlink()  # every row that is there afterwards was written after the resume
        rows = train_to(train(size, small_run, run, *OPTIONS, f"train.zero_stage={stage}"), run, LAST)
        differences[source, (stage, size)] = loss_difference(rows, before[source])
        shutil.rmtree(run)
    print(f"\n{table(differences)}")
    assert all(differences[setting, setting] == 0 for setting in SETTINGS), "not exact where nothing changed"
    assert max(differences.values()) < LOSS_LIMIT


def table(differences: dict) -> str:
    """In Markdown: rows what saved, columns what went on."""
    names = [f"{stage}/{size}" for stage, size in SETTINGS]
    lines = ["| ZeRO/processes | " + " | ".join(names) + " |", "|---" * (len(names) + 1) + "|"]
    for name, source in zip(names, SETTINGS):
        values = [differences[source, target] for target in SETTINGS]
        lines.append(f"| **{name}** | " + " | ".join("0" if value == 0 else f"{value:.0e}" for value in values) + " |")
    return "\n".join(lines)
