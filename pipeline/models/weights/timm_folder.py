"""Read a folder in timm's layout: ``config.json`` and ``model.safetensors``, as ``timm.create_model("local-dir:PATH")`` loads it.

timm itself is not needed for the architectures that are also here (:mod:`pipeline.models.weights.timm_forms`).
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, ValidationError
from torch import Tensor

from pipeline.config.values import MAX_SHAPE, MAX_SIDE, Deviation, Mean
from pipeline.errors import UserError
from pipeline.models.common.base import VisionModel
from pipeline.models.registry import list_models
from pipeline.models.weights.exported import Description, build_described, read_pickled, read_tensors
from pipeline.models.weights.timm_forms import model_of_timm
from pipeline.models.weights.transfer import check_finite

CONFIG, WEIGHTS, PICKLED = "config.json", "model.safetensors", "pytorch_model.bin"
_AGAIN = "export or download the folder again"
Side = Annotated[int, Field(ge=1, le=MAX_SIDE)]


class _Preprocessing(BaseModel):
    """timm's ``pretrained_cfg``, as far as it matters here, with timm's defaults."""

    model_config = ConfigDict(extra="ignore")

    input_size: tuple[int, Side, Side] = (3, 224, 224)
    interpolation: str = "bicubic"
    crop_pct: Annotated[float, Field(gt=0)] | None = 0.875
    crop_mode: str = "center"
    mean: Annotated[list[Mean], Field(min_length=3, max_length=3)] = [0.485, 0.456, 0.406]
    std: Annotated[list[Deviation], Field(min_length=3, max_length=3)] = [0.229, 0.224, 0.225]
    num_classes: Annotated[int, Field(ge=0, le=MAX_SHAPE)] = 1000
    label_names: list[str] | dict[int, str] | None = None


class _Config(BaseModel):
    """timm's ``config.json``. What is stated beside ``pretrained_cfg`` wins over what is in it."""

    model_config = ConfigDict(extra="ignore")

    architecture: Annotated[str, StringConstraints(pattern=r"^[\w.-]+$")]
    num_classes: Annotated[int, Field(ge=0, le=MAX_SHAPE)] | None = None
    label_names: list[str] | dict[int, str] | None = None
    model_args: dict[str, Any] = {}
    pretrained_cfg: _Preprocessing


@dataclass(frozen=True)
class FolderConfig:
    """What ``config.json`` says.

    Attributes:
        architecture: of timm's registry, without the tag of its weights.
        model_args: keyword arguments of ``timm.create_model``.
        classes: names by output; None: not stated.
        preprocessing: of its images.
    """

    architecture: str
    model_args: dict[str, Any]
    num_classes: int
    classes: list[str] | None
    preprocessing: _Preprocessing


def is_timm_folder(path: Path) -> bool:
    """Whether a folder is meant to be of timm's layout, whole or not."""
    return path.is_dir() and any((path / name).is_file() for name in (CONFIG, WEIGHTS, PICKLED))


def read_folder_config(folder: Path) -> FolderConfig:
    """Read and check ``config.json``.

    Raises:
        UserError: it is missing or damaged, or its class names are not as many as its classes.
    """
    path = folder / CONFIG
    try:
        tree = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise UserError(f"{path} does not exist, which names the architecture of {WEIGHTS}", _AGAIN) from None
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"{path} cannot be read ({str(error) or type(error).__name__})", _AGAIN) from None
    if isinstance(tree, dict) and "pretrained_cfg" not in tree:  # timm's first layout, still on the hub
        tree = {"architecture": tree.get("architecture"), "pretrained_cfg": tree}
    try:
        config = _Config.model_validate(tree)
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(str(part) for part in first["loc"]) or "the file"
        raise UserError(f"{path}: {key}: {first['msg']}", _AGAIN) from None
    its = config.pretrained_cfg
    classes = _class_names(config.label_names or its.label_names)
    count = its.num_classes if config.num_classes is None else config.num_classes
    if classes is not None and len(classes) != count:
        raise UserError(
            f"{path} has {len(classes)} label_names for {count} classes", f"write {count} names, in the order of the scores"
        )
    return FolderConfig(config.architecture.partition(".")[0], config.model_args, count, classes, its)


def read_folder_weights(folder: Path, what: str | None = None) -> tuple[dict[str, Tensor], Description | None]:
    """The tensors of a folder, and this project's description of them if they have one.

    Args:
        folder: with ``model.safetensors``, else ``pytorch_model.bin``, timm's order.
        what: the folder in messages.

    Raises:
        UserError: there are none, or they cannot be read.
    """
    if not (folder / WEIGHTS).is_file() and (folder / PICKLED).is_file():
        return read_pickled(folder / PICKLED, f"{what or folder}/{PICKLED}" if what else str(folder / PICKLED)), None
    if not (folder / WEIGHTS).is_file():
        raise UserError(f"{folder} has no {WEIGHTS}, the weights that its {CONFIG} describes", _AGAIN)
    return read_tensors(folder / WEIGHTS)


def read_timm_folder(folder: Path) -> tuple[VisionModel, Description, bool]:
    """Build the model of a folder, in eval mode on the CPU.

    Returns:
        The model; a description of it; whether the folder names its classes, else the description has their numbers.

    Raises:
        UserError: the folder is damaged, its architecture or preprocessing is none of ours, or its weights do not fit.
    """
    config, path = read_folder_config(folder), folder / CONFIG
    found = model_of_timm(config.architecture, config.model_args, str(path))
    if found is None:
        raise UserError(
            f"{path} has the architecture {config.architecture!r}, which this project does not have",
            f"pass a folder of ConViT, DeiT, ViT or gMLP, or of one of: {', '.join(list_models())}",
        )
    name, switches, has_our_names = found
    its = config.preprocessing
    channels, height, width = its.input_size
    for key, value, wanted, fits in (
        ("input_size", list(its.input_size), "a square of 3 channels", channels == 3 and height == width),
        ("crop_mode", its.crop_mode, "center", its.crop_mode == "center"),
        ("interpolation", its.interpolation, "bicubic", its.interpolation == "bicubic"),
        ("crop_pct", its.crop_pct, "from 0.1 to 1", its.crop_pct is not None and 0.1 <= its.crop_pct <= 1),
        ("num_classes", config.num_classes, "at least 1", config.num_classes > 0),
    ):
        if not fits:
            raise UserError(
                f"{path}: {key} must be {wanted} for an evaluation, got {value!r}",
                "change it if the model may be used so, or take the folder as train.init_from, which needs the weights alone",
            )
    weights, training = read_folder_weights(folder)
    check_finite(weights, source=str(folder / WEIGHTS))
    description = Description(
        model=name,
        num_classes=config.num_classes,
        image_size=height,
        switches=switches,
        classes=[str(i) for i in range(config.num_classes)] if config.classes is None else config.classes,
        mean=its.mean,
        std=its.std,
        eval_crop=float(its.crop_pct or 0),
        precision=training.precision if training else "fp32",
        step=training.step if training else 0,
        weights=training.weights if training else "model",
        names="ours" if has_our_names else "authors",
    )
    return build_described(folder, weights, description), description, config.classes is not None


def _class_names(names: list[str] | dict[int, str] | None) -> list[str] | None:
    """timm's ``label_names``: a list, or names by index, which may have gaps."""
    if isinstance(names, dict):
        return [names[index] for index in range(len(names))] if names.keys() == set(range(len(names))) else None
    return names
