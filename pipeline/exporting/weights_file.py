"""Write the formats of weights: ``safetensors``, a file that this project reads, and ``timm``, a folder that
``timm.create_model("local-dir:PATH", pretrained=True)`` and ``hf-hub:REPO`` load."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pipeline.errors import UserError
from pipeline.exporting import Facts, Subject, checked, compare
from pipeline.files import replace_text
from pipeline.lazy import import_library
from pipeline.models.timm.names import CONFIG, WEIGHTS
from pipeline.models.weights.exported import read_exported, write_exported
from pipeline.models.weights.timm_folder import TimmForm, read_timm_folder, timm_form


def export_safetensors(subject: Subject, path: Path, precision: str = "fp32") -> Facts:
    """Write the file, with the names that the description says, read it and compare every tensor. Raises UserError: the
    authors' code does not support the model's switches, or the file is not read back as it was written; OSError: the file
    cannot be written."""
    weights = subject.model.state_dict()
    write_exported(path, weights, subject.description, subject.training.to_json())
    read = read_exported(path)[0].state_dict()
    if read.keys() != weights.keys() or any(not torch.equal(read[name], weights[name]) for name in weights):
        raise UserError(f"{path} is not read back as it was written, nothing was exported", "check the disk, and export again")
    whose = "the authors' code" if subject.description.names == "authors" else "this project"
    return {
        "Format": f"safetensors, {len(weights)} tensors, named as in {whose}",
        "Checked": "every tensor, read back, is the model's bit for bit",
    }


def loading_safetensors(subject: Subject, name: str) -> list[str]:
    return [
        "from PIL import Image",
        "from pipeline import load",
        f'model, transform, classes = load("{name}")',
        'scores = model(transform(Image.open("cat.jpg"))[None])[0]  # (classes,)',
        "print(classes[scores.argmax()])",
    ]


def export_timm(subject: Subject, path: Path, precision: str = "fp32") -> Facts:
    """Write the folder, read it back with timm, where it is installed, and compare the scores. Raises UserError: timm's
    model would give other scores; OSError: the folder cannot be written."""
    form = timm_form(subject.description.model, subject.description.switches)
    description = replace(subject.description, names="ours" if form.registered else "authors")
    write_exported(path / WEIGHTS, subject.model.state_dict(), description, subject.training.to_json())
    replace_text(path / CONFIG, json.dumps(_config(subject, form), indent=2, ensure_ascii=False) + "\n")
    reader, run = _reader(path)
    difference = compare(subject, run, "timm", f"the folder, read by {reader},")
    where = "this project's, after `import pipeline.models.for_timm`" if form.registered else "timm's own"
    what = f"a folder for timm, architecture `{form.architecture}`, {where}"
    return {"Format": what, "Checked": checked(difference, "timm", reader)}


def loading_timm(subject: Subject, name: str) -> list[str]:
    form = timm_form(subject.description.model, subject.description.switches)
    return [
        *(["import pipeline.models.for_timm"] if form.registered else []),
        "import timm",
        "from PIL import Image",
        f'model = timm.create_model("local-dir:{name}", pretrained=True).eval()',
        "transform = timm.data.create_transform(**timm.data.resolve_model_data_config(model))",
        'scores = model(transform(Image.open("cat.jpg").convert("RGB"))[None])[0]  # (classes,)',
    ]


def _config(subject: Subject, form: TimmForm) -> dict[str, Any]:
    """``config.json`` as a dict, in the order in which timm writes it."""
    its = subject.description
    size = [3, its.image_size, its.image_size]
    named = {"label_descriptions": dict(zip(its.classes, its.class_names))} if its.class_names else {}
    net = getattr(subject.model, "net", None)  # of timm:NAME, timm's own module
    theirs: dict[str, Any] = {} if net is None else net.pretrained_cfg
    same_size = tuple(theirs.get("input_size", ())) == tuple(size)
    return {
        "architecture": form.architecture,
        "num_classes": its.num_classes,
        "num_features": subject.model.pooled_width if net is None else int(net.num_features),
        "global_pool": form.global_pool if net is None else theirs.get("global_pool", "avg"),
        "label_names": its.classes,
        **named,
        **({"model_args": form.model_args} if form.model_args else {}),
        "pretrained_cfg": {
            "input_size": size,
            "fixed_input_size": theirs.get("fixed_input_size", net is None),
            "interpolation": "bicubic",
            "crop_pct": its.eval_crop,
            "crop_mode": "center",
            "mean": its.mean,
            "std": its.std,
            "num_classes": its.num_classes,
            "pool_size": theirs.get("pool_size") if same_size else None,
            "first_conv": theirs.get("first_conv", form.first_conv),
            "classifier": theirs.get("classifier", "head"),
            "custom_load": False,
        },
    }


def _reader(path: Path) -> tuple[str, Callable[[Tensor], Tensor]]:
    """What reads the folder, and the model that it reads, (B, 3, S, S) -> (B, classes)."""
    try:
        timm = import_library("timm", "reading the folder")
    except UserError as error:
        return f"this project; {error.problem}", read_timm_folder(path)[0]
    import pipeline.models.for_timm  # noqa: F401  # registers the models

    return f"timm {timm.__version__}", timm.create_model(f"local-dir:{path}", pretrained=True).eval()
