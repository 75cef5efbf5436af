"""``pervit evaluate model.onnx``: the exported graph on an evaluation's images."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from pipeline.errors import UserError
from pipeline.export import read_subject
from pipeline.exporting import graph
from pipeline.inference.trained import OnnxModel, read_trained
from support.ranks import run_forked
from support.small_model import write_model

CLASSES = [*"abc"]


def test_a_graph_is_evaluated_as_its_model(tmp_path: Path) -> None:
    """Guards against a file that is exported and never looked at again: other pixels, classes or scores than the model's, a precision
    that it does not have, and a switch or features that a graph cannot have."""
    onnx = pytest.importorskip("onnx", reason="needs the extra onnx")
    pytest.importorskip("onnxruntime", reason="needs the extra onnx")
    pytest.importorskip("onnxscript", reason="needs the extra onnx")
    source, file = write_model(tmp_path / "model.safetensors", CLASSES), tmp_path / "model.onnx"
    rng = np.random.default_rng(0)
    for number in range(7):
        image = tmp_path / "images" / CLASSES[number % 3] / f"{number}.png"
        image.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(rng.integers(0, 256, (3, 3, 3), dtype=np.uint8)).resize((40, 36)).save(image)
    graph.export_onnx(read_subject(source, None, None, "ours"), file)
    rows = []
    for words in (("--checkpoint", source), (file,)):
        options = ("--data", tmp_path / "images", "--batch-size", 3, "--json", tmp_path / "result.json")
        said = run_forked("pipeline.evaluate", *words, *options).stdout
        rows.append(json.loads((tmp_path / "result.json").read_text()))
    assert "precision  fp32, as exported" in said
    assert rows[1]["loss"] == pytest.approx(rows[0]["loss"], rel=1e-4)
    assert all(rows[1][key] == rows[0][key] for key in ("count", "correct1", "class_correct", "model", "classes", "step"))

    trained = read_trained(file)
    with pytest.raises(UserError, match="the switches of an ONNX file are fixed: leave out --switch"):
        trained.build_model({"cpe": False})
    with pytest.raises(UserError, match="an ONNX file gives scores, not features"):
        _ = trained.build_model().pooled_width
    with pytest.raises(UserError, match="is a graph, whose weights are not"):
        read_subject(file, None, None, "ours")
    model = onnx.load(file)
    del model.metadata_props[:]
    onnx.save(model, tmp_path / "foreign.onnx")
    with pytest.raises(UserError, match="foreign.onnx does not describe its model and classes"):
        read_trained(tmp_path / "foreign.onnx")
    (tmp_path / "half.onnx").write_bytes(file.read_bytes()[:1000])
    with pytest.raises(UserError, match=r"half.onnx cannot be read as ONNX \(.*\): export it again"):
        read_trained(tmp_path / "half.onnx")


def test_without_onnx_runtime_there_is_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against a traceback of an import."""
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    with pytest.raises(UserError, match="model.onnx requires ONNX Runtime, which cannot be imported .*: pip install"):
        OnnxModel(tmp_path / "model.onnx")
