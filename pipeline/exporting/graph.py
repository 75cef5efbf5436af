"""Write the formats of graphs, PyTorch's operators traced from a model: ``onnx``, for ONNX Runtime, TensorRT, OpenVINO and others, and
``torch-export``, an ``ExportedProgram`` that PyTorch loads without this project.

The batch size is free, and what depends on weights alone is a constant.
"""

import json
import logging
import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch._inductor.constant_folding import ConstantFolder, replace_node_with_constant
from torch.export import Dim, ExportedProgram
from torch.fx import GraphModule

from pipeline.errors import UserError, first_line, install_extra
from pipeline.exporting import Facts, Subject, checked, compare, sample_images
from pipeline.inference.trained import INPUT, OUTPUT, OnnxModel

DESCRIPTION = "description.json"  # file in the archive of an ExportedProgram
OPSET = 18  # ONNX 1.13 of 2022: read by every runtime of the last years; 23 has an operator for attention, which few have
LARGEST = 2**31 - 1  # bytes of an ONNX file: a limit of protobuf
_IN_FP32 = ("Softmax", "ReduceMean", *(f"{kind}Normalization" for kind in ("Layer", "Batch", "Group", "Instance")))
_NEEDED = ("onnx", "onnxscript", "onnxruntime")
_TRACED_BATCH = 2  # 1 would become a constant


def trace(subject: Subject) -> ExportedProgram:
    """The model's forward pass: (B, 3, S, S) float32 named ``images`` -> (B, classes), for any B of at least 1. PerViT's Φp, ConViT's and
    PosMLP's maps and the like are stored as constants. Raises UserError: torch.export cannot trace the model."""
    images = sample_images(subject.description.image_size, _TRACED_BATCH)
    with refusals_explained(subject, "torch.export"), torch.no_grad():
        program = _export(subject.model, images)
        targets = [node.target for node in program.graph.nodes]
        # A node that runs a graph of its own, as a region without autocast does, would hide what is constant in there.
        nests = any(isinstance(target, torch._ops.HigherOrderOperator) for target in targets)
        # As ReLU(inplace=True) does, which torch.onnx refuses here.
        writes = any(isinstance(target, torch._ops.OpOverload) and target._schema.is_mutable for target in targets)
        if nests or writes:
            program = program.run_decompositions({})  # not always: it also takes fused attention apart
        return _export(fold_constants(program.module(check_guards=False)), images)


@contextmanager
def refusals_explained(subject: Subject, by: str) -> Iterator[None]:
    """A block in which an exporter of PyTorch works, quietly: what it raises becomes one sentence, with the exporter's name, ``by``."""
    try:
        with quiet():
            yield
    except (MemoryError, OSError):
        raise
    except Exception as error:  # PyTorch raises many types, none of them documented
        root = error
        while isinstance(root.__cause__, Exception):  # torch.onnx wraps the reason in advice
            root = root.__cause__
        reason = re.sub(r"\x1b\[\d*m", "", first_line(root))
        problem = f"{subject.description.model} cannot be exported by {by} ({reason[:300]})"
        raise UserError(problem, "export its weights with --format safetensors") from None


@contextmanager
def quiet() -> Iterator[None]:
    """Without PyTorch's warnings and log of its own deprecations: the scores are compared anyway."""
    level = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(level)


def _export(module: nn.Module, images: Tensor) -> ExportedProgram:
    return torch.export.export(module, (images,), dynamic_shapes=({0: Dim("batch", min=1)},))


def fold_constants(module: nn.Module) -> nn.Module:
    """Compute everything in a graph that depends on no input, once, and store it in the module, in place: results that something else
    needs become buffers, parameters that only they needed are gone. Its operators write to none of their inputs."""
    assert isinstance(module, GraphModule)
    graph, folder = module.graph, ConstantFolder(module)
    folder.run()
    for node, value in folder.node_replacements.items():
        stored = value.detach().clone(memory_format=torch.contiguous_format)
        replace_node_with_constant(module, node, stored, f"folded_{node.name}")
    graph.eliminate_dead_code()
    used = {str(node.target) for node in graph.nodes if node.op == "get_attr"}
    for name, _ in [*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False)]:
        if name not in used:
            owner, _, own = name.rpartition(".")
            delattr(module.get_submodule(owner), own)
    module.recompile()
    return module


def loading_lines(subject: Subject, runtime: str, run: str) -> list[str]:
    """Lines that load a graph and, by the package ``runtime``, ``run`` it: an expression of ``pixels``, (1, 3, S, S), for the scores,
    (classes,), of an image."""
    its = subject.description
    border = (1 - its.eval_crop) / 2  # the evaluation's resize and crop as one step: the part that remains, resized
    cut = f", bleed={border:.6g}" if border else ""
    fit = f"({its.image_size}, {its.image_size}), Image.Resampling.BICUBIC{cut}"
    return [
        f"import numpy as np, {runtime}",
        "from PIL import Image, ImageOps",
        f'image = ImageOps.fit(Image.open("cat.jpg").convert("RGB"), {fit})',
        f"pixels = ((np.asarray(image) / 255 - {its.mean}) / {its.std}).transpose(2, 0, 1)[None].astype(np.float32)",
        f"scores = {run}  # (classes,)",
    ]


