"""Write the format ``safetensors``: the weights with a description, which this project reads."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import cast

import torch

from pipeline.errors import UserError
from pipeline.exporting.subject import Facts, Options, Subject, to_json
from pipeline.models.weights.exported import read_exported, write_exported
from pipeline.models.weights.reference_names import Names


def export(subject: Subject, path: Path, options: Options) -> Facts:
    """Write the file, read it and compare every tensor.

    Raises:
        UserError: the authors' code does not support the model's switches, or the file is not read back as it was written.
        OSError: the file cannot be written.
    """
    names = cast(Names, options.names)
    weights = subject.model.state_dict()
    write_exported(path, weights, replace(subject.description, names=names), to_json(subject.training))
    read = read_exported(path)[0].state_dict()
    if read.keys() != weights.keys() or any(not torch.equal(read[name], weights[name]) for name in weights):
        raise UserError(f"{path} is not read back as it was written, nothing was exported", "check the disk, and export again")
    whose = "the authors' code" if names == "authors" else "this project"
    return {
        "Format": f"safetensors, {len(weights)} tensors, named as in {whose}",
        "Checked": "every tensor, read back, is the model's bit for bit",
    }


def loading(subject: Subject, name: str) -> str:
    return "\n".join(
        [
            "from PIL import Image",
            "from pipeline import load",
            f'model, transform, classes = load("{name}")',
            'scores = model(transform(Image.open("cat.jpg"))[None])[0]  # (classes,)',
            "print(classes[scores.argmax()])",
        ]
    )
