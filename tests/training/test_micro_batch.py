"""``train.micro_batch_size: auto``: chosen once by the plan and a trial, kept by the run."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from pipeline.checkpoint.weights import read_weights
from pipeline.cluster.world import World
from pipeline.config import Config, config_from_dict, load_config
from pipeline.training.micro_batch import try_step
from support.launching import REPOSITORY, clean_environment
from support.ranks import run_forked
from support.runs import step_rows
from support.small_run import SMALL_MODEL

WORLD = World(0, 1, torch.device("cpu"), 1)
PLENTY = 10**12  # bytes


def small_config(micro_batch: int | str, image_size: int = 32, **train: object) -> Config:
    tree = {
        "model": {"name": "pervit_t", "image_size": image_size, "num_classes": 10, "switches": {"widths": [16] * 4}},
        "train": {"micro_batch_size": micro_batch, "precision": "fp32", **train},
    }
    return config_from_dict(tree, source="test")


@pytest.mark.multiprocess
def test_a_run_keeps_the_number_that_its_first_start_took(small_run: Path, tmp_path: Path) -> None:
    """Guards against a resume that is not exact because auto chose anew, a number that is in no record, and a run that cannot move to
    other numbers of processes: 1 could take all 16 images at once, and 4 cannot take 8 each."""
    auto, stated = tmp_path / "auto", tmp_path / "stated"

    def run(folder: Path, size: object, *words: object, processes: int = 2) -> str:
        arguments = ("--config", small_run, f"output_dir={folder}", *SMALL_MODEL, f"train.micro_batch_size={size}", *words)
        return run_forked("pipeline.train", *arguments, processes=processes).stdout

    said = run(auto, "auto", "train.max_steps=2")
    assert "train.micro_batch_size is 8: auto: the largest that the plan allows, tried in a step" in said
    assert load_config(auto / "config.yaml").train.micro_batch_size == 8
    (start,) = json.loads((auto / "environment.json").read_text())
    assert (start["micro_batch_size"], start["micro_batch_reason"]) == (
        8,
        "auto: the largest that the plan allows, tried in a step",
    )
    assert read_weights(auto).state.config["train"]["micro_batch_size"] == 8

    assert "auto keeps that with which this run was started" in run(auto, "auto", "train.max_steps=4")
    run(stated, 8, "train.max_steps=4")
    rows = [[(row["step"], row["loss"], row["grad_norm"]) for row in step_rows(each)] for each in (auto, stated)]
    assert rows[0] == rows[1]
    weights = read_weights(stated).model
    assert all(torch.equal(value, weights[name]) for name, value in read_weights(auto).model.items())

    one = run(auto, "auto", "--dry-run", "train.max_steps=5", processes=1)
    assert "16 = 8 x 1 process x 2; auto keeps that with which this run was started" in one
    four = run(auto, "auto", "--dry-run", "train.max_steps=5", processes=4)
    assert "16 = 4 x 4 processes x 1; auto; this run was started with 8, by which 4 processes cannot share out 16" in four

    shutil.rmtree(auto / "checkpoints")  # as if the first start had been killed before its first checkpoint
    assert "16 = 8 x 1 process x 2; auto keeps" in run(auto, "auto", "--dry-run", processes=1)
    assert "16 = 16 x 1 process x 1; auto: the largest" in run(auto, "auto", "--dry-run", "seed=1", processes=1)


def test_a_trial_says_what_does_not_fit() -> None:
    """Guards against a trial that passes whatever it takes, ends the process, or leaves something behind."""
    state = torch.random.get_rng_state()
    assert try_step(small_config(8, global_batch_size=16, ema_decay=0.9), WORLD, PLENTY) is None
    assert "a step took 0." in (try_step(small_config(32, global_batch_size=64), WORLD, capacity=1000) or "")
    refused = try_step(small_config(16384, image_size=4096, global_batch_size=16384), WORLD, PLENTY)  # 3 TB
    assert refused and "allocate" in refused
    assert torch.random.get_rng_state().shape == state.shape


PROGRAM = """
import re, resource, sys
from pathlib import Path
from pipeline.config import load_config
from pipeline.cluster.rendezvous import init_world
from pipeline.planning.memory import Subject, largest_micro_batch
from pipeline.training.micro_batch import choose_micro_batch, try_step
world, config = init_world(), load_config(sys.argv[1])
largest_micro_batch(Subject(config.with_values({"train.micro_batch_size": 1}), 1, 1, None))  # now libraries have their threads and memory
try_step(config.with_values({"train.micro_batch_size": 8}), world, 10**12)
held = int(re.search(r"VmData:\\s*(\\d+)", Path("/proc/self/status").read_text())[1]) * 1024
resource.setrlimit(resource.RLIMIT_DATA, (held + 600 * 2**20,) * 2)
print(*choose_micro_batch(config, None, world))
"""


@pytest.mark.long
def test_a_trial_that_runs_out_of_memory_makes_room_for_the_next(tmp_path: Path) -> None:
    """Guards against a plan that is believed: this process may take 600 MiB more, which neither the plan nor the system says."""
    config = tmp_path / "config.yaml"
    config.write_text(json.dumps({
        "output_dir": str(tmp_path / "run"), "data": {"prefetch": 1},
        "model": {"name": "pervit_t", "image_size": 64, "num_classes": 10, "switches": {"widths": [16] * 4}},
        "train": {"global_batch_size": 2048, "micro_batch_size": "auto", "precision": "fp32"},
    }))  # fmt: skip
    environment = clean_environment(OMP_NUM_THREADS="1", PYTHONPATH=str(REPOSITORY), MALLOC_ARENA_MAX="1")
    command = [sys.executable, "-c", PROGRAM, str(config)]
    result = subprocess.run(command, cwd=REPOSITORY, env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    chosen = result.stdout.splitlines()[-1]
    assert "auto: the plan allows 2048, but 2048 does not fit: " in chosen and "allocate" in chosen, chosen
    assert 8 <= int(chosen.partition(" ")[0]) < 2048
    assert not os.path.exists(tmp_path / "run")
