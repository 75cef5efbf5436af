"""Export a trained model as files that other programs load.

A format is a line in ``FORMATS`` and two functions of a module, with the format's name after ``export_`` and ``loading_``::

    def export_onnx(subject: Subject, path: Path, precision: str) -> Facts: ...
    def loading_onnx(subject: Subject, name: str) -> list[str]: ...

The first writes to ``path``, which nobody else sees yet: a file that does not exist, with the format's ending, or, for a format
without one, an empty folder. It reads back what it wrote and compares scores with the model's, and raises a ``UserError`` if it
cannot export the model, or if they differ; then nothing is published. It returns lines for the card. The second gives the card
lines of Python that load the export called ``name``.
"""

from __future__ import annotations

import difflib
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from pipeline.errors import UserError


@dataclass(frozen=True)
class Format:
    """A form of export."""

    name: str  # of --format
    module: str  # of this package, imported when the format is used
    ending: str | None  # of its file; None: a folder
    what: str  # one line for the help
    precisions: tuple[str, ...] = ("fp32",)  # of --precision; the first is the default
    library: str = "pytorch"  # that loads it, for the front matter of a card on a model hub

    def function(self, what: str) -> Any:
        """The format's ``export`` or ``loading``."""
        return getattr(import_module(f"pipeline.exporting.{self.module}"), f"{what}_{self.name.replace('-', '_')}")


_ALL = (
    Format("safetensors", "weights_file", ".safetensors", "the weights with a description, for this project"),
    Format("onnx", "graph", ".onnx", "a graph for ONNX Runtime and others", ("fp32", "fp16"), "onnx"),
    Format("torch-export", "graph", ".pt2", "an ExportedProgram, for PyTorch without this project"),
    Format("timm", "weights_file", None, "a folder for timm and the Hugging Face hub", library="timm"),
)
FORMATS = {form.name: form for form in _ALL}


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
