"""Plain weights out of a checkpoint, for all that is not a training."""

from __future__ import annotations

import re
from argparse import Namespace
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from pipeline.checkpoint.folder import BEST, Manifest, RunState, find_checkpoint, saved_steps, step_folder
from pipeline.checkpoint.held import EMA, WEIGHT
from pipeline.checkpoint.parts import BUFFER, Parts
from pipeline.checkpoint.whole import Seen, find_all_damage
from pipeline.errors import UserError
from pipeline.models.exported import SUFFIX, read_tensors
from pipeline.models.transfer import check_finite


@dataclass(frozen=True)
class SavedWeights:
    """The weights of a checkpoint as state dicts."""

    state: RunState
    model: dict[str, Tensor]
    ema: dict[str, Tensor] | None
    default: str = "model"  # "model" or "ema": what is taken where nobody says which; see read_weights

    def choose(self, kind: str | None = None) -> dict[str, Tensor]:
        """``model`` or ``ema``; None: the default ones.

        Raises:
            UserError: the run kept no average, or the weights are not finite.
        """
        kind = kind or self.default
        if kind == "ema" and self.ema is None:
            raise UserError("the checkpoint has no ema weights: choose the model's, or train with train.ema_decay.")
        chosen = self.ema if kind == "ema" else self.model
        check_finite(chosen, source=f"the checkpoint of step {self.state.step}")
        return chosen


@dataclass(frozen=True)
class InitialWeights:
    """What a fine-tuning begins with."""

    weights: dict[str, Tensor]  # under our names or the authors'
    classes: list[str] | None  # what the outputs are for, by index; None: not known
    what: str  # in words: which weights of which step


def read_weights(path: Path, step: int | str | None = None) -> SavedWeights:
    """Read the weights of a checkpoint, compared with its checksums.

    Where nobody says which weights are meant, they are those of the average that the run kept, else the model's; of the best
    checkpoint, asked for as such, those that were best. That is one rule for evaluation, export, fine-tuning and distillation.

    Args:
        path: a run folder, or one of its checkpoints.
        step: which checkpoint; ``best``: the best one; None: the newest.

    Raises:
        UserError: there is no such checkpoint, or it is damaged.
    """
    run_dir, found = find_checkpoint(path, step)
    folder = step_folder(run_dir, found)
    manifest = Manifest.read(folder)
    seen = Seen.look(folder, manifest.files)
    if damage := find_all_damage(folder, manifest):
        raise UserError(f"{damage[0]}: take another checkpoint (present: steps {saved_steps(run_dir)}), or restore the file.")
    parts = Parts(folder, [record.name for record in manifest.files])
    buffers = {name: parts.read_buffer(name).clone() for name in parts.names(BUFFER)}

    def whole(quantity: str) -> dict[str, Tensor]:
        tensors = {}
        for name, shape in manifest.shapes.items():
            # A copy: what is only mapped would follow the file when that is changed later.
            tensors[name] = parts.read(quantity, name, 0, torch.Size(shape).numel()).reshape(shape).clone()
        seen.check()
        return {**tensors, **buffers}

    ema = whole(EMA) if parts.names(EMA) else None
    best = manifest.state.best if step == BEST else None
    default = best["weights"] if best and best["step"] == found else "model" if ema is None else "ema"
    return SavedWeights(manifest.state, whole(WEIGHT), ema, default)


def read_initial_weights(source: Path) -> InitialWeights:
    """The weights that fine-tuning begins with.

    Args:
        source: a run folder or one of its checkpoints, or a file with a state dict: one that ``export`` wrote, another
            safetensors file, or what ``torch.save`` wrote, where a training checkpoint has it as ``model`` or ``state_dict``.

    Raises:
        UserError: there is no such thing, it cannot be read, or it is something else.
    """
    if source.is_dir():
        saved = read_weights(source)
        return InitialWeights(saved.choose(), saved.state.classes, f"{saved.default} weights of step {saved.state.step}")
    if not source.is_file():
        raise UserError(f"train.init_from {source} does not exist: pass a run folder or a file with a state dict.")
    if source.suffix == SUFFIX:
        weights, its = read_tensors(source)
        if its is None:
            return InitialWeights(weights, None, f"{len(weights)} tensors")
        return InitialWeights(weights, its.classes, f"{its.weights} weights of step {its.step}")
    try:
        with torch.serialization.safe_globals([Namespace]):  # in the papers' checkpoints: their command line, plain values
            saved = torch.load(source, map_location="cpu", weights_only=True)
    except Exception as error:  # unpickling damaged bytes raises anything
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        if foreign := re.search(r"Unsupported global: GLOBAL (\S+)", str(error)):
            reason = f"it also holds a {foreign[1]}, which could run code"
        raise UserError(
            f"train.init_from {source} cannot be read ({reason}): pass a file that torch.save or safetensors wrote, with a state "
            f"dict alone."
        ) from None
    weights = saved.get("model", saved.get("state_dict", saved)) if isinstance(saved, dict) else saved
    if not isinstance(weights, dict) or not weights or not all(isinstance(value, Tensor) for value in weights.values()):
        raise UserError(f"train.init_from {source} holds no state dict, names with tensors needed: pass another file.")
    return InitialWeights(weights, None, f"{len(weights)} tensors")
