"""The plan command: its answers to bad input, its exit code and its JSON."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from pipeline import plan
from pipeline.command_line import run_command

PLAN = ["--config", "pervit_t", "model.switches={widths: [16, 16, 16, 16]}", "model.image_size=64"]
KEYS = {"memory_gib", "fits", "largest_micro_batch", "step_seconds", "images_per_second", "hours", "gpu_hours"}


Answer = tuple[int, str, str]  # exit code, stdout, stderr
Asked = Callable[..., Answer]


@pytest.fixture
def ask(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Asked:
    """The command with these arguments, in this process: importing PyTorch would take longer than to answer."""

    def asked(*arguments: str) -> Answer:
        monkeypatch.setattr("sys.argv", ["pipeline.plan", *arguments])
        with pytest.raises(SystemExit) as end:
            run_command(plan.main)
        return end.value.code, *capsys.readouterr()  # type: ignore[return-value]

    return asked


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ([*PLAN, "--gpu", "k80"], "error: --gpu must be one of v100-32g,"),
        ([*PLAN, "--nodes", "0"], "error: --nodes must be at least 1, got 0: correct it."),
        ([*PLAN, "--gpus-per-node", "-1"], "error: --gpus-per-node must be at least 1, got -1: correct it."),
        (["--config", "pervit_xxl"], "error: config pervit_xxl does not exist"),
        (
            [*PLAN, "--micro-batch", "96"],
            "error: train.global_batch_size must be a multiple of train.micro_batch_size 96 x 1 process = 96, got 1024",
        ),
        (
            [*PLAN, "--micro-batch", "64", "train.micro_batch_size=32"],
            "error: --micro-batch cannot stand beside train.micro_batch_size=32, got --micro-batch 64: remove one of them",
        ),
        ([*PLAN, "--micro-batch", "0"], "error: override 'train.micro_batch_size=0'"),
        ([*PLAN, "--json", "/nowhere/plan.json"], "error: "),
    ],
)
def test_bad_input_is_one_sentence(arguments: list[str], sentence: str, ask: Asked) -> None:
    """Guards against tracebacks, and against a plan of something else than what was asked for."""
    code, said, error = ask(*arguments)
    assert code == 2
    assert error.startswith(sentence)
    assert error.count("\n") == 1
    assert not said


@pytest.mark.long
def test_what_does_not_fit_is_said_with_what_would_help(tmp_path: Path, ask: Asked) -> None:
    """Guards against a JSON without the keys that other programs read, and a page without advice."""
    file = tmp_path / "plan.json"
    huge = [
        "--config",
        "deit_t",  # of few operators
        "train.micro_batch_size=16384",
        "train.global_batch_size=32768",
        "--gpus-per-node",
        "2",
        "--gpu",
        "v100-32g",
    ]
    code, said, error = ask(*huge, "--json", str(file))
    assert code == 1, error
    figures = json.loads(file.read_text())
    assert KEYS <= figures.keys()
    assert figures["fits"] is False
    assert 0 < figures["largest_micro_batch"] < 16384
    parts = figures["memory_gib"]
    assert parts["total"] == pytest.approx(sum(parts.values()) - parts["total"], abs=0.01)
    assert "DOES NOT FIT" in said
    assert "train.activation_checkpointing=true" in said
    assert f"train.micro_batch_size={figures['largest_micro_batch']}" in said
