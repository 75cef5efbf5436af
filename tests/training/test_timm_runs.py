"""Runs with timm's models: two processes, ZeRO 2, stopped or killed, and on bit for bit; then evaluated, predicted with, exported.

Two kinds of model by default; ``PERVIT_ALL_TIMM=1 pytest tests/training/test_timm_runs.py -m timm_all`` takes all twelve, and writes a
table to the file that ``PERVIT_TIMM_TABLE`` names.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from faults.history import same_files
from pipeline.checkpoint.folder import latest_step, step_folder
from pipeline.inference.trained import read_trained
from pipeline.models.weights.exported import read_exported
from support.ranks import Job, run_forked
from support.runs import export_weights, step_rows
from support.timm_models import ARCHITECTURES, SIZE, installed_timm, overrides

pytestmark = pytest.mark.multiprocess
ALL = pytest.mark.skipif(not os.environ.get("PERVIT_ALL_TIMM"), reason="trains all twelve kinds: set PERVIT_ALL_TIMM=1")


def training(config: Path, run: Path, kind: str, *more: object) -> list[object]:
    return ["--config", config, f"output_dir={run}", *overrides(kind), *more]


def same_log(a: Path, b: Path) -> bool:
    """Whether both runs logged the same losses and gradient norms."""
    first, second = ([(row["step"], row["loss"], row["grad_norm"]) for row in step_rows(run)] for run in (a, b))
    return bool(first) and first == second


@pytest.mark.timm_all
@ALL
@pytest.mark.parametrize("kind", ARCHITECTURES)
def test_each_kind_trains_resumes_evaluates_and_exports(kind: str, small_run: Path, tmp_path: Path) -> None:
    """Guards against an architecture that the adapter serves in part."""
    installed_timm()
    whole_life(kind, small_run, tmp_path)


@pytest.mark.parametrize("kind", ["EfficientNet"])
def test_a_convolutional_net_trains_resumes_evaluates_and_exports(kind: str, small_run: Path, tmp_path: Path) -> None:
    """Guards against BatchNorm's statistics and stochastic depth that a resume does not continue, and an export without its model."""
    installed_timm()
    whole_life(kind, small_run, tmp_path)


def whole_life(kind: str, config: Path, folder: Path) -> None:
    began = time.perf_counter()
    straight, stopped, file = folder / "straight", folder / "stopped", folder / "model.safetensors"
    log = run_forked("pipeline.train", *training(config, straight, kind, "train.max_steps=2"), processes=2).stdout
    shutil.copytree(straight, stopped)
    shutil.rmtree(step_folder(stopped, 2))  # as if the ranks had died before the second checkpoint
    assert latest_step(stopped) == 1
    again = run_forked("pipeline.train", *training(config, stopped, kind, "train.max_steps=2"), processes=2).stdout
    assert "from step 1" in again
    assert same_files(stopped, straight) and same_log(stopped, straight)
    result = folder / "result.json"
    data = read_trained(straight).config.data.path
    run_forked("pipeline.evaluate", "--checkpoint", straight, "--data", data, "--json", result)
    assert json.loads(result.read_text())["count"] == 359
    export_weights(straight, file)
    trained, images = read_trained(straight), torch.randn(2, 3, SIZE, SIZE)
    model = trained.build_model()
    with torch.inference_mode():
        assert torch.equal(read_exported(file)[0](images), model(images))
    if table := os.environ.get("PERVIT_TIMM_TABLE"):
        about = [line for line in log.splitlines() if "GMACs" in line]
        row = {
            "kind": kind,
            "name": trained.config.model.name,
            "parameters": sum(p.numel() for p in model.parameters()),
            "branches": int(re.search(r"(\d+) branches of stochastic depth", log)[1]),
            "draws": list(model.trial.draws),
            "flops": about[-1],
            "bytes": file.stat().st_size,
            "seconds": time.perf_counter() - began,
        }
        with open(table, "a") as out:
            out.write(json.dumps(row) + "\n")


def test_killed_ranks_of_a_model_with_dropout_go_on_bit_for_bit(small_run: Path, tmp_path: Path) -> None:
    """Guards against random numbers beside the stream's, dropout's and patch dropout's, that a restart draws anew."""
    installed_timm()
    straight, killed = tmp_path / "straight", tmp_path / "killed"
    job = Job(2, *training(small_run, killed, "ViT", "train.max_steps=400"))
    assert job.until(lambda: (latest_step(killed) or 0) >= 2), job.outputs()
    job.kill()
    job.wait()
    last = (latest_step(killed) or 0) + 2
    resumed = run_forked("pipeline.train", *training(small_run, killed, "ViT", f"train.max_steps={last}"), processes=2)
    assert "resuming" in resumed.stdout
    said = run_forked("pipeline.train", *training(small_run, straight, "ViT", f"train.max_steps={last}"), processes=2).stdout
    assert same_files(killed, straight) and same_log(killed, straight)
    assert said.count("from a generator that is seeded for each micro-batch") == 1
    for kind in ("npy", "csv"):
        output = tmp_path / f"out.{kind}"
        features = ["--features"] if kind == "npy" else []
        run_forked("pipeline.predict", straight, Path(read_trained(straight).config.data.path) / "val-000000.tar", "--output", output, *features)  # fmt: skip
    assert np.load(tmp_path / "out.npy").shape == (359, 192)
    assert len((tmp_path / "out.csv").read_text().splitlines()) == 1 + 359
