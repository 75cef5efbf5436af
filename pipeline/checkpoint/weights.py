"""Read the weights of a checkpoint as plain state dicts, for evaluation, fine-tuning, distillation and exports."""

from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from pipeline.checkpoint.folder import BEST, check_source, find_checkpoint, saved_steps, step_folder
from pipeline.checkpoint.manifest import CheckpointManifest, RunState, find_damage
from pipeline.checkpoint.parts import BUFFER, EMA, EMA_BUFFER, WEIGHT, SliceReader, find_gaps, read_headers
from pipeline.config import Config
from pipeline.errors import UserError
from pipeline.models.timm.names import is_timm_folder
from pipeline.models.weights.exported import SUFFIX, Description, Kind, read_pickled, read_tensors
from pipeline.models.weights.reference_names import Names
from pipeline.models.weights.timm_folder import read_folder_config, read_folder_weights
from pipeline.models.weights.transfer import check_finite


@dataclass(frozen=True)
class SavedWeights:
    """The weights of a checkpoint as state dicts."""

    state: RunState
    model: dict[str, Tensor]
    ema: dict[str, Tensor] | None
    default: Kind = "model"  # when none is asked for; see read_weights

    def choose(self, kind: Kind | None = None) -> dict[str, Tensor]:
        """The weights of ``kind``, None: the default; a ``UserError`` if the run kept no average, or they are not finite."""
        kind = kind or self.default
        chosen = self.ema if kind == "ema" else self.model
        if chosen is None:
            raise UserError("the checkpoint has no ema weights", "choose the model's, or train with train.ema_decay")
        check_finite(chosen, source=f"the checkpoint of step {self.state.step}")
        return chosen


class InitialWeights(NamedTuple):
    """Weights to initialize a fine-tuning run."""

    weights: dict[str, Tensor]  # with this project's tensor names or the authors'
    classes: list[str] | None  # class names by output index; None: unknown
    what: str  # for the log: which weights of which step


def read_weights(path: Path, step: int | str | None = None) -> SavedWeights:
    """Read and verify the weights of the checkpoint that :func:`find_checkpoint` finds.

    The default weights, for evaluation, export, fine-tuning and distillation alike, are the average if the run kept one, else
    the model's; for ``best``, those that scored best. Raises UserError: there is no such checkpoint, or it is damaged.
    """
    run_dir, found = find_checkpoint(path, step)
    folder = step_folder(run_dir, found)
    manifest = CheckpointManifest.read(folder)
    if damage := find_damage(folder, manifest.files) or find_gaps(folder, manifest):
        raise UserError(damage[0], f"take another checkpoint (present: steps {saved_steps(run_dir)}), or restore the file")
    reader = SliceReader(folder, read_headers(folder, manifest.files))

    def whole(quantity: str, shapes: dict[str, torch.Size]) -> dict[str, Tensor]:
        # Copies: a memory-mapped tensor would change with the file.
        return {name: reader.read(quantity, name, 0, shape.numel()).reshape(shape).clone() for name, shape in shapes.items()}

    shapes = {name: torch.Size(shape) for name, shape in manifest.shapes.items()}
    buffers = {name: reader.read_buffer(name).clone() for name in reader.slices(BUFFER)}
    model, ema = {**whole(WEIGHT, shapes), **buffers}, None
    if EMA in reader.quantities:
        averages = whole(EMA_BUFFER, {name: buffers[name].shape for name in reader.slices(EMA_BUFFER)})
        ema = {**whole(EMA, shapes), **buffers, **averages}
    best = manifest.state.best if step == BEST else None
    default: Kind = best["weights"] if best and best["step"] == found else "model" if ema is None else "ema"
    return SavedWeights(manifest.state, model, ema, default)


def read_initial_weights(source: Path, key: str = "train.init_from") -> InitialWeights:
    """Read the initial weights of a fine-tuning run: from a run folder, one of its checkpoints, a folder in timm's layout, or a file with
    a state dict: from ``export``, another safetensors file, or from ``torch.save``, at the top level or under ``model`` or
    ``state_dict``. ``key``: of the config, for messages. Raises UserError: it cannot be read, or holds no state dict."""
    description = classes = None
    if is_timm_folder(source):
        weights, description = read_folder_weights(source, what=f"{key} {source}")
        classes = read_folder_config(source).classes
    elif source.is_dir():
        saved = read_weights(source)
        return InitialWeights(saved.choose(), saved.state.classes, f"{saved.default} weights of step {saved.state.step}")
    elif not source.is_file():
        check_source(source, key=f"{key} ")
        raise UserError(f"{key} {source} is neither a folder nor a file", "pass a run folder or a file with weights")
    elif source.suffix == SUFFIX:
        weights, description = read_tensors(source)
        classes = description.classes if description else None
    else:
        weights = read_pickled(source, f"{key} {source}")
    what = f"{description.weights} weights of step {description.step}" if description else f"{len(weights)} tensors"
    return InitialWeights(weights, classes, what)


def describe(
    config: Config, classes: list[str], step: int, kind: Kind, names: Names, class_names: list[str] | None = None
) -> Description:
    """The metadata of an export of weights that were trained with this config."""
    return Description(
        model=config.model.name,
        num_classes=config.model.num_classes,
        image_size=config.model.image_size,
        switches=config.model.arguments,
        classes=classes,
        class_names=class_names,
        mean=list(config.data.mean),
        std=list(config.data.std),
        eval_crop=config.data.eval_crop,
        precision=config.train.precision,  # type: ignore[arg-type]  # never auto: a run's start settles it
        step=step,
        weights=kind,
        names=names,
    )
