"""Export a trained model as files that other programs load.

A format is a line in ``FORMATS`` and two functions of a module, with the format's name after ``export_`` and ``loading_``::

    def export_onnx(subject: Subject, path: Path, precision: str) -> Facts: ...
    def loading_onnx(subject: Subject, name: str) -> list[str]: ...

The first writes to ``path``, which nobody else sees yet: a file that does not exist, with the format's ending, or, for a format
without one, an empty folder. It reads back what it wrote and compares scores with the model's, and raises a ``UserError`` if it
cannot export the model, or if they differ; then nothing is published. It returns lines for the card. The second gives the card
lines of Python that load the export called ``name``.
"""

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from importlib import import_module
from typing import TYPE_CHECKING, Any

from pipeline.errors import UserError, did_you_mean, first_invalid

if TYPE_CHECKING:
    from torch import Tensor

    from pipeline.models.common.base import VisionModel
    from pipeline.models.weights.exported import Description

Facts = dict[str, str]  # what a format says of an export, for the card: name -> text
BATCHES = (1, 3)  # neither is the one that the graph was traced with
# Largest difference of a score / largest score; timm has the same operators.
TOLERANCE = {"fp32": 1e-4, "fp16": 2e-2, "timm": 1e-5}
_REMEDY = "export the weights with --format safetensors, and report this"


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
    """The format of that name. Raises UserError: there is none."""
    if name not in FORMATS:
        remedy = did_you_mean(name, FORMATS, "pass one of these")
        raise UserError(f"--format must be one of {', '.join(FORMATS)}, got {name!r}", remedy)
    return FORMATS[name]


@dataclass(frozen=True)
class Training:
    """What is known of a model's training; None or empty: not recorded."""

    run: str | None = None  # name of the run's folder
    samples: int | None = None  # images seen
    data: dict[str, Any] = field(default_factory=dict)  # name of the folder of shards, number of images, fingerprint
    world_size: int | None = None
    zero_stage: int | None = None
    results: list[dict[str, Any]] = field(default_factory=list)  # rows of evaluations of these very weights
    versions: dict[str, str] = field(default_factory=dict)  # package -> version, of the run's last start
    config: dict[str, Any] = field(default_factory=dict)  # as it was trained with

    def to_json(self) -> str:
        """What an exported safetensors file keeps of the training, for those who export it again."""
        return json.dumps(asdict(self))


def training_from_json(text: str, source: str) -> Training:
    """The reverse of :meth:`Training.to_json`, without fields of later versions. Raises UserError: ``source`` is damaged."""
    from pydantic import TypeAdapter, ValidationError

    try:
        return TypeAdapter(Training).validate_json(text)
    except ValidationError as error:
        problem = f"{source} has a damaged record of its training ({first_invalid(error, 'training')})"
        raise UserError(problem, "export it again") from None


@dataclass(frozen=True)
class Subject:
    """A trained model, (B, 3, S, S) -> (B, classes), in eval mode on the CPU, in float32."""

    model: "VisionModel"
    description: "Description"  # its ``names`` are those that the tensors get in a safetensors file
    training: Training


def sample_images(image_size: int, batch: int) -> "Tensor":
    """(batch, 3, S, S) from a normal distribution, the same each time."""
    import torch  # imported late, here and below: the list of formats does without

    return torch.randn(batch, 3, image_size, image_size, generator=torch.Generator().manual_seed(batch))


def compare(subject: Subject, run: "Callable[[Tensor], Tensor]", precision: str, of: str) -> float:
    """Compare scores for the sizes of ``BATCHES``; returns the largest difference, relative to the largest score of its batch. ``run``: the
    export, (B, 3, S, S) float32 -> (B, classes). ``precision``: of the export, or ``timm``. ``of``: what was exported, and what ran
    it. Raises UserError: the difference is above the precision's ``TOLERANCE``."""
    import torch

    worst = 0.0
    for batch in BATCHES:
        images = sample_images(subject.description.image_size, batch)
        with torch.inference_mode():
            expected = subject.model(images).double()
            found = run(images).double()
        if expected.shape != found.shape:
            raise UserError(f"{of} must give scores of shape {tuple(expected.shape)}, got {tuple(found.shape)}", _REMEDY)
        difference = ((found - expected).abs().max() / expected.abs().max().clamp(min=1e-12)).item()
        if not difference <= TOLERANCE[precision]:  # NaN too
            must = f"must give the model's scores to {TOLERANCE[precision]:.0e} of the largest with {precision}"
            problem = f"{of} {must}, got a difference of {difference:.1e}: nothing was written"
            raise UserError(problem, "try --precision fp32" if precision == "fp16" else _REMEDY)
        worst = max(worst, difference)
    return worst


def checked(difference: float, precision: str, by: str) -> str:
    """A line for the card."""
    sizes, most = " and ".join(map(str, BATCHES)), f"at most {difference:.1e} of the largest score in {by}"
    return f"scores of batches of {sizes} differ from the model's by {most} (allowed: {TOLERANCE[precision]:.0e})"
