"""Plain weights out of a checkpoint, for all that is not a training."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor

from pipeline.checkpoint.folder import Manifest, RunState, find_step, saved_steps, step_folder
from pipeline.checkpoint.held import EMA, WEIGHT
from pipeline.checkpoint.parts import BUFFER, Parts
from pipeline.checkpoint.whole import Seen, find_all_damage
from pipeline.errors import UserError


@dataclass(frozen=True)
class SavedWeights:
    """The weights of a checkpoint as state dicts."""

    state: RunState
    model: dict[str, Tensor]
    ema: dict[str, Tensor] | None

    def choose(self, kind: str) -> dict[str, Tensor]:
        """``model`` or ``ema``.

        Raises:
            UserError: the run kept no average.
        """
        if kind == "ema" and self.ema is None:
            raise UserError("the checkpoint has no ema weights: choose the model's, or train with train.ema_decay.")
        return self.ema if kind == "ema" else self.model


def read_weights(run_dir: Path, step: int | None = None) -> SavedWeights:
    """Read the weights of a checkpoint, compared with its checksums.

    Args:
        run_dir: a run folder.
        step: which checkpoint; None: the newest.

    Raises:
        UserError: there is no such checkpoint, or it is damaged.
    """
    folder = step_folder(run_dir, find_step(run_dir, step))
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

    return SavedWeights(manifest.state, whole(WEIGHT), whole(EMA) if parts.names(EMA) else None)


def read_initial_weights(source: Path) -> dict[str, Tensor]:
    """The weights that fine-tuning begins with.

    Args:
        source: a run folder (its newest checkpoint; the averaged weights where it has them), or a file with a state dict:
            safetensors, or what ``torch.save`` wrote.

    Raises:
        UserError: there is no such thing, or it cannot be read.
    """
    if source.is_dir():
        saved = read_weights(source)
        return saved.ema or saved.model
    if not source.is_file():
        raise UserError(f"train.init_from {source} does not exist: pass a run folder or a file with a state dict.")
    try:
        if source.suffix == ".safetensors":
            return load_file(source)
        saved = torch.load(source, map_location="cpu", weights_only=True)
    except Exception as error:  # unpickling damaged bytes raises anything
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise UserError(
            f"train.init_from {source} cannot be read ({reason}): pass a file that torch.save or safetensors wrote."
        ) from None
    weights = saved.get("model", saved) if isinstance(saved, dict) else saved
    if not isinstance(weights, dict) or not all(isinstance(value, Tensor) for value in weights.values()):
        raise UserError(f"train.init_from {source} holds no state dict, names with tensors needed: pass another file.")
    return weights
