"""The format ``torch-export``: an ``ExportedProgram``, which PyTorch loads without this project."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import torch

from pipeline.exporting.checking import checked, compare
from pipeline.exporting.graph import quiet, refusals_explained, trace
from pipeline.exporting.snippets import graph_snippet
from pipeline.exporting.subject import Facts, Options, Subject

DESCRIPTION = "description.json"  # file inside of the archive


def export(subject: Subject, path: Path, options: Options) -> Facts:
    """Write the file and compare what is read back with the model.

    Raises:
        UserError: PyTorch cannot export the model, or the scores differ.
        OSError: the file cannot be written.
    """
    program = trace(subject)
    with refusals_explained(subject, "torch.export.save"), open(path, "wb") as file:
        torch.export.save(program, file, extra_files={DESCRIPTION: json.dumps(asdict(subject.description))})
    with quiet():
        read = torch.export.load(path).module()
    difference = compare(subject, read, options.precision, f"the program of {path.name}")
    return {
        "Format": f"`ExportedProgram` of PyTorch {torch.__version__}, batch size free",
        "Class names": f"`classes` of `{DESCRIPTION}` in the file (`extra_files` of `torch.export.load`)",
        "Checked": checked(difference, "fp32", "PyTorch"),
    }


def loading(subject: Subject, name: str) -> str:
    return graph_snippet(subject, "torch", f'torch.export.load("{name}").module()(torch.from_numpy(pixels))[0]')
