"""What is exported: a trained model, its description, and what is known of its training."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

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
