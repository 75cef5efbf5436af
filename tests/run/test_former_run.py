"""A run that an earlier commit began goes on as that commit would have gone on."""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path

import pytest

from support.launching import REPOSITORY
from support.ranks import run_forked
from support.runs import evaluation_rows, step_rows

FORMER = REPOSITORY / "tests" / "golden" / "former_run"


def test_a_run_of_a_former_commit_goes_on(tmp_path: Path, record_property) -> None:
    """Guards against a change of the checkpoint's or shards' format, of the sample order, the draws, or a parameter's name.

    The samples and their augmentation are the same to the bit. The sums are those of the CPU at hand. On the CPU that the fixture
    was written on they were the same to the bit until the training step was made faster (one process runs ZeRO 0 in place of 1,
    attention goes through the batch in chunks, the stem is in channels_last): since then its losses are the same to the bit, its
    gradient norms to 3e-7.
    """
    shutil.copytree(FORMER, tmp_path, dirs_exist_ok=True)
    expected = json.loads((FORMER / "expected.json").read_text())
    paths = [f"data.path={tmp_path / 'shards'}", f"output_dir={tmp_path / 'run'}"]
    said = run_forked("pipeline.train", "--config", tmp_path / "config.yaml", *paths, "train.max_steps=9").stdout
    assert "note: optim.warmup_prefix stays True, with which this run was begun; False is the default of new runs" in said
    assert "has no averages of the model's buffers" in said and "at step 5." in said
    steps = [row for row in step_rows(tmp_path / "run") if row["step"] > 5]
    assert [row["step"] for row in steps] == [6, 7, 8, 9]
    for row, before in zip(steps, expected["steps"]):
        for key, value in before.items():
            assert row[key] == pytest.approx(value, rel=1e-3 if key == "grad_norm" else 1e-4), (row["step"], key)
    log = (tmp_path / "run" / "samples" / "rank-00000.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in log]
    assert [{key: row[key] for key in expected["samples"][0]} for row in rows if row["step"] > 5] == expected["samples"]
    assert evaluation_rows(tmp_path / "run")[-1]["step"] == 9
    (part,) = (tmp_path / "run" / "checkpoints" / "step-00000009").glob("part-*")
    record_property("bit for bit", hashlib.sha256(part.read_bytes()).hexdigest() == expected["part_sha256"])
