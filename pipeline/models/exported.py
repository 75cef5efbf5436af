"""Trained weights as one file that says what they are: safetensors, its description in the file's own metadata."""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from pipeline.config.sections import MAX_SIDE, Count, Deviation, Mean
from pipeline.errors import UserError
from pipeline.files import open_regular, replace_file
from pipeline.models.base import VisionModel
from pipeline.models.reference import load_reference_state_dict, reference_state_dict
from pipeline.models.registry import create_model
from pipeline.models.transfer import check_finite

SUFFIX = ".safetensors"
_DESCRIPTION = "description"  # the key of the metadata, whose values must be strings
_PER_CHANNEL = Field(min_length=3, max_length=3)


@dataclass(frozen=True)
class Description:
    """All that it takes to use exported weights: the model, what goes in and what comes out."""

    __pydantic_config__ = ConfigDict(extra="forbid")

    model: str  # for create_model, as the next three
    num_classes: int
    image_size: Annotated[int, Field(ge=1, le=MAX_SIDE)]  # pixels
    switches: dict[str, Any]
    classes: list[str]  # what each score is for
    mean: Annotated[list[Mean], _PER_CHANNEL]  # of the normalization, per RGB channel, of pixels on [0, 1]
    std: Annotated[list[Deviation], _PER_CHANNEL]
    eval_crop: Annotated[float, Field(ge=0.1, le=1)]  # the short side is resized to image_size / eval_crop, then cropped
    precision: Literal["bf16", "fp32"]  # what they were trained in
    step: Count  # of the training
    weights: Literal["model", "ema"]  # ema: their average
    names: Literal["ours", "authors"]  # authors: those of the published code


_CHECKED = TypeAdapter(Description)


def write_exported(path: Path, weights: Mapping[str, Tensor], description: Description) -> None:
    """Write weights with their description; the file is whole or not there.

    Args:
        path: ends in ``.safetensors``.
        weights: our state dict; it is renamed where the description asks for the authors' names.
        description: of these weights.

    Raises:
        UserError: the authors' code has no such model, or the weights are not finite.
        OSError: the file cannot be written.
    """
    check_finite(weights, source=f"what is to be exported to {path}")
    if description.names == "authors":
        model = _create(description)
        model.load_state_dict(weights)
        weights = reference_state_dict(model)
    # Blocks may share a fixed table, and views their memory; a safetensors file holds each tensor by itself.
    tensors = {name: value.detach().cpu().clone().contiguous() for name, value in weights.items()}
    data = save(tensors, {"format": "pt", _DESCRIPTION: json.dumps(asdict(description))})
    replace_file(path, lambda file: file.write(data))


def read_tensors(path: Path) -> tuple[dict[str, Tensor], Description | None]:
    """What is in a safetensors file: its tensors, and their description if it is one of ours.

    Raises:
        UserError: the file is missing or damaged, or so is its description.
    """
    try:
        with open(open_regular(path), "rb") as file:
            data = file.read()  # not mapped: weights would follow a file that is changed, and one that is cut kills the process
        weights = load(data)
    except FileNotFoundError:
        raise UserError(f"{path} does not exist: pass a file that `python -m pipeline.checkpoint export` wrote.") from None
    except (OSError, SafetensorError, KeyError, RuntimeError) as error:  # the last two: numbers of a type unknown to PyTorch
        raise UserError(f"{path} cannot be read ({error}): export it again.") from None
    (size,) = struct.unpack("<Q", data[:8])
    metadata = json.loads(data[8 : 8 + size]).get("__metadata__") or {}
    return weights, _described(path, metadata[_DESCRIPTION]) if _DESCRIPTION in metadata else None


def read_exported(path: Path) -> tuple[VisionModel, Description]:
    """The model that was exported to a file, whichever names it has there, in eval mode on the CPU.

    Raises:
        UserError: the file is missing, damaged or of another kind, or its weights are not finite.
    """
    weights, description = read_tensors(path)
    if description is None:
        raise UserError(
            f"{path} has no description of its model, one that `python -m pipeline.checkpoint export` writes needed: build the "
            f"model with create_model and load the file's {len(weights)} tensors with load_state_dict."
        )
    check_finite(weights, source=str(path))
    try:
        model = _create(description)
        if description.names == "authors":
            load_reference_state_dict(model, weights)
        else:
            model.load_state_dict(weights)
    except UserError as error:
        raise UserError(f"{path} does not fit what it says of its model ({error}): export it again.") from None
    except RuntimeError as error:  # how PyTorch tells which names and shapes differ: the first line says of what
        raise UserError(
            f"{path} does not fit {description.model} ({str(error).splitlines()[-1].strip()}): export it again."
        ) from None
    return model.eval(), description


def _described(path: Path, text: str) -> Description:
    try:
        description = _CHECKED.validate_json(text, strict=True)
    except ValidationError as error:
        first = error.errors()[0]
        problem = ": ".join([".".join(map(str, first["loc"])) or "the whole", first["msg"]])
    else:
        if description.num_classes == len(description.classes):
            return description
        problem = f"num_classes is {description.num_classes}, but classes has {len(description.classes)} names"
    raise UserError(f"{path} has a damaged description of its model ({problem}): export it again.")


def load_exported(path: Path | str) -> VisionModel:
    """Build the model that was exported to a file, with its weights, in eval mode on the CPU.

    Raises:
        UserError: as :func:`read_exported`.
    """
    model, _ = read_exported(Path(path))
    return model


def _create(description: Description) -> VisionModel:
    return create_model(description.model, description.num_classes, description.image_size, switches=description.switches)
