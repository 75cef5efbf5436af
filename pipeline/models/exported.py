"""Trained weights as one file that says what they are: safetensors, its description in the file's own metadata."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from pipeline.errors import UserError
from pipeline.files import replace_file
from pipeline.models.base import VisionModel
from pipeline.models.reference import load_reference_state_dict, reference_state_dict
from pipeline.models.registry import create_model

SUFFIX = ".safetensors"
_DESCRIPTION = "description"  # the key of the metadata, whose values must be strings


@dataclass(frozen=True)
class Description:
    """All that it takes to use exported weights: the model, what goes in and what comes out."""

    model: str  # for create_model, as the next three
    num_classes: int
    image_size: int  # pixels
    switches: dict[str, Any]
    classes: list[str]  # what each score is for
    mean: list[float]  # of the normalization, per RGB channel, of pixels on [0, 1]
    std: list[float]
    eval_crop: float  # the short side is resized to image_size / eval_crop before the centre is cropped
    precision: str  # "bf16" or "fp32": what they were trained in
    step: int  # of the training
    weights: str  # "model", or "ema": their average
    names: str  # "ours", or "authors": those of the published code


def write_exported(path: Path, weights: Mapping[str, Tensor], description: Description) -> None:
    """Write weights with their description; the file is whole or not there.

    Args:
        path: ends in ``.safetensors``.
        weights: our state dict; it is renamed where the description asks for the authors' names.
        description: of these weights.

    Raises:
        UserError: the authors' code has no such model.
        OSError: the file cannot be written.
    """
    if description.names == "authors":
        model = _create(description)
        model.load_state_dict(weights)
        weights = reference_state_dict(model)
    # Blocks may share a fixed table, and views their memory; a safetensors file holds each tensor by itself.
    tensors = {name: value.detach().cpu().clone().contiguous() for name, value in weights.items()}
    data = save(tensors, {"format": "pt", _DESCRIPTION: json.dumps(asdict(description))})
    replace_file(path, lambda file: file.write(data))


def read_exported(path: Path) -> tuple[VisionModel, Description]:
    """The model that was exported to a file, whichever names it has there, in eval mode on the CPU.

    Raises:
        UserError: the file is missing, damaged or of another kind.
    """
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            weights = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a dict
    except FileNotFoundError:
        raise UserError(f"{path} does not exist: pass a file that `python -m pipeline.checkpoint export` wrote.") from None
    except (OSError, SafetensorError) as error:
        raise UserError(f"{path} cannot be read ({error}): export it again.") from None
    try:
        description = Description(**json.loads(metadata[_DESCRIPTION]))
    except (KeyError, TypeError, ValueError):
        raise UserError(
            f"{path} has no description of its model, one that `python -m pipeline.checkpoint export` writes needed: build the "
            f"model with create_model and load the file's {len(weights)} tensors with load_state_dict."
        ) from None
    model = _create(description)
    try:
        if description.names == "authors":
            load_reference_state_dict(model, weights)
        else:
            model.load_state_dict(weights)
    except RuntimeError as error:  # how PyTorch tells which names and shapes differ: the first line says of what
        raise UserError(
            f"{path} does not fit {description.model} ({str(error).splitlines()[-1].strip()}): export it again."
        ) from None
    return model.eval(), description


def load_exported(path: Path | str) -> VisionModel:
    """Build the model that was exported to a file, with its weights, in eval mode on the CPU.

    Raises:
        UserError: as :func:`read_exported`.
    """
    model, _ = read_exported(Path(path))
    return model


def _create(description: Description) -> VisionModel:
    return create_model(description.model, description.num_classes, description.image_size, switches=description.switches)
