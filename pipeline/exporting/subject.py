"""Hold what is exported, a trained model, its description and what is known of its training, and compare an export's scores with the
model's."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from pipeline.errors import UserError

if TYPE_CHECKING:
    from pipeline.models.common.base import VisionModel
    from pipeline.models.weights.exported import Description

Facts = dict[str, str]  # what a format says of an export, for the card: name -> text
BATCHES = (1, 3)  # neither is the one that the graph was traced with
TOLERANCE = {
    "fp32": 1e-4,
    "fp16": 2e-2,
    "timm": 1e-5,
}  # largest difference of a score / largest score; timm: the same operators
_REMEDY = "export the weights with --format safetensors, and report this"


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
    """The reverse of :meth:`Training.to_json`; fields of later versions are ignored.

    Raises:
        UserError: it is damaged; the message names ``source``.
    """
    from pydantic import TypeAdapter, ValidationError  # imported late: the command's help does without

    from pipeline.models.weights.exported import first_invalid

    try:
        return TypeAdapter(Training).validate_json(text)
    except ValidationError as error:
        problem = f"{source} has a damaged record of its training ({first_invalid(error, 'training')})"
        raise UserError(problem, "export it again") from None


@dataclass(frozen=True)
class Subject:
    """A trained model, (B, 3, S, S) -> (B, classes), in eval mode on the CPU, in float32.

    ``description.names`` are those that its tensors get in a safetensors file.
    """

    model: VisionModel
    description: Description
    training: Training


def sample_images(image_size: int, batch: int) -> Tensor:
    """(batch, 3, S, S) from a normal distribution, the same each time."""
    generator = torch.Generator().manual_seed(batch)
    return torch.randn(batch, 3, image_size, image_size, generator=generator)


def compare(subject: Subject, run: Callable[[Tensor], Tensor], precision: str, of: str) -> float:
    """Compare scores for the batch sizes of ``BATCHES``.

    Args:
        subject: the model.
        run: the export, (B, 3, S, S) float32 -> (B, classes).
        precision: of the export, or ``timm``: its tolerance is in ``TOLERANCE``.
        of: what was exported, and what ran it, for the message.

    Returns:
        The largest difference of a score, relative to the largest score of its batch.

    Raises:
        UserError: it is above the tolerance, or a score is not finite.
    """
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
            raise UserError(
                f"{of} must give the model's scores to {TOLERANCE[precision]:.0e} of the largest with {precision}, got a difference of "
                f"{difference:.1e}: nothing was written",
                "try --precision fp32" if precision == "fp16" else _REMEDY,
            )
        worst = max(worst, difference)
    return worst


def checked(difference: float, precision: str, by: str) -> str:
    """A line for the card."""
    return (
        f"scores of batches of {' and '.join(map(str, BATCHES))} differ from the model's by at most {difference:.1e} of the largest "
        f"score in {by} (allowed: {TOLERANCE[precision]:.0e})"
    )
