"""Checkpoints of a few numbers, written without a training."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from pipeline.checkpoint.folder import step_folder
from pipeline.checkpoint.manifest import MANIFEST, CheckpointManifest, OptimizerState, RunState
from pipeline.checkpoint.parts import slice_key, write_part
from pipeline.config import Config

STATE = RunState(
    step=4,
    samples=64,
    skipped_steps=0,
    config=Config().model_dump(mode="json"),
    config_hash="0" * 64,
    classes=["a", "b"],
    data={"samples": 100, "fingerprint": "f"},
    world_size=1,
    zero_stage=1,
    last_step=10,
)


def save(
    folder: Path,
    parts: list[dict[str, Tensor]],
    shapes: dict[str, list[int]],
    step: int = 4,
    optimizer_state: Sequence[OptimizerState] = (),
) -> CheckpointManifest:
    """A checkpoint of given parts."""
    folder.mkdir(parents=True)
    records = [write_part(folder / f"part-{i:05d}.safetensors", tensors) for i, tensors in enumerate(parts)]
    manifest = CheckpointManifest(replace(STATE, step=step), shapes, records, list(optimizer_state))
    (folder / MANIFEST).write_text(manifest.to_text())
    return manifest


def save_small(run: Path, step: int, value: float = 0.0) -> Path:
    """A checkpoint with one parameter, under its name in a run folder."""
    folder = step_folder(run, step)
    save(folder, [{slice_key("weight", "w", 0): torch.full((3,), value)}], {"w": [3]}, step)
    return folder


def retaining(step: int, keep_last: int, best: int | None = None, every: int | None = None) -> RunState:
    """The state of a run that keeps so many checkpoints, its best one and multiples of a step."""
    config = {**STATE.config, "checkpoint": {"keep_last": keep_last, "keep_best": True, "keep_every_steps": every}}
    found = None if best is None else {"top1": 1.0, "step": best, "weights": "model"}
    return replace(STATE, step=step, config=config, best=found)


def save_state(run: Path, step: int, last_step: int, **facts: object) -> Path:
    """A checkpoint with a state and no weights, under its name in a run folder."""
    folder = step_folder(run, step)
    folder.mkdir(parents=True)
    state = replace(STATE, step=step, last_step=last_step, **facts)  # type: ignore[arg-type]
    (folder / MANIFEST).write_text(CheckpointManifest(state, {}, [], []).to_text())
    return folder
