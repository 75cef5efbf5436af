"""Load a trained model from a run folder, one of its checkpoints, or an exported file."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from pipeline.checkpoint import read_weights
from pipeline.config import Config, config_from_dict
from pipeline.errors import UserError
from pipeline.models import create_model
from pipeline.models.common.base import VisionModel
from pipeline.models.weights.exported import SUFFIX, Kind, read_exported


@dataclass(frozen=True)
class Trained:
    """Weights and the config they were trained with."""

    config: Config
    classes: list[str]  # class names by output index
    step: int
    kind: Kind
    weights: dict[str, Tensor]

    def build_model(self, switches: Mapping[str, Any] | None = None) -> VisionModel:
        """The model with these weights, in eval mode on the CPU.

        Args:
            switches: replace those of the training; None: keep them.

        Raises:
            UserError: unknown switches.
            RuntimeError: these switches change the model's parameters.
        """
        its = self.config.model
        model = create_model(its.name, its.num_classes, its.image_size, switches=its.switches if switches is None else switches)
        model.load_state_dict(self.weights)
        return model.eval()


def read_trained(source: Path, step: int | str | None = None, kind: Kind | None = None) -> Trained:
    """Read a trained model.

    Args:
        source: a run folder, one of its checkpoints, or a file that ``python -m pipeline.checkpoint export`` wrote.
        step: which checkpoint of the run, a number or ``best``; None: the newest.
        kind: ``model`` or ``ema``; None: as in :func:`pipeline.checkpoint.read_weights`, or those of the file.

    Raises:
        UserError: there is no such model, it is damaged, or its weights are not finite.
    """
    if source.suffix != SUFFIX or source.is_dir():
        if source.is_file():
            raise UserError(
                f"{source} is neither a run folder nor a {SUFFIX} file", "pass a run's output_dir, or what export wrote"
            )
        saved = read_weights(source, step)
        config = config_from_dict(saved.state.config, source=str(source))
        return Trained(config, saved.state.classes, saved.state.step, kind or saved.default, saved.choose(kind))
    model, its = read_exported(source)
    for option, asked, found in (("--step", step, its.step), ("--weights", kind, its.weights)):
        if asked not in (None, found):
            raise UserError(f"{source} has {option} {found}, not {asked}", "leave the option out, or pass a run folder")
    tree = {
        "model": {key: getattr(its, key) for key in ("num_classes", "image_size", "switches")} | {"name": its.model},
        "data": {key: getattr(its, key) for key in ("mean", "std", "eval_crop")},
        "train": {"precision": its.precision},
    }
    return Trained(config_from_dict(tree, source=str(source)), its.classes, its.step, its.weights, model.state_dict())
