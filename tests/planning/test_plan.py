"""The plan command: its answers to bad input, its exit code and its JSON."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from support.launching import run_module

PLAN = ["--config", "pervit_t", "model.switches={widths: [16, 16, 16, 16]}", "model.image_size=64"]
KEYS = {"memory_gib", "fits", "largest_micro_batch", "step_seconds", "images_per_second", "hours", "gpu_hours"}


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ([*PLAN, "--gpu", "k80"], "error: --gpu is 'k80', one of v100-32g,"),
        ([*PLAN, "--nodes", "0"], "error: --nodes is 0, 1 or more needed: correct it."),
        ([*PLAN, "--gpus-per-node", "-1"], "error: --gpus-per-node is -1, 1 or more needed: correct it."),
        (["--config", "pervit_xxl"], "error: config pervit_xxl does not exist"),
        (
            [*PLAN, "--micro-batch", "96"],
            "error: train.global_batch_size is 1024, but train.micro_batch_size 96 x 1 process = 96 does not",
        ),
        ([*PLAN, "--micro-batch", "0"], "error: override 'train.micro_batch_size=0'"),
        ([*PLAN, "--json", "/nowhere/plan.json"], "error: "),
    ],
)
def test_bad_input_is_one_sentence(arguments: list[str], sentence: str) -> None:
    """Guards against tracebacks, and against a plan of something else than what was asked for."""
    run = run_module("pipeline.plan", *arguments, check=False)
    assert run.returncode == 2
    assert run.stderr.startswith(sentence)
    assert run.stderr.count("\n") == 1
    assert not run.stdout


def test_what_does_not_fit_is_said_with_what_would_help(tmp_path: Path) -> None:
    """Guards against a JSON without the keys that other programs read, and a page without advice."""
    file = tmp_path / "plan.json"
    huge = [
        "train.micro_batch_size=16384",
        "train.global_batch_size=32768",
        "model.image_size=224",
        "--gpus-per-node",
        "2",
        "--gpu",
        "v100-32g",
    ]
    run = run_module("pipeline.plan", *PLAN, *huge, "--json", str(file), check=False)
    assert run.returncode == 1, run.stderr
    figures = json.loads(file.read_text())
    assert KEYS <= figures.keys()
    assert figures["fits"] is False
    assert 0 < figures["largest_micro_batch"] < 16384
    parts = figures["memory_gib"]
    assert parts["total"] == pytest.approx(sum(parts.values()) - parts["total"], abs=0.01)
    assert "DOES NOT FIT" in run.stdout
    assert "train.activation_checkpointing=true" in run.stdout
    assert f"train.micro_batch_size={figures['largest_micro_batch']}" in run.stdout
