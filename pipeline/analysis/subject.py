"""The model that is analysed: a run folder, an exported file, or a model's name with fresh weights."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from pipeline.checkpoint.trained import read_trained
from pipeline.config import Config, config_from_dict
from pipeline.errors import UserError
from pipeline.models import create_model, list_models, model_entry
from pipeline.models.common.base import VisionModel
from pipeline.models.timm_names import is_timm


@dataclass(frozen=True)
class Subject:
    """A model in eval mode, on the CPU, and where it is from.

    Attributes:
        config: of its training; for fresh weights, the defaults with this model.
        classes: class names by output index; empty for fresh weights, which fit any.
        origin: ``checkpoint`` as given, ``step`` (None: fresh), ``weights`` (``model``, ``ema`` or ``fresh``). JSON.
    """

    model: VisionModel
    config: Config
    classes: list[str]
    origin: dict[str, object]


def read_subject(source: str, step: int | str | None = None, seed: int = 0) -> Subject:
    """Read a run folder, one of its checkpoints or an exported file, or build the model of that name with fresh weights.

    Raises:
        UserError: neither a path nor a model's name; damaged; weights not finite; a step of fresh weights.
    """
    path = Path(source)
    if path.exists() or "/" in source or path.suffix:
        trained = read_trained(path, step)
        origin = {"checkpoint": source, "step": trained.step, "weights": trained.kind}
        return Subject(trained.build_model(), trained.config, trained.classes, origin)
    if not is_timm(source) and source not in list_models():
        raise UserError(
            f"{source} is neither a file or folder nor a model",
            f"pass a run folder, an exported file, or one of {', '.join(list_models())}",
        )
    if step is not None:
        raise UserError(f"--step is {step}, but {source} is a model with fresh weights", "leave it out, or pass a run folder")
    its = model_entry(source)
    tree = {"model": {"name": source, "image_size": its.image_size, "num_classes": its.num_classes}}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = create_model(source, its.num_classes, its.image_size).eval()
    origin = {"checkpoint": source, "step": None, "weights": "fresh"}
    return Subject(model, config_from_dict(tree, source=source), [], origin)
