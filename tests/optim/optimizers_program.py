"""A program for ``test_optimizers.py``: each rank trains a small DeiT with every optimizer at every ZeRO stage.

All ranks see the same images, so that the mean of their gradients is that of one, and what differs is the optimizer.

``optimizers_program FOLDER``: runs ``FOLDER/NAME-PROCESSES-STAGE`` of six steps with checkpoints after three and six, and ``...-resumed``,
which goes on from the third step of the run of two processes with ZeRO 1 (start that one first).
"""

from __future__ import annotations

import shutil
import sys
from dataclasses import replace
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F

from pipeline.checkpoint.folder import step_folder
from pipeline.checkpoint.loading import load, newest_intact
from pipeline.checkpoint.saver import Saver
from pipeline.cluster.agreement import Agreement
from pipeline.cluster.rendezvous import disconnect, init_world
from pipeline.cluster.world import World
from pipeline.config import Config, config_from_dict
from pipeline.models.common.vit import ViTLayout
from pipeline.models.deit import DeiT
from pipeline.optim.engine import Engine, build_engine, optimizer_step, set_learning_rate
from support.checkpoints import STATE

OPTIMIZERS = {  # name -> config
    "adamw": {"layer_decay": 0.6, "clip_grad_norm": 1.0},
    "lamb": {"name": "lamb", "clip_grad_norm": 1.0},
    "muon": {"name": "muon", "layer_decay": 0.6},
    "sgd": {"name": "sgd", "momentum": 0.9, "layer_decay": 0.6},
    "nadam": {"name": "torch.optim:NAdam", "layer_decay": 0.6},
}
STAGES = {  # by number of processes, those of two first, and of those the one that the others resume
    2: (1, 0, 2, 3),
    1: (0,),
    3: (2, 3),  # slices of unequal length; stage 1 has those of stage 2, stage 0 has none
}
BATCH, HALF = 6, 3
LR = 0.02


def small_model() -> DeiT:
    """Two blocks whose sizes no number of ranks divides."""
    torch.manual_seed(0)
    return DeiT(ViTLayout(heads=3, width=15, depth=2, mlp_ratio=2), num_classes=4, image_size=32)


def with_convolutions(model: DeiT) -> DeiT:
    """The model with two convolutions before its patches, the second one a matrix for Muon."""
    model.patch_embedding = nn.Sequential(nn.Conv2d(3, 7, 3, padding=1), nn.Conv2d(7, 3, 3, padding=1), model.patch_embedding)
    return model


def small_config(optimizer: str, stage: int, world_size: int) -> Config:
    train = {"global_batch_size": BATCH * world_size, "micro_batch_size": BATCH, "precision": "fp32", "zero_stage": stage}
    optim = {"weight_decay": 0.1, **OPTIMIZERS[optimizer]}
    return config_from_dict({"train": train, "optim": optim, "augment": {"mixup": 0, "cutmix": 0}}, source="the test")


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Images (BATCH, 3, 32, 32) and labels (BATCH,) of a step."""
    generator = torch.Generator().manual_seed(step)
    return torch.randn(BATCH, 3, 32, 32, generator=generator), torch.randint(0, 4, (BATCH,), generator=generator)


def steps(engine: Engine, first: int) -> None:
    """Take ``HALF`` steps."""
    for step in range(first, first + HALF):
        set_learning_rate(engine, LR)
        images, labels = batch(step)
        engine.backward(F.cross_entropy(engine(images), labels))
        optimizer_step(engine)


def _begun(folder: Path, name: str, world: World) -> Path:
    """A run folder with the third step of two processes with ZeRO 1 alone."""
    begun, written = folder / f"{name}-begun", folder / f"{name}-2-1"
    if world.is_main and not begun.exists() and written.exists():
        shutil.copytree(step_folder(written, HALF), step_folder(begun, HALF))
    world.barrier()
    return begun


def main() -> int:
    world, folder = init_world(timeout=50), Path(sys.argv[1])
    for name in OPTIMIZERS:
        for stage in STAGES[world.size]:
            config = small_config(name, stage, world.size)
            engine = build_engine(with_convolutions(small_model()), config, world)
            run = folder / f"{name}-{world.size}-{stage}"
            saver = Saver(run, world, config.checkpoint, Agreement(50))
            for first in (0, HALF):
                steps(engine, first)
                saver.save(engine, None, replace(STATE, step=first + HALF))
                saver.finish()
            source = newest_intact(_begun(folder, name, world), world)
            assert source is not None and source.state.step == HALF
            load(engine, source, None, world)
            steps(engine, HALF)
            saver = Saver(Path(f"{run}-resumed"), world, config.checkpoint, Agreement(50))
            saver.save(engine, None, replace(STATE, step=2 * HALF))
            saver.finish()
    disconnect()
    return 0


if __name__ == "__main__":
    sys.exit(main())
