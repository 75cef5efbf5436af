"""Train configs of ``configs/`` for two steps on small shards, one after the other in one process.

    python tests/support/train_recipes.py SHARDS OUT CONFIG [CONFIG ...]

Everything that makes a recipe what it is stays: model, switches, augmentation, optimizer, precision, ZeRO stage. Only sizes
change. The run folder of the config a/b is OUT/a/b; its metrics stay, its checkpoint only if another config needs it.
"""

from __future__ import annotations

import shutil
import sys
import traceback
from pathlib import Path

import torch

from pipeline.cluster.rendezvous import disconnect, init_world
from pipeline.cluster.world import World
from pipeline.config import Config, load_config
from pipeline.errors import UserError
from pipeline.models import create_model, model_entry
from pipeline.training.loop import train

BATCH = 8
CLASSES = 10


def smallest_size(config: Config) -> int:
    """Image side: 16 where the paper's is 32, else the smallest of 32, 56 and 224 pixels that model and switches accept."""
    if model_entry(config.model.name).image_size == 32:
        return 16
    for size in (32, 56, 224):
        try:
            with torch.device("meta"):
                create_model(config.model.name, CLASSES, size, switches=config.model.switches)
        except UserError:
            continue
        return size
    raise AssertionError(f"{config.output_dir}: no image size suits {config.model.name} with {config.model.switches}")


def small(name: str, shards: Path, out: Path) -> Config:
    """The config with sizes for seconds on a CPU."""
    config = load_config(name)
    overrides = [
        f"output_dir={out / name}",
        f"data.path={shards}",
        "data.num_threads=1",
        f"model.image_size={smallest_size(config)}",
        f"model.num_classes={CLASSES}",
        "train.max_steps=2",
        f"train.global_batch_size={BATCH}",
        f"train.micro_batch_size={BATCH}",
        "eval.every_epochs=null",
        f"eval.batch_size={BATCH}",
        "checkpoint.every_steps=null",
    ]
    overrides += [f"train.{key}={out / needed}" for key, needed in runs_needed(name).items()]
    return load_config(name, overrides)


def runs_needed(name: str) -> dict[str, str]:
    """``init_from`` and ``teacher``, where a config has them, with the configs whose runs they are."""
    train = load_config(name).train
    named = {"init_from": train.init_from, "teacher": train.teacher}
    return {key: Path(folder).name for key, folder in named.items() if folder}


def train_two_steps(name: str, shards: Path, out: Path, world: World, keep_checkpoint: bool) -> None:
    """One config, after those whose runs it needs."""
    if (out / name).exists():
        return
    for needed in runs_needed(name).values():
        train_two_steps(needed, shards, out, world, keep_checkpoint=True)
    print(f"== {name}", flush=True)
    train(small(name, shards, out), world)
    if not keep_checkpoint:
        shutil.rmtree(out / name / "checkpoints")


def main() -> None:
    shards, out, names = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3:]
    kept = {needed for name in names for needed in runs_needed(name).values()}
    world = init_world()
    failed = []
    for name in names:
        try:
            train_two_steps(name, shards, out, world, keep_checkpoint=name in kept)
        except Exception:  # whatever it is, the others are still to be tried
            traceback.print_exc()
            failed.append(name)
    disconnect()
    if failed:
        sys.exit(f"{len(failed)} of {len(names)} configs failed: {' '.join(failed)}")


if __name__ == "__main__":
    main()
