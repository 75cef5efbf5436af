"""Every family in every format of a graph: the scores are the model's, for any batch size, and tables are constants."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from pipeline.errors import UserError
from pipeline.exporting import TOLERANCE, Subject, compare, graph
from pipeline.exporting.graph import fold_constants, trace
from pipeline.models import create_model
from pipeline.models.gated_mlp import posmlp
from support import parity
from support.small_models import build
from support.subjects import subject_of

FAMILIES = ("convit", "deit", "gmlp", "lsat_224", "lsat_32", "pervit", "posmlp")


def small(name: str) -> Subject:
    torch.manual_seed(0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(posmlp, "DEPTHS", (1, 1, 2, 1))  # tracing takes as long as there are blocks: 24 of PosMLP, all alike
        model = build(name)
    return subject_of(model, name, parity.VARIANTS[name].image_size, parity.CLASSES)


@pytest.fixture(scope="module", params=FAMILIES)
def subject(request: pytest.FixtureRequest) -> Subject:
    return small(request.param)


def test_a_program_is_the_model(subject: Subject, tmp_path: Path) -> None:
    """Guards against a batch size that tracing fixes, maps that are computed again for every batch, and a table that is cached while
    torch.export traces: later forward passes of the model would use a tensor without values."""
    file = tmp_path / "model.pt2"
    facts = graph.export_torch_export(subject, file)
    assert "batches of 1 and 3" in facts["Checked"]
    program = torch.export.load(file)
    images = torch.randn(5, 3, *[subject.description.image_size] * 2)
    with torch.inference_mode():
        assert program.module()(images).shape == (5, parity.CLASSES)
        torch.testing.assert_close(program.module()(images), subject.model(images), rtol=1e-4, atol=1e-5)
    names = " ".join(program.state_dict)
    per_layer = {"pervit": "position.", "convit": "position_projection", "posmlp": "spreads", "gmlp": "no such"}
    assert per_layer.get(subject.description.model, "no such") not in names
    assert "folded" in names or subject.description.model not in ("pervit", "convit", "posmlp")


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_an_onnx_file_is_the_model(subject: Subject, precision: str, tmp_path: Path) -> None:
    """Guards against a graph that ONNX Runtime refuses or computes otherwise, and against an opset that nobody asked for."""
    onnx = pytest.importorskip("onnx", reason="needs the extra onnx")
    runtime = pytest.importorskip("onnxruntime", reason="needs the extra onnx")
    pytest.importorskip("onnxscript", reason="needs the extra onnx")
    file = tmp_path / "model.onnx"
    graph.export_onnx(subject, file, precision)
    model = onnx.load(file)
    assert str(Path(graph.__file__).parents[1]).encode() not in file.read_bytes()  # the exporter adds stack traces
    assert [entry.version for entry in model.opset_import if not entry.domain] == [graph.OPSET]
    kept = {entry.key: entry.value for entry in model.metadata_props}
    assert kept["opset"] == str(graph.OPSET) and kept["precision"] == precision and "a | b" in kept["description"]
    half = sum(tensor.data_type == onnx.TensorProto.FLOAT16 for tensor in model.graph.initializer)
    assert (half > 10) == (precision == "fp16")
    session = runtime.InferenceSession(str(file))
    (entry,) = session.get_inputs()
    assert entry.name == "images" and isinstance(entry.shape[0], str) and entry.type == "tensor(float)"
    images = torch.randn(4, *entry.shape[1:])
    with torch.inference_mode():
        expected = subject.model(images)
    difference = (torch.from_numpy(session.run(["scores"], {"images": images.numpy()})[0]) - expected).abs().max()
    assert difference <= TOLERANCE[precision] * expected.abs().max()


def test_norms_and_softmax_stay_in_fp32(tmp_path: Path) -> None:
    """Guards against squares and exponentials of large activations, which are infinite in float16: TensorRT computes a strongly typed
    graph as it is written. The same file with all in float16 fails here in onnx's own evaluator, which rounds after each operation."""
    onnx = pytest.importorskip("onnx", reason="needs the extra onnx")
    pytest.importorskip("onnxruntime", reason="needs the extra onnx")
    pytest.importorskip("onnxscript", reason="needs the extra onnx")
    from onnx.reference import ReferenceEvaluator

    subject = small("deit")
    with torch.no_grad():
        subject.model.get_parameter("position_embedding.weight").mul_(3000)
    images = torch.randn(2, 3, *[subject.description.image_size] * 2)
    with torch.inference_mode():
        expected = subject.model(images)
    errors = []
    for kept in (graph._IN_FP32, ()):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(graph, "_IN_FP32", kept)
            patch.setattr(graph, "compare", lambda *_: 0.0)
            graph.export_onnx(subject, tmp_path / "model.onnx", "fp16")
        model = onnx.load(tmp_path / "model.onnx")
        onnx.checker.check_model(model, full_check=True)
        with np.errstate(all="ignore"):
            scores = torch.from_numpy(ReferenceEvaluator(model).run(["scores"], {"images": images.numpy()})[0])
        errors.append(((scores - expected).abs().max() / expected.abs().max()).item())
        types = {
            info.name: info.type.tensor_type.elem_type for info in onnx.shape_inference.infer_shapes(model).graph.value_info
        }
        norms = [node for node in model.graph.node if node.op_type in ("LayerNormalization", "Softmax")]
        assert len(norms) > 5 and {types[node.output[0]] == onnx.TensorProto.FLOAT for node in norms} == {bool(kept)}
    assert errors[0] <= TOLERANCE["fp16"] and not errors[1] <= TOLERANCE["fp16"]


