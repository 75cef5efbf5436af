"""Checkpoints: complete or invisible.

::

    RUN/checkpoints/latest                 "step-00000040", replaced in one step
    RUN/checkpoints/step-00000040/         DeepSpeed's files: weights, optimizer, per process
    RUN/checkpoints/step-00000040/model.pt plain fp32 weights, and what they belong to: all that evaluating needs

A checkpoint is written into a hidden folder and renamed when all processes are done. Random generators are not in it:
order, augmentation and stochastic depth are functions of (seed, step).
"""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from pipeline.batchnorm import averaged_statistics, load_statistics, statistics
from pipeline.distributed import World, quiet_deepspeed
from pipeline.ema import WeightAverage
from pipeline.errors import UserError

FOLDER, LATEST, WEIGHTS = "checkpoints", "latest", "model.pt"


def latest_step(run_dir: Path) -> int | None:
    """Step of the newest complete checkpoint, or None when the run has none yet.

    Raises:
        UserError: ``latest`` names no checkpoint.
    """
    path = run_dir / FOLDER / LATEST
    if not path.is_file():
        return None
    name = path.read_text().strip()
    if not re.fullmatch(r"step-\d{8,}", name) or not (path.parent / name).is_dir():
        present = sorted(folder.name for folder in path.parent.glob("step-*"))
        raise UserError(f"{path} says {name!r}, the name of a checkpoint beside it needed: write one of {present} into it.")
    return int(name.removeprefix("step-"))


def save(
    engine, run_dir: Path, step: int, about: dict[str, Any], ema: WeightAverage | None, world: World, keep_last: int
) -> None:
    """Write a checkpoint; every process must call.

    Args:
        engine: the DeepSpeed engine, between two steps.
        run_dir: the run folder.
        step: optimizer steps done.
        about: what ``model.pt`` says of the model (config, classes, data set), plain values only.
        ema: averaged weights to save beside the model's.
        keep_last: older checkpoints beyond this many are removed.
    """
    folder = run_dir / FOLDER
    hidden, tag = folder / ".saving", f"step-{step:08d}"
    if world.is_main:
        shutil.rmtree(hidden, ignore_errors=True)
        hidden.mkdir(parents=True)
    world.barrier()
    # DeepSpeed saves rank 0's state alone unless ZeRO-3 shards the weights. So what differs between processes is gathered;
    # the averaged weights are the same everywhere, or sharded as the weights are.
    state = {
        "batchnorm": world.gather(statistics(engine.module)),
        "ema": ema.state_dict() if ema else None,
    }
    with quiet_deepspeed():
        engine.save_checkpoint(str(hidden), tag=tag, client_state=state, save_latest=False)
    with averaged_statistics(engine.module, world):
        weights = {"model": full_weights(engine.module), "step": step, **about}
        if ema:
            with ema.applied():
                weights["ema"] = full_weights(engine.module)
    if world.is_main:
        torch.save(weights, hidden / tag / WEIGHTS)
    world.barrier()
    if world.is_main:
        _publish(hidden / tag, folder, keep_last)
        shutil.rmtree(hidden, ignore_errors=True)
    world.barrier()


def load(engine, run_dir: Path, step: int, data: dict, ema: WeightAverage | None, world: World) -> None:
    """Resume from the checkpoint of a step; every process must call.

    Args:
        data: identifies the training set; must be what the run began with.

    Raises:
        UserError: another number of processes, another data set, or a damaged checkpoint.
    """
    folder, tag = run_dir / FOLDER, f"step-{step:08d}"
    about = read_weights(run_dir)
    if about["world_size"] != world.size:
        raise UserError(
            f"{folder / tag} was written by {about['world_size']} processes, but this run has {world.size}: "
            f"start {about['world_size']} processes."
        )
    if about["data"] != data:
        raise UserError(
            f"{folder / tag} was trained on another data set ({about['data']}, this one is {data}): set data.path back or "
            f"choose another output_dir."
        )
    try:
        with quiet_deepspeed():
            _, state = engine.load_checkpoint(str(folder), tag=tag)
    except Exception as error:  # DeepSpeed asserts, and unpickling damaged bytes raises anything
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise UserError(
            f"{folder / tag} is not a whole checkpoint ({reason}): write an older step's name into {folder / LATEST}."
        ) from None
    load_statistics(engine.module, state["batchnorm"][world.rank])
    if ema:
        ema.load_state_dict(state["ema"])


def read_weights(run_dir: Path) -> dict[str, Any]:
    """The newest checkpoint's ``model.pt``: ``model`` (and ``ema``) state dicts, ``step``, ``config``, ``classes``, ...

    Raises:
        UserError: no checkpoint, or a damaged file.
    """
    step = latest_step(run_dir)
    if step is None:
        raise UserError(
            f"{run_dir} holds 0 checkpoints, 1 needed (no {FOLDER}/{LATEST}): pass the output_dir of a run that has saved one."
        )
    path = run_dir / FOLDER / f"step-{step:08d}" / WEIGHTS
    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # unpickling damaged bytes raises anything
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise UserError(
            f"{path} cannot be read ({reason}): write an older step's name into {path.parent.parent / LATEST}."
        ) from None


def read_initial_weights(source: Path) -> dict[str, Tensor]:
    """The weights that fine-tuning begins with.

    Args:
        source: a run folder (its newest checkpoint; the averaged weights where it has them), or a file with a state dict.

    Raises:
        UserError: there is no such thing, or it cannot be read.
    """
    if source.is_dir():
        saved = read_weights(source)
        return saved.get("ema", saved["model"])
    if not source.is_file():
        raise UserError(f"train.init_from {source} does not exist: pass a run folder or a file with a state dict.")
    try:
        saved = torch.load(source, map_location="cpu", weights_only=True)
    except Exception as error:  # unpickling damaged bytes raises anything
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise UserError(f"train.init_from {source} cannot be read ({reason}): pass a file that torch.save wrote.") from None
    weights = saved.get("model", saved) if isinstance(saved, dict) else saved
    if not isinstance(weights, dict) or not all(isinstance(value, Tensor) for value in weights.values()):
        raise UserError(f"train.init_from {source} holds no state dict, names with tensors needed: pass another file.")
    return weights


def full_weights(model: nn.Module) -> dict[str, Tensor]:
    """The model's state dict on the CPU, gathered where ZeRO-3 has sharded it; every process must call."""
    import deepspeed

    weights = {}
    for name, parameter in model.named_parameters():
        with deepspeed.zero.GatheredParameters([parameter], enabled=hasattr(parameter, "ds_id")):
            weights[name] = parameter.detach().cpu().clone()
    for name, value in model.state_dict().items():
        if name not in weights:
            weights[name] = value.detach().cpu().clone()
    return weights


def _publish(written: Path, folder: Path, keep_last: int) -> None:
    """Make a complete checkpoint visible, then remove what is too old."""
    target = folder / written.name
    shutil.rmtree(target, ignore_errors=True)  # of an earlier attempt at the same step, not the latest one
    os.rename(written, target)
    temporary = folder / f".{LATEST}.tmp"
    with open(temporary, "w") as file:
        file.write(target.name + "\n")
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, folder / LATEST)
    steps = sorted(old for old in folder.glob("step-*") if old.name <= target.name)  # later ones: the user went back; not ours
    for old in steps[: max(0, len(steps) - keep_last)]:
        shutil.rmtree(old)
