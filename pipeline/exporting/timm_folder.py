"""Write the format ``timm``: a folder that ``timm.create_model("local-dir:PATH", pretrained=True)`` and ``hf-hub:REPO`` load.

``config.json`` names timm's architecture, its arguments, the preprocessing and the classes; ``model.safetensors`` has timm's names.
What timm does not have keeps this project's name, which one import registers (:mod:`pipeline.models.for_timm`).
"""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import Tensor

from pipeline.exporting.subject import Facts, Options, Subject, checked, compare, to_json
from pipeline.files import replace_text
from pipeline.models.weights.exported import write_exported
from pipeline.models.weights.timm_folder import CONFIG, WEIGHTS, TimmForm, read_timm_folder, timm_form


def export(subject: Subject, path: Path, options: Options) -> Facts:
    """Write the folder, read it back, and compare the scores.

    Args:
        subject: the model.
        path: an empty folder.
        options: none applies.

    Returns:
        Lines for the card: architecture, what read it back, the largest difference.

    Raises:
        UserError: timm's model would give other scores.
        OSError: the folder cannot be written.
    """
    its = subject.description
    form = timm_form(its.model, its.switches)
    weights = subject.model.state_dict()
    write_exported(
        path / WEIGHTS, weights, replace(its, names="ours" if form.registered else "authors"), to_json(subject.training)
    )
    config = folder_config(subject, form)
    replace_text(path / CONFIG, json.dumps(config, indent=2, ensure_ascii=False) + "\n")
    reader, run = _reader(path)
    difference = compare(subject, run, "timm", f"the folder, read by {reader},")
    where = "this project's, after `import pipeline.models.for_timm`" if form.registered else "timm's own"
    return {
        "Format": f"a folder for timm, architecture `{form.architecture}`, {where}",
        "Checked": checked(difference, "timm", reader),
    }


def folder_config(subject: Subject, form: TimmForm) -> dict[str, Any]:
    """``config.json`` as a dict, in the order in which timm writes it."""
    its = subject.description
    size = [3, its.image_size, its.image_size]
    named: dict[str, Any] = {"label_names": its.classes}
    descriptions = getattr(its, "class_names", None)  # what people call the classes, where the run knows it
    if descriptions:
        named["label_descriptions"] = dict(zip(its.classes, descriptions))
    net = getattr(subject.model, "net", None)  # of timm:NAME, timm's own module
    theirs: dict[str, Any] = {} if net is None else net.pretrained_cfg
    same_size = tuple(theirs.get("input_size", ())) == tuple(size)
    return {
        "architecture": form.architecture,
        "num_classes": its.num_classes,
        "num_features": _num_features(subject),
        "global_pool": form.global_pool if net is None else theirs.get("global_pool", "avg"),
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


def loading(subject: Subject, name: str) -> str:
    """Five lines of Python that load the folder."""
    form = timm_form(subject.description.model, subject.description.switches)
    return "\n".join(
        [
            *(["import pipeline.models.for_timm"] if form.registered else []),
            "import timm",
            "from PIL import Image",
            f'model = timm.create_model("local-dir:{name}", pretrained=True).eval()',
            "transform = timm.data.create_transform(**timm.data.resolve_model_data_config(model))",
            'scores = model(transform(Image.open("cat.jpg").convert("RGB"))[None])[0]  # (classes,)',
        ]
    )


def _num_features(subject: Subject) -> int:
    net = getattr(subject.model, "net", None)
    return subject.model.pooled_width if net is None else int(net.num_features)


def _reader(path: Path) -> tuple[str, Callable[[Tensor], Tensor]]:
    """What reads the folder, timm where it is installed, and the model that it reads, (B, 3, S, S) -> (B, classes)."""
    if importlib.util.find_spec("timm") is None:
        model, _, _ = read_timm_folder(path)
        return "this project, as timm is not installed", model
    import timm

    import pipeline.models.for_timm  # noqa: F401  # registers the models

    return f"timm {timm.__version__}", timm.create_model(f"local-dir:{path}", pretrained=True).eval()
