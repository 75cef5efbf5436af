"""Read and write files of weights: safetensors whose metadata describe the model, and state dicts of ``torch.save``."""

import json
import re
import struct
from argparse import Namespace
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
from pydantic import ConfigDict, Field, TypeAdapter, ValidationError
from safetensors import SafetensorError, safe_open
from safetensors.torch import load, save
from torch import Tensor

from pipeline.config.values import MAX_SIDE, Count, Deviation, Mean
from pipeline.errors import UserError, first_invalid
from pipeline.files import open_regular, replace_file
from pipeline.models.common.base import VisionModel
from pipeline.models.registry import check_trusted, create_model
from pipeline.models.weights.reference_names import Names, load_fitting, load_reference_state_dict, reference_state_dict
from pipeline.models.weights.transfer import check_finite

SUFFIX = ".safetensors"
_DESCRIPTION = "description"  # key in the file's metadata, a JSON string because safetensors allows strings only
TRAINING = "training"  # another, of exports with a model card: see pipeline.exporting
Kind = Literal["model", "ema"]  # ema: the averaged weights
_PER_CHANNEL = Field(min_length=3, max_length=3)


@dataclass(frozen=True)
class Description:
    """Everything needed to use exported weights: model, input normalization and classes."""

    __pydantic_config__ = ConfigDict(extra="forbid")

    model: str  # argument of create_model, like the next three
    num_classes: int
    image_size: Annotated[int, Field(ge=1, le=MAX_SIDE)]  # pixels
    switches: dict[str, Any]
    classes: list[str]  # in the order of the scores; they identify the classes: folder names, wnids
    mean: Annotated[list[Mean], _PER_CHANNEL]  # normalization per RGB channel, of pixels in [0, 1]
    std: Annotated[list[Deviation], _PER_CHANNEL]
    eval_crop: Annotated[float, Field(ge=0.1, le=1)]  # the short side is resized to image_size / eval_crop, rounded down
    precision: Literal["bf16", "fp32"]  # of the training
    step: Count  # optimizer step of the checkpoint
    weights: Kind  # ema: exponential moving average
    names: Names  # parameter names; authors: those of the published code
    class_names: list[str] | None = None  # what to call the classes, in the same order; not written where nobody named them

    @property
    def shown(self) -> list[str]:
        """What to call the classes, in the order of the scores."""
        return self.class_names or self.classes


_CHECKED = TypeAdapter(Description)


def write_exported(path: Path, weights: Mapping[str, Tensor], description: Description, training: str = "") -> None:
    """Write weights and their description atomically. Raises UserError: the authors' code does not support the model's
    switches, or the weights are not finite; OSError: the file cannot be written.

    Args:
        weights: state dict under our names; renamed if ``description.names`` is "authors".
        training: JSON, what is known of their training; empty: nothing.
    """
    check_finite(weights, source=f"the model to be exported to {path}")
    if description.names == "authors":
        model = _create(description)
        model.load_state_dict(weights)
        weights = reference_state_dict(model)
    # Cloned: safetensors rejects tensors that share memory, such as tables shared by blocks.
    tensors = {name: value.detach().cpu().clone().contiguous() for name, value in weights.items()}
    about = {key: value for key, value in asdict(description).items() if value is not None}
    metadata = {"format": "pt", _DESCRIPTION: json.dumps(about)} | ({TRAINING: training} if training else {})
    data = save(tensors, metadata)
    replace_file(path, lambda file: file.write(data))


def read_metadata(path: Path) -> dict[str, str]:
    """The metadata of a safetensors file, without its tensors. Raises UserError: the file is missing or damaged."""
    try:
        with safe_open(path, framework="pt") as file:
            return dict(file.metadata() or {})
    except (OSError, SafetensorError) as error:
        raise UserError(f"{path} cannot be read ({error})", "export it again") from None