class Undecided(nn.Module):
    """What a graph cannot hold: a branch that depends on the image."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, images: Tensor) -> Tensor:
        return self.model(images) if images.sum() > 0 else -self.model(images)


def test_what_cannot_be_exported_says_why(tmp_path: Path) -> None:
    """Guards against a traceback of PyTorch's, and half a file."""
    plain = small("deit")
    subject = Subject(Undecided(plain.model), plain.description, plain.training)  # type: ignore[arg-type]
    with pytest.raises(UserError, match=r"^deit cannot be exported by torch.export \(.*\): export its weights with") as error:
        graph.export_torch_export(subject, tmp_path / "model.pt2")
    assert "\n" not in str(error.value) and not any(tmp_path.iterdir())


def test_scores_that_differ_are_refused() -> None:
    """Guards against an export that is published although it computes something else, or nothing finite."""
    subject = small("deit")
    for wrong, expected in (
        (
            lambda images: subject.model(images) * 1.001,
            "must give the model's scores to 1e-04 of the largest with fp32, got a difference of 1.0e-03",
        ),
        (lambda images: subject.model(images) / 0, "got a difference of (nan|inf)"),
        (lambda images: subject.model(images)[:1], "shape"),
    ):
        with pytest.raises(UserError, match=expected):
            compare(subject, wrong, "fp32", "it")
    assert compare(subject, subject.model, "fp32", "it") == 0


class Written(nn.Module):
    """Constants of every kind: a parameter, a table, a list of parts, a result that is used twice, and a write to a constant."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.arange(6.0).view(2, 3))
        self.direct = nn.Parameter(torch.ones(3))

    def forward(self, x: Tensor) -> Tensor:
        first, second = (self.weight.exp() + torch.arange(3.0)).unbind(0)
        buffer = torch.zeros(3)
        buffer += x.sum(0)
        return x * first + second * first + self.direct + buffer + torch.rand(3) * 0


def test_constants_are_computed_once() -> None:
    """Guards against folding that changes results, keeps what it does not need, or fixes what is random or written to."""
    module, x = Written(), torch.randn(2, 3)
    program = torch.export.export(module, (x,)).run_decompositions({})
    folded = fold_constants(program.module(check_guards=False))
    called = [str(node.target) for node in folded.graph.nodes if node.op == "call_function"]  # type: ignore[union-attr]
    assert not any("exp" in name or "arange" in name for name in called) and any("rand" in name for name in called)
    assert "weight" not in dict(folded.named_parameters()) and "direct" in dict(folded.named_parameters())
    for _ in range(2):
        torch.testing.assert_close(folded(x), module(x))


def test_models_with_switches_are_traced_too() -> None:
    """Guards against ablations that only the default could be exported without."""
    switches = {"peripheral_position": True}
    trace(subject_of(create_model("deit_t", 3, 32, switches=switches), "deit_t", 32, 3))
