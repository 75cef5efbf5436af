"""Write the format ``onnx``: a graph that ONNX Runtime, TensorRT, OpenVINO and others load."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pipeline.errors import UserError
from pipeline.exporting.graph import INPUT, OUTPUT, loading_lines, quiet, refusals_explained, trace
from pipeline.exporting.subject import Facts, Subject, checked, compare

OPSET = 18  # ONNX 1.13 of 2022: read by every runtime of the last years; 23 has an operator for attention, which few have
LARGEST = 2**31 - 1  # bytes of a file: a limit of protobuf
_NEEDED = ("onnx", "onnxscript", "onnxruntime")


def export_onnx(subject: Subject, path: Path, precision: str = "fp32") -> Facts:
    """Write the file, run it in ONNX Runtime and compare the scores with the model's.

    Raises:
        UserError: a package is missing, the model has an operator that ONNX lacks or is too large, or the scores differ.
        OSError: the file cannot be written.
    """
    if missing := [name for name in _NEEDED if find_spec(name) is None]:
        raise UserError(
            f"--format onnx requires {', '.join(_NEEDED)}, but {' and '.join(missing)} cannot be imported",
            "pip install 'pervit-pipeline[onnx]'",
        )
    import onnxruntime

    model = _converted(subject)
    if precision == "fp16":
        model = _in_half(model)
    description = {"description": json.dumps(asdict(subject.description)), "opset": str(OPSET), "precision": precision}
    for key, value in description.items():
        entry = model.metadata_props.add()
        entry.key, entry.value = key, value
    size = model.ByteSize()
    if size > LARGEST:
        raise UserError(
            f"an ONNX file must have at most {LARGEST / 1e9:.1f} GB, got {size / 1e9:.1f} for {subject.description.model}",
            "try --precision fp16, or --format torch-export",
        )
    path.write_bytes(model.SerializeToString())
    difference = compare(subject, runner(path), precision, f"ONNX Runtime with {path.name}")
    tensors = "float16, but for input and output" if precision == "fp16" else "float32"
    return {
        "Format": f"ONNX, opset {OPSET}, numbers in {tensors}",
        "Input and output": f"`{INPUT}` and `{OUTPUT}`, float32, batch size free",
        "Class names": "`classes` of the metadata's `description`, which is JSON",
        "Checked": checked(difference, precision, f"ONNX Runtime {onnxruntime.__version__}"),
    }


def loading_onnx(subject: Subject, name: str) -> list[str]:
    run = f'onnxruntime.InferenceSession("{name}").run(None, {{"{INPUT}": pixels}})[0][0]'
    return loading_lines(subject, "onnxruntime", run)


def _converted(subject: Subject) -> Any:
    """An ``onnx.ModelProto``."""
    program = trace(subject)
    with refusals_explained(subject, f"torch.onnx with opset {OPSET}"):
        made = torch.onnx.export(
            program, opset_version=OPSET, input_names=[INPUT], output_names=[OUTPUT], verbose=False, external_data=False
        )
        assert made is not None
        return made.model_proto


def _in_half(model: Any) -> Any:
    """The same graph in float16; input and output stay float32, so that the same program runs both."""
    from onnxruntime.transformers.float16 import convert_float_to_float16

    with quiet():  # numbers below the smallest of float16 become it: that is what fp16 means
        return convert_float_to_float16(model, keep_io_types=True)


def runner(path: Path) -> Callable[[Tensor], Tensor]:
    """The file in ONNX Runtime, on the CPU: (B, 3, S, S) float32 -> (B, classes)."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3  # errors
    options.intra_op_num_threads = torch.get_num_threads()
    session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    return lambda images: torch.from_numpy(session.run([OUTPUT], {INPUT: images.numpy()})[0])
