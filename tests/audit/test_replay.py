"""A window of a run that is trained again: how it is started, and what it is compared with."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
import yaml

from pipeline.audit import replay as replay_module
from pipeline.audit.replay import Replay, Window, compare, train_again
from pipeline.checkpoint.folder import step_folder
from pipeline.checkpoint.manifest import CheckpointManifest
from pipeline.errors import UserError
from support.forging import edit_rows, edit_starts, evaluation, records_of, without_tensors

pytestmark = pytest.mark.multiprocess


def compared(run: Path, again: Path, first: int, last: int) -> Replay:
    """What two runs differ in, as if the one was a window of the other, trained again on the same machine."""
    replay = Replay(Window(first, last, 1, 0), exact=True)
    compare(records_of(run), again, replay)
    return replay


def test_what_only_one_side_has(run: Path, elastic_run: Path) -> None:
    """Rows, columns and tensors."""
    assert not compared(run, elastic_run, 4, 8).problems
    without_tensors(run, "buffer/", "ema_buffer/")
    assert "is of another model or optimizer" in str(compared(run, elastic_run, 6, 8).problems)
    assert "is of another model or optimizer" in str(compared(elastic_run, run, 6, 8).problems)
    edit_rows(run, lambda rows: evaluation(rows, 6, "ema").pop("top5"))
    edit_rows(run, lambda rows: rows.remove(evaluation(rows, 6, "model")))
    edit_rows(run, lambda rows: rows.remove(evaluation(rows, 8, "model")))
    sentences = compared(run, elastic_run, 4, 8).problems
    assert any(sentence.startswith("metrics.jsonl has no row of step 6 (model)") for sentence in sentences), sentences
    assert any(sentence.startswith("top5 of step 6 (ema) is missing in the run, but ") for sentence in sentences), sentences
    assert "step 8 (model)" not in str(sentences)  # the window's own end
    assert any("metrics.jsonl has a row of step 6 (model)" in each for each in compared(elastic_run, run, 4, 8).problems)


def test_an_evaluation_that_another_machine_has_made_up_for(run: Path, elastic_run: Path) -> None:
    """The start after step 6 is on one process, those before on two: its sums are others'. It can only have what it wrote itself."""
    edit_rows(run, lambda rows: evaluation(rows, 6).update(loss=2.3))
    assert "loss of step 6 (model)" in str(compared(run, elastic_run, 4, 6).problems)
    edit_rows(run, lambda rows: evaluation(rows, 6).update(time=evaluation(rows, 8)["time"]))
    assert not compared(run, elastic_run, 4, 6).problems
    assert "loss of step 6 (model)" in str(compared(run, elastic_run, 4, 8).problems)
    edit_rows(run, lambda rows: rows[5].update(loss=2.5, time=rows[-1]["time"]))
    assert compared(run, elastic_run, 4, 6).problems[0].startswith("loss of step 6 is 2.5")


def test_how_many_bad_samples_are_known_depends_on_time(run: Path, elastic_run: Path) -> None:
    edit_rows(run, lambda rows: rows[4].update(bad_samples=3))
    assert not compared(run, elastic_run, 4, 6).problems


def test_how_a_window_is_started(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the settings of the start that took its steps, the sets and the cache of the newest, and a checkpoint that can be written."""
    edit_starts(run, lambda starts: starts[1]["settings"].update({"train.micro_batch_size": 8}))
    records = records_of(run)
    newest = {"cache": "/cache", "cache_gib": 7.0, "mix": {"elsewhere": 0.5}}
    records.config = records.config.with_values({f"data.{key}": value for key, value in newest.items()})
    os.chmod(step_folder(run, 4), 0o555)
    monkeypatch.setattr(replay_module.subprocess, "run", lambda command, **_: subprocess.CompletedProcess(command, 3))
    with pytest.raises(UserError, match="the training ended with exit code 3: no output"):
        train_again(records, Replay(Window(4, 6, 2, 1)), tmp_path / "again", False)
    os.chmod(step_folder(run, 4), 0o755)
    recipe = yaml.safe_load((tmp_path / "again" / "config.yaml").read_text())
    assert recipe["train"]["micro_batch_size"] == 8 and recipe["train"]["max_steps"] == 6
    assert {key: recipe["data"][key] for key in newest} == newest
    copy = step_folder(tmp_path / "again" / "run", 4)
    assert os.stat(copy).st_mode & 0o200 and not CheckpointManifest.read(copy).state.evaluation_due
