"""The CUDA paths of the commands run from the first line to the last, on a pretended GPU, which computes nothing."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from pipeline.checkpoint.weights import read_weights
from pipeline.config import load_config
from pipeline.models import model_of
from pretended_gpu import Counts, missing, variables
from pretended_gpu.steps import CLASSES, tiny_shards
from support.launching import run_module
from support.runs import evaluation_rows, step_rows
from support.small_run import SMALL_MODEL

pytestmark = pytest.mark.skipif(missing() is not None, reason=missing() or "")
KERNELS = ("triton forward", "triton query_gradient", "triton key_value_gradient", "triton phi_gradient")


def run_on_gpu(counts: Path, module: str, *arguments: object, code: int = 0) -> tuple[str, Counts]:
    """What a command has printed, and what it has asked of the GPU."""
    done = run_module("pretended_gpu.command", counts, module, *arguments, check=False, **variables())
    assert done.returncode == code, done.stderr[-4000:]
    return done.stdout, Counts(json.loads(counts.read_text()))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With shards, and a run of four steps in two starts: an average, evaluations, checkpoints."""
    return tmp_path_factory.mktemp("pretended")


@pytest.fixture(scope="module")
def starts(folder: Path) -> list[tuple[str, Counts]]:
    """A start that chooses its micro-batch and takes two steps, and one that resumes and takes two more."""
    options = [
        f"data.path={tiny_shards(folder)}",
        "data.decode=cpu",
        "data.num_threads=1",
        f"output_dir={folder / 'run'}",
        f"model.num_classes={CLASSES}",
        "model.image_size=32",
        "train.global_batch_size=16",
        "train.compile=off",
        "train.precision=bf16",
        "eval.every_epochs=1",
        "eval.batch_size=4",
        "checkpoint.every_steps=2",
        *SMALL_MODEL,
    ]
    command = ("pipeline.train", "--config", "configs/pervit_t.yaml", *options)
    return [
        run_on_gpu(folder / "first.json", *command, "train.max_steps=2", "train.micro_batch_size=auto"),
        run_on_gpu(folder / "second.json", *command, "train.max_steps=4", "train.micro_batch_size=8"),
    ]


def test_training_and_resume(starts: list[tuple[str, Counts]], folder: Path) -> None:
    """Guards against a path of CUDA that does not run: the trial step, attention's kernels, the loader's stream, an average, an
    evaluation, a save, a resume."""
    (first, began), (second, resumed) = starts
    run = folder / "run"
    assert "on cuda:0" in first and "train.micro_batch_size is 16: auto" in first and "step 2" in second
    assert [row["step"] for row in step_rows(run)] == [1, 2, 3, 4]
    assert {row["weights"] for row in evaluation_rows(run)} == {"model", "ema"}
    for counts in (began, resumed):
        assert all(counts[kernel] for kernel in KERNELS), counts
        assert counts["convolution forward"] and counts["wait for an event"] and counts["copy H2D"]
    assert "H100" in (run / "environment.json").read_text()


def test_a_checkpoint_has_what_lies_on_the_gpu(starts: list[tuple[str, Counts]], folder: Path) -> None:
    """Guards against a save or a resume of other memory than the parameters': as no kernel changes them, they and their average are
    those of the seed, after two saves and a resume, to the bit."""
    config = load_config(folder / "run" / "config.yaml")
    torch.manual_seed(config.seed)
    expected = dict(model_of(config).named_parameters())
    saved = read_weights(folder / "run")
    assert saved.ema is not None
    for name, value in expected.items():
        torch.testing.assert_close(saved.model[name], value.detach(), rtol=0, atol=0)
        torch.testing.assert_close(saved.ema[name], value.detach(), rtol=0, atol=0)


def test_evaluation_and_prediction(starts: list[tuple[str, Counts]], folder: Path) -> None:
    """Guards against commands that fail where there is a GPU, or do not use it, and against images without a row."""
    run, table = folder / "run", folder / "predictions.csv"
    where = ("--checkpoint", run, "--data", folder / "shards")
    said, evaluated = run_on_gpu(folder / "evaluate.json", "pipeline.evaluate", *where, "--decode", "cpu")
    assert "top-1" in said
    # No kernel has found that a score is finite: each row says so, and the exit code.
    options = ("--decode", "cpu", "--output", table)
    _, predicted = run_on_gpu(folder / "predict.json", "pipeline.predict", run, folder / "images" / "val", *options, code=1)
    assert table.read_text().count("the model's scores are not finite") == CLASSES
    for counts in (evaluated, predicted):
        assert counts["triton forward"] and not counts["triton phi_gradient"]


@pytest.mark.parametrize("form", ["safetensors", "torch-export"])
def test_export(form: str, starts: list[tuple[str, Counts]], folder: Path) -> None:
    """Guards against an export of a run with a GPU that fails, or that computes there: files are compared on the CPU."""
    output = folder / f"exported-{form}"
    _, counts = run_on_gpu(folder / "export.json", "pipeline.export", folder / "run", "--format", form, "--output", output)
    assert any(output.iterdir()) and not counts
