"""Capture a small model's step, after an attempt that fails: a program for the pretended GPU, which prints a line of JSON.

    python tests/pretended_gpu/run.py -m pretended_gpu.captured

This process is rank 0 of eight. Nothing is compiled.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from pipeline.config import config_from_dict
from pipeline.models.common.vit import ViTLayout
from pipeline.models.deit import DeiT
from pipeline.optim.averages import StepStatistics, WeightAverage
from pipeline.optim.engine import build_engine
from pipeline.step.captured_step import what_hinders
from pipeline.step.loss import Objective, label_loss
from pipeline.step.train_step import TrainState, random_batch, train_step
from pipeline.training.compiling import GRAPHS, Compilation
from pretended_gpu.counts import Counts, counted
from pretended_gpu.steps import pretended_world


def main() -> None:
    world = pretended_world(8)
    train = {"micro_batch_size": 4, "global_batch_size": 4 * world.size, "precision": "bf16", "zero_stage": 0}
    settings = config_from_dict({"model": {"image_size": 32, "num_classes": 16}, "train": train}, source="the program")
    model = DeiT(ViTLayout(heads=4, width=32, depth=2, mlp_ratio=2), num_classes=16, image_size=32, drop_path=0.1)
    engine: Any = build_engine(model, settings, world)
    state = TrainState(engine, StepStatistics(model, world), WeightAverage(engine, 0.9), Objective(label_loss(settings.train)))
    batch = random_batch(4, settings.model, world.device)
    engine.train()
    engine.decide_on_the_device(0)

    def step() -> None:
        assert train_step(state, lambda: batch, 0.001, seed=0).taken

    def capture() -> str:
        compilation = Compilation(GRAPHS, "bf16", Path(), world, model, state.objective, captures=True)
        compilation.capture(state, batch, seed=0)
        return compilation.kind

    def counts_of(action: Callable[[], Any]) -> Counts:
        with counted() as counts:
            action()
        return counts

    found: dict[str, Any] = {"hinders": what_hinders(state)}
    step()
    found["plain"] = counts_of(step)
    hook = model.register_forward_hook(lambda *_: torch.cuda.synchronize())
    found["failed"] = capture()
    hook.remove()
    found["on the default stream"] = torch.cuda.current_stream() == torch.cuda.default_stream()
    step()
    found["after a failure"] = counts_of(step)
    found["capture"] = counts_of(lambda: found.update(captured=capture()))
    step()
    found["replay"] = counts_of(step)
    print(json.dumps(found), flush=True)
    os._exit(0)  # NCCL's threads wait for ranks that are not there


if __name__ == "__main__":
    main()
