"""Export a trained model as files that other programs load.

A format is a module with two functions and a line in ``FORMATS``::

    def export(subject: Subject, path: Path, options: Options) -> Facts: ...
    def loading(subject: Subject, name: str) -> str: ...

``export`` writes to ``path``, which nobody else sees yet: a file that does not exist, with the format's ending, or, for a format
without one, an empty folder. It reads back what it wrote and compares scores with the model's, and raises a ``UserError`` if it
cannot export the model, or if they differ; then nothing is published. It returns lines for the card. ``loading`` gives the card
five lines of Python that load the export called ``name``.
"""

from __future__ import annotations

import difflib
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from pipeline.errors import UserError


@dataclass(frozen=True)
class Format:
    """A form of export.

    Attributes:
        name: of ``--format``.
        module: of this package, imported when the format is used.
        ending: of its file; None: a folder.
        what: one line for the help.
        precisions: of ``--precision``; the first is the default.
        library: that loads it, for the front matter of a card on a model hub.
    """

    name: str
    module: str
    ending: str | None
    what: str
    precisions: tuple[str, ...] = ("fp32",)
    library: str = "pytorch"

    def load(self) -> Any:
        """The module, with ``export`` and ``loading``."""
        return import_module(f"pipeline.exporting.{self.module}")


FORMATS = {
    each.name: each
    for each in (
        Format("safetensors", "safetensors_file", ".safetensors", "the weights with a description, for this project"),
        Format("onnx", "onnx_file", ".onnx", "a graph for ONNX Runtime and others", ("fp32", "fp16"), "onnx"),
        Format("torch-export", "graph", ".pt2", "an ExportedProgram, for PyTorch without this project"),
        Format("timm", "timm_folder", None, "a folder for timm and the Hugging Face hub", library="timm"),
    )
}


def find_format(name: str) -> Format:
    """The format of that name.

    Raises:
        UserError: there is none.
    """
    if name not in FORMATS:
        close = difflib.get_close_matches(name, FORMATS, n=1)
        remedy = f"did you mean {close[0]}?" if close else "pass one of these"
        raise UserError(f"--format must be one of {', '.join(FORMATS)}, got {name!r}", remedy)
    return FORMATS[name]
