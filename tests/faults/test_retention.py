"""Which checkpoints stay."""

from __future__ import annotations

from pathlib import Path

import pytest

from pipeline.checkpoint.folder import saved_steps
from support.ranks import train
from support.runs import evaluation_rows

pytestmark = pytest.mark.multiprocess


def test_the_last_the_best_and_every_kth_stay(small_run: Path, tmp_path: Path) -> None:
    """Guards against a disk that fills up, a best model that is gone, and a retention that forgets at a restart."""
    run = tmp_path / "run"
    keep = ("checkpoint.keep_last=2", "checkpoint.keep_every_steps=4", "checkpoint.every_steps=1")
    for last in (5, 10):
        train(1, small_run, run, *keep, f"train.max_steps={last}", "eval.every_epochs=0.03").succeed()
    top1 = {}
    for row in evaluation_rows(run):
        top1[row["step"]] = max(row["top1"], top1.get(row["step"], 0))
    best = max(top1, key=lambda step: (top1[step], -step))  # the first of equals
    assert sorted(top1) == [3, 5, 6, 9, 10]
    assert saved_steps(run) == sorted({4, 8, 9, 10, best})
    assert all(not path.name.startswith(".") for path in (run / "checkpoints").iterdir())
