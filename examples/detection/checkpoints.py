"""Save and load checkpoints of a detection run: weights, AdamW's moments and the step, complete or invisible.

::

    RUN/checkpoints/step-00001000.safetensors    tensors, under model/NAME and optim/INDEX/NAME
    RUN/checkpoints/step-00001000.json           written last: size and checksum of the tensors, step, config, data

All ranks hold the same, so rank 0 writes one file and every rank reads it; any number of processes resumes from it.
"""

from __future__ import annotations

import json
import logging
import re
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load, save
from torch import nn
from xxhash import xxh3_128_hexdigest

from examples.detection.config import DetectionConfig, is_free
from pipeline.config import flatten
from pipeline.errors import UserError
from pipeline.files import remove_leftovers, replace_file, replace_text, write_error

FOLDER = "checkpoints"
_log = logging.getLogger("pipeline.detection")  # whose lines pipeline.logs.console shows


@dataclass(frozen=True)
class Manifest:
    """What is known of a checkpoint without reading its tensors."""

    step: int
    size: int  # bytes of the file of tensors
    checksum: str  # XXH3-128 of it
    config: dict[str, Any]  # dotted key -> value
    data: str  # SHA-256 of the training annotations


def save_checkpoint(config: DetectionConfig, step: int, data: str, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Write a checkpoint, then remove those beyond ``checkpoint.keep_last``. On rank 0.

    Raises:
        UserError: it cannot be written.
    """
    tensors = {f"model/{name}": value for name, value in model.state_dict().items()}
    for index, moments in optimizer.state_dict()["state"].items():
        tensors.update({f"optim/{index}/{name}": value for name, value in moments.items()})
    content = save({name: value.detach().cpu().contiguous() for name, value in tensors.items()})
    folder = Path(config.output_dir) / FOLDER
    path = _tensors(folder, step)
    manifest = Manifest(step, len(content), xxh3_128_hexdigest(content), flatten(config), data)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for file in (path, _manifest(folder, step)):
            remove_leftovers(file)
        replace_file(path, lambda file: file.write(content))
        replace_text(_manifest(folder, step), json.dumps(asdict(manifest)) + "\n")
        for old in sorted(_steps(folder))[: -config.checkpoint.keep_last]:
            _manifest(folder, old).unlink()  # first, so that no checkpoint is seen without its tensors
            _tensors(folder, old).unlink(missing_ok=True)
    except OSError as error:
        raise write_error(path, error) from None


def newest_checkpoint(run: Path) -> Manifest | None:
    """The newest checkpoint that is intact; damaged ones are named and set aside. On rank 0."""
    folder = run / FOLDER
    for step in sorted(_steps(folder), reverse=True):
        try:
            manifest = Manifest(**json.loads(_manifest(folder, step).read_text()))
            content = _tensors(folder, step).read_bytes()
            if (len(content), xxh3_128_hexdigest(content)) == (manifest.size, manifest.checksum):
                return manifest
            reason = "its checksum differs"
        except (OSError, ValueError, TypeError) as error:
            reason = str(error)
        aside = _manifest(folder, step).with_suffix(".damaged")
        _manifest(folder, step).replace(aside)
        _log.warning(f"{_tensors(folder, step)} is damaged ({reason}): set aside as {aside.name}, the one before is taken.")
    return None


def load_checkpoint(run: Path, step: int, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Load a checkpoint that :func:`newest_checkpoint` has verified. On every rank.

    Raises:
        UserError: its tensors are not those of the model.
    """
    path = _tensors(run / FOLDER, step)
    tensors = load(path.read_bytes())
    weights: dict[str, torch.Tensor] = {}
    moments: dict[int, dict[str, torch.Tensor]] = {}
    for name, value in tensors.items():
        kind, _, rest = name.partition("/")
        if kind == "model":
            weights[rest] = value
        else:
            index, _, moment = rest.partition("/")
            moments.setdefault(int(index), {})[moment] = value
    try:
        model.load_state_dict(weights)
    except RuntimeError as error:
        reason = str(error).splitlines()[-1].strip()
        raise UserError(
            f"{path} does not fit the model ({reason})", "set its keys back, or choose another output_dir"
        ) from None
    optimizer.load_state_dict({**optimizer.state_dict(), "state": moments})


def check_same_run(config: DetectionConfig, data: str, begun: Manifest) -> None:
    """Check that a run continues with its config and its data.

    Raises:
        UserError: a key differs that determines the weights, or the training annotations do.
    """
    now = json.loads(json.dumps(flatten(config)))
    changed = [key for key, value in now.items() if not is_free(key) and begun.config.get(key) != value]
    if changed:
        first = changed[0]
        more = f" and {len(changed) - 1} more keys" if len(changed) > 1 else ""
        raise UserError(
            f"{config.output_dir} was started with {first}={begun.config.get(first)}, got {now[first]}{more}",
            "set it back, or choose another output_dir",
        )
    if begun.data != data:
        raise UserError(
            f"{config.output_dir} was started with other annotations than {config.data.train_annotations}",
            "set data.train_annotations back, or choose another output_dir",
        )


def _steps(folder: Path) -> list[int]:
    found = (re.fullmatch(r"step-([0-9]{8,})\.json", path.name) for path in folder.glob("step-*.json"))
    return [int(match[1]) for match in found if match]


def _tensors(folder: Path, step: int) -> Path:
    return folder / f"step-{step:08d}.safetensors"


def _manifest(folder: Path, step: int) -> Path:
    return folder / f"step-{step:08d}.json"