def export_torch_export(subject: Subject, path: Path, precision: str = "fp32") -> Facts:
    """Write the file and compare what is read back with the model. Raises UserError: PyTorch cannot export the model, or the
    scores differ; OSError: the file cannot be written."""
    program = trace(subject)
    with refusals_explained(subject, "torch.export.save"), open(path, "wb") as file:
        torch.export.save(program, file, extra_files={DESCRIPTION: json.dumps(asdict(subject.description))})
    with quiet():
        read = torch.export.load(path).module()
    difference = compare(subject, read, precision, f"the program of {path.name}")
    return {
        "Format": f"`ExportedProgram` of PyTorch {torch.__version__}, batch size free",
        "Class names": f"`classes` of `{DESCRIPTION}` in the file (`extra_files` of `torch.export.load`)",
        "Checked": checked(difference, "fp32", "PyTorch"),
    }


def loading_torch_export(subject: Subject, name: str) -> list[str]:
    return loading_lines(subject, "torch", f'torch.export.load("{name}").module()(torch.from_numpy(pixels))[0]')


def export_onnx(subject: Subject, path: Path, precision: str = "fp32") -> Facts:
    """Write the file, run it in ONNX Runtime and compare the scores with the model's. Raises UserError: a package is
    missing, the model has an operator that ONNX lacks or is too large, or the scores differ; OSError: the file cannot be
    written."""
    if missing := [name for name in _NEEDED if find_spec(name) is None]:
        problem = f"--format onnx requires {', '.join(_NEEDED)}, but {' and '.join(missing)} cannot be imported"
        raise UserError(problem, install_extra("onnx"))
    import onnxruntime

    program, options = trace(subject), {"opset_version": OPSET, "verbose": False, "external_data": False}
    with refusals_explained(subject, f"torch.onnx with opset {OPSET}"):
        made = torch.onnx.export(program, input_names=[INPUT], output_names=[OUTPUT], **options)  # type: ignore[arg-type]
        assert made is not None
        model: Any = made.model_proto
    if precision == "fp16":
        model = _in_half(model)
    # The exporter's notes for its developers, with the paths of this machine: a third of a small file.
    for part in (model.graph, *model.graph.node):
        part.ClearField("metadata_props")
    description = {"description": json.dumps(asdict(subject.description)), "opset": str(OPSET), "precision": precision}
    for key, value in description.items():
        model.metadata_props.add(key=key, value=value)
    size = model.ByteSize()
    if size > LARGEST:
        problem = f"an ONNX file must have at most {LARGEST / 1e9:.1f} GB, got {size / 1e9:.1f} for {subject.description.model}"
        raise UserError(problem, "try --precision fp16, or --format torch-export")
    path.write_bytes(model.SerializeToString())
    difference = compare(subject, OnnxModel(path, ("CPUExecutionProvider",)), precision, f"ONNX Runtime with {path.name}")
    tensors = "float16, but for norms, softmax, input and output" if precision == "fp16" else "float32"
    return {
        "Format": f"ONNX, opset {OPSET}, numbers in {tensors}",
        "Input and output": f"`{INPUT}` and `{OUTPUT}`, float32, batch size free",
        "Class names": "`classes` of the metadata's `description`, which is JSON",
        "Checked": checked(difference, precision, f"ONNX Runtime {onnxruntime.__version__}"),
    }


def loading_onnx(subject: Subject, name: str) -> list[str]:
    run = f'onnxruntime.InferenceSession("{name}").run(None, {{"{INPUT}": pixels}})[0][0]'
    return loading_lines(subject, "onnxruntime", run)


def _in_half(model: Any) -> Any:
    """The same graph in float16, but for what float16 overflows in, squares and exponentials of large activations; input and output stay
    float32, so that the same program runs both."""
    from onnxruntime.transformers.float16 import DEFAULT_OP_BLOCK_LIST, convert_float_to_float16
    from onnxruntime.transformers.onnx_model import OnnxModel as Sorter

    with quiet():  # numbers below the smallest of float16 become it: that is what fp16 means
        half = convert_float_to_float16(model, keep_io_types=True, op_block_list=[*DEFAULT_OP_BLOCK_LIST, *_IN_FP32])
    Sorter.graph_topological_sort(half.graph)  # ONNX asks for it, and the casts come last
    del half.graph.value_info[:]  # some say the types before
    return half