def read_tensors(path: Path) -> tuple[dict[str, Tensor], Description | None]:
    """Read the tensors of a safetensors file and their description, None if it has none. Raises UserError: the file is missing
    or damaged, or its description is."""
    try:
        with open(open_regular(path), "rb") as file:
            data = file.read()  # not memory-mapped: changes to the file would change the weights, truncation would raise SIGBUS
        weights = load(data)
    except FileNotFoundError:
        raise UserError(f"{path} does not exist", "pass a file that `pervit export` wrote") from None
    except (OSError, SafetensorError, KeyError, RuntimeError) as error:  # the last two: a dtype that PyTorch does not know
        raise UserError(f"{path} cannot be read ({error})", "export it again") from None
    (size,) = struct.unpack("<Q", data[:8])
    metadata = json.loads(data[8 : 8 + size]).get("__metadata__") or {}
    return weights, parse_description(path, metadata[_DESCRIPTION]) if _DESCRIPTION in metadata else None


def read_exported(path: Path) -> tuple[VisionModel, Description]:
    """Build the model of an exported file, under either naming, in eval mode on the CPU. Raises UserError: the file is missing,
    damaged or not an exported model, or its weights are not finite."""
    weights, description = read_tensors(path)
    if description is None:
        remedy = f"build the model with create_model and load the file's {len(weights)} tensors with load_state_dict"
        raise UserError(f"{path} has no description of its model, as `pervit export` writes it", remedy)
    return build_described(path, weights, description), description


def build_described(path: Path, weights: Mapping[str, Tensor], description: Description) -> VisionModel:
    """Build the model of a description with its weights, from ``path``, in eval mode on the CPU. Raises UserError: the weights
    are not those of such a model, or not finite."""
    check_finite(weights, source=str(path))
    check_trusted(description.model, path)
    try:
        model = _create(description)
        if description.names == "authors":
            load_reference_state_dict(model, weights)
        else:
            load_fitting(model, weights, f"the tensors do not fit {description.model}: ", "")
    except UserError as error:
        raise UserError(f"{path} does not match its description of the model ({error})", "export it again") from None
    return model.eval()


def parse_description(path: Path, text: str) -> Description:
    """Parse the description in the metadata of an exported file. Raises UserError: it is damaged."""
    try:
        description = _CHECKED.validate_json(text, strict=True)
    except ValidationError as error:
        problem = first_invalid(error, "description")
    else:
        lists = {"classes": description.classes, "class_names": description.shown}
        wrong = [f"{name} has {len(its)} names" for name, its in lists.items() if len(its) != description.num_classes]
        if not wrong:
            return description
        problem = f"num_classes is {description.num_classes}, but {wrong[0]}"
    raise UserError(f"{path} has a damaged description of its model ({problem})", "export it again")


def _create(description: Description) -> VisionModel:
    return create_model(description.model, description.num_classes, description.image_size, switches=description.switches)


def read_pickled(path: Path, what: str) -> dict[str, Tensor]:
    """Read a state dict of ``torch.save``, at the top level or under ``model`` or ``state_dict``; ``what`` names it in
    messages. Raises UserError: it cannot be read, names something that could run code, or holds no state dict."""
    try:
        # The papers' checkpoints hold their command line as a Namespace, which keeps what it is given and runs nothing.
        with open(open_regular(path), "rb") as file, torch.serialization.safe_globals([Namespace]):
            loaded = torch.load(file, map_location="cpu", weights_only=True)
    except Exception as error:  # unpickling damaged bytes can raise anything
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        if foreign := re.search(r"(?:Unsupported (?:global|class):|Trying to load unsupported) GLOBAL (\S+)", str(error)):
            reason = f"it also holds a {foreign[1]}, which could run code"
        remedy = "pass a file that torch.save or safetensors wrote, with a state dict alone"
        raise UserError(f"{what} cannot be read ({reason})", remedy) from None
    found = loaded.get("model", loaded.get("state_dict", loaded)) if isinstance(loaded, dict) else loaded
    if not isinstance(found, dict) or not found or not all(isinstance(value, Tensor) for value in found.values()):
        raise UserError(f"{what} must hold a state dict, names with tensors", "pass another file")
    return found
