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
    from pipeline.config import Config
    from pipeline.models.common.base import VisionModel
    from pipeline.models.weights.exported import Description

Facts = dict[str, str]  # what a format says of an export, for the card: name -> text


@dataclass(frozen=True)
class Training:
    """What is known of a model's training; None or empty: not recorded.

    Attributes:
        run: name of the run's folder.
        samples: images seen.
        data: name of the folder of shards, number of images, fingerprint.
        world_size: processes.
        zero_stage: of ZeRO.
        results: rows of evaluations of these very weights: ``top1`` and ``top5`` in percent, ``correct1``, ``correct5``,
            ``count``, ``loss``.
        versions: package -> version, of the run's last start.
        config: the whole config as it was trained with.
    """

    run: str | None = None
    samples: int | None = None
    data: dict[str, Any] = field(default_factory=dict)
    world_size: int | None = None
    zero_stage: int | None = None
    results: list[dict[str, Any]] = field(default_factory=list)
    versions: dict[str, str] = field(default_factory=dict)
    config: dict[str, Any] = field(default_factory=dict)


def to_json(training: Training) -> str:
    """What an exported safetensors file keeps of the training, for those who export it again."""
    return json.dumps(asdict(training))


def from_json(text: str, source: str) -> Training:
    """The reverse of :func:`to_json`; fields of later versions are ignored.

    Raises:
        UserError: it is damaged; the message names ``source``.
    """
    from pydantic import TypeAdapter, ValidationError  # imported late: the command's help does without

    try:
        return TypeAdapter(Training).validate_json(text)
    except ValidationError as error:
        first = error.errors()[0]
        problem = ": ".join([".".join(map(str, first["loc"])) or "training", first["msg"]])
        raise UserError(f"{source} has a damaged record of its training ({problem})", "export it again") from None


@dataclass(frozen=True)
class Subject:
    """A trained model.

    Attributes:
        model: in eval mode on the CPU, in float32; (B, 3, S, S) -> (B, classes).
        description: of its weights, under our names.
        config: of the training; of an exported file no more than its description says.
        training: what is known of it.
    """

    model: VisionModel
    description: Description
    config: Config
    training: Training


@dataclass(frozen=True)
class Options:
    """What the user chose.

    Attributes:
        precision: ``fp32`` or ``fp16``.
        names: of the tensors in a safetensors file, ``ours`` or ``authors``.
    """

    precision: str = "fp32"
    names: str = "ours"


BATCHES = (1, 3)  # neither is the one that the graph was traced with
TOLERANCE = {
    "fp32": 1e-4,
    "fp16": 2e-2,
    "timm": 1e-5,
}  # largest difference of a score / largest score; timm: the same operators


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
    sizes = " and ".join(map(str, BATCHES))
    return (
        f"scores of batches of {sizes} differ from the model's by at most {difference:.1e} of the largest score in {by} "
        f"(allowed: {TOLERANCE[precision]:.0e})"
    )


_REMEDY = "export the weights with --format safetensors, and report this"
