"""The published weights of examples/cifar10 are whole, small, and predict what the card says."""

from __future__ import annotations

import hashlib
import json
import os
import re

import numpy as np
import pytest
import torch

from pipeline import load
from pipeline.config import load_config
from pipeline.runs.files import RunFiles
from support.launching import REPOSITORY
from support.ranks import run_forked

FOLDER = REPOSITORY / "examples" / "cifar10"
WEIGHTS, GRAPH = (FOLDER / f"pervit_narrow_cifar10.{ending}" for ending in ("safetensors", "onnx"))
CIFAR10 = os.environ.get("PERVIT_CIFAR10")


def test_files_are_whole_and_small() -> None:
    """Guards against a file that was written again without its checksum, and a repository that grows by checkpoints."""
    for path in (WEIGHTS, GRAPH):
        digest, name = (path.parent / f"{path.name}.sha256").read_text().split()
        assert (digest, name) == (hashlib.sha256(path.read_bytes()).hexdigest(), path.name)
    files = [path for path in FOLDER.rglob("*") if path.is_file()]
    assert sum(path.stat().st_size for path in files) < 5e6
    assert not [path for path in files if b"/work/" in path.read_bytes() or b"/tmp/" in path.read_bytes()]


def test_the_run_is_the_config_of_the_repository() -> None:
    """Guards against a config that was changed and whose weights are another model's."""
    shipped = load_config("pervit_narrow_cifar10")
    run = load_config(FOLDER / "run" / "config.yaml")
    for section in ("model", "data", "augment", "optim"):
        assert getattr(run, section) == getattr(shipped, section), section
    assert run.train.epochs == shipped.train.epochs
    files = RunFiles(FOLDER / "run")
    rows = [json.loads(line) for line in (FOLDER / "run" / "metrics.jsonl").read_text().splitlines()]
    assert not files.problems and rows[-1]["step"] == files.newest_start["last_step"]


def test_they_predict_without_the_run() -> None:
    """Guards against weights that need a file of their training: both formats give one answer, with names of classes."""
    runtime = pytest.importorskip("onnxruntime", reason="requires onnxruntime: pip install -e '.[onnx]'")
    model, transform, classes = load(WEIGHTS)
    images = torch.randn(3, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        scores = model(images)
    assert classes[0] == "airplane" and scores.shape == (3, len(classes)) == (3, 10)
    session = runtime.InferenceSession(GRAPH)
    (other,) = session.run(None, {session.get_inputs()[0].name: images.numpy()})
    np.testing.assert_allclose(other, scores, atol=0.02 * float(scores.abs().max()))


@pytest.mark.skipif(not CIFAR10, reason="requires shards of CIFAR-10: PERVIT_CIFAR10=data/cifar10")
def test_the_accuracy_is_the_cards() -> None:
    said = run_forked("pipeline.evaluate", "--checkpoint", WEIGHTS, "--data", CIFAR10).stdout
    promised = re.search(r"safetensors, by .* \| ([\d.]+) %", (FOLDER / "README.md").read_text())
    assert promised and f"{promised[1]} %" in said
