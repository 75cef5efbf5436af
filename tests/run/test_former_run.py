"""A run that an earlier commit began goes on as that commit would have gone on."""

from __future__ import annotations

import hashlib
import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from pipeline.checkpoint import CheckpointManifest, step_folder
from pipeline.checkpoint.manifest import MANIFEST
from pipeline.config import load_config
from pipeline.data.plan import TrainPlan
from pipeline.data.shards import ShardSet
from pipeline.data.views import SIDE_BY_SIDE, STREAM_VERSION
from pipeline.logs.sample_log import augmentation_digests
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
    assert CheckpointManifest.read(step_folder(tmp_path / "run", 5)).state.stream_version == SIDE_BY_SIDE
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


def test_a_run_of_the_former_stream_keeps_it(small_run: Path, tmp_path: Path) -> None:
    """Guards against a run with repeated augmentation, begun when the views of an image stood side by side, that goes on with
    others: each step's images, their order and their partners are those of the former stream, and the log says so."""
    options = ["augment.repeats=2", "model.switches={widths: [16, 16, 16, 16]}", "log.samples=true"]
    run = tmp_path / "run"

    def go_on(last: int) -> tuple[list[tuple], str]:
        """Train to a step: what its two last steps saw, and the log."""
        log = run_forked("pipeline.train", "--config", small_run, *options, f"train.max_steps={last}").stdout
        rows = map(json.loads, (run / "samples" / "rank-00000.jsonl").read_text().splitlines())
        return [(row["position"], row["sample"], row["augmentation"]) for row in rows if row["step"] > last - 2], log

    def expected(step: int, stream: int) -> tuple:
        config = load_config(run / "config.yaml")
        plan = TrainPlan(
            shards=ShardSet(config.data.path, "train"),
            seed=config.seed,
            image_size=config.model.image_size,
            global_batch_size=16,
            batch_size=16,
            rank=0,
            world_size=1,
            data=config.data,
            augment=config.augment,
            stream=stream,
        )
        request = plan.request(step - 1)
        return request.position.tolist(), request.index.tolist(), augmentation_digests(request)

    seen, log = go_on(2)
    assert seen == [expected(step, STREAM_VERSION) for step in (1, 2)] and "stream" not in log
    manifest = CheckpointManifest.read(step_folder(run, 2))
    former = replace(manifest, state=replace(manifest.state, stream_version=SIDE_BY_SIDE))
    (step_folder(run, 2) / MANIFEST).write_text(former.to_text())
    seen, log = go_on(4)
    assert seen == [expected(step, SIDE_BY_SIDE) for step in (3, 4)] != [expected(step, STREAM_VERSION) for step in (3, 4)]
    assert log.count("note: this run goes on with the stream of samples that it was begun with, version 1: the 2 views") == 1
    assert CheckpointManifest.read(step_folder(run, 4)).state.stream_version == SIDE_BY_SIDE
    starts = json.loads((run / "environment.json").read_text())
    assert [start["stream_version"] for start in starts] == [STREAM_VERSION, SIDE_BY_SIDE]
