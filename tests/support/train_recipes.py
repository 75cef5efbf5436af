"""Train configs of ``configs/`` for two steps on small shards, one after the other in one process.

    python tests/support/train_recipes.py SHARDS OUT CONFIG [CONFIG ...]

Everything that makes a recipe what it is stays: model, switches, augmentation, optimizer, precision, ZeRO stage. Only sizes
change. The run folder of configs/a/b.yaml is OUT/a/b; its metrics stay, its checkpoint only if another config needs it.
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

CONFIGS = Path(__file__).parents[2] / "configs"
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


def small(path: Path, shards: Path, out: Path) -> Config:
    """The config with sizes for seconds on a CPU."""
    config = load_config(path)
    overrides = [
        f"output_dir={run_folder(path, out)}",
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
    overrides += [f"train.{key}={run_folder(needed, out)}" for key, needed in runs_needed(path).items()]
    return load_config(path, overrides)


def run_folder(path: Path, out: Path) -> Path:
    """Where a config's run lies below ``out``."""
    return out / path.relative_to(CONFIGS).with_suffix("")


def runs_needed(path: Path) -> dict[str, Path]:
    """``init_from`` and ``teacher``, where a config has them, with the configs whose runs they are."""
    train = load_config(path).train
    named = {"init_from": train.init_from, "teacher": train.teacher}
    return {key: CONFIGS / f"{Path(folder).name}.yaml" for key, folder in named.items() if folder}


def train_two_steps(path: Path, shards: Path, out: Path, world: World, keep_checkpoint: bool) -> None:
    """One config, after those whose runs it needs."""
    if run_folder(path, out).exists():
        return
    for needed in runs_needed(path).values():
        train_two_steps(needed, shards, out, world, keep_checkpoint=True)
    print(f"== {path.relative_to(CONFIGS)}", flush=True)
    train(small(path, shards, out), world)
    if not keep_checkpoint:
        shutil.rmtree(run_folder(path, out) / "checkpoints")


def main() -> None:
    shards, out, *paths = map(Path, sys.argv[1:])
    kept = {needed for path in paths for needed in runs_needed(path).values()}
    world = init_world()
    failed = []
    for path in paths:
        try:
            train_two_steps(path, shards, out, world, keep_checkpoint=path in kept)
        except Exception:  # whatever it is, the others are still to be tried
            traceback.print_exc()
            failed.append(str(path.relative_to(CONFIGS)))
    disconnect()
    if failed:
        sys.exit(f"{len(failed)} of {len(paths)} configs failed: {' '.join(failed)}")


if __name__ == "__main__":
    main()
