"""Exact evaluation: every image counts once, on any number of processes and with any batch size.

python -m pipeline.evaluate --checkpoint RUN_DIR --data SHARD_DIR [--json FILE]
python -m pipeline.evaluate --checkpoint FILE.safetensors --data SHARD_DIR
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import yaml
from torch import Tensor
from torch.nn import functional as F
from tqdm import tqdm

from pipeline.checkpoint import read_weights
from pipeline.config import Config, config_from_dict
from pipeline.data.loader import Loader
from pipeline.data.plan import EvalPlan
from pipeline.data.shards import ShardSet
from pipeline.distributed import World, disconnect, init_world
from pipeline.errors import UserError, check_writable, run_command
from pipeline.logs.bad_sample_report import BadSampleReport
from pipeline.models import create_model
from pipeline.models.exported import SUFFIX, read_exported


def evaluation_loader(shards: ShardSet, config: Config, world: World) -> Loader:
    """Batches of this process for :func:`evaluate`, pass after pass."""
    plan = EvalPlan(shards, config.model.image_size, config.eval.batch_size, world.rank, world.size, config.data.eval_crop)
    return Loader(plan, config.data, world.device, world.cpu_threads)


@torch.no_grad()
def evaluate(
    forward: Callable[[Tensor], Tensor], loader: Loader, world: World, stop: Callable[[], bool] | None = None
) -> dict[str, float] | None:
    """One pass over the evaluation set; every process must call.

    Args:
        forward: images (B, 3, H, W) -> scores (B, classes).
        loader: from :func:`evaluation_loader`.
        world: all processes.
        stop: asked before every batch, with the same answer on all processes; if it is yes, the pass is given up.

    Returns:
        None if it was given up, else
        ``top1`` and ``top5`` in percent, ``loss`` (mean cross entropy), and the integers ``correct1``, ``correct5``
        and ``count``. Images that cannot be used are named in the log and not in the count.
    """
    totals = torch.zeros(4, dtype=torch.float64, device=world.device)  # correct1, correct5, loss, count
    batches = tqdm(
        range(len(loader.plan)), desc="evaluating", unit="batch", leave=False, disable=None if world.is_main else True
    )
    for _ in batches:
        if stop and stop():
            return None
        batch = next(loader)
        scores = forward(batch.images).float()  # (B, classes)
        best = scores.topk(min(5, scores.shape[1]), dim=1).indices  # (B, 5)
        hits = (best == batch.labels[:, None]) & batch.valid[:, None]
        losses = F.cross_entropy(scores, batch.labels, reduction="none").double() * batch.valid
        totals += torch.stack([hits[:, 0].sum(), hits.sum(), losses.sum(), batch.valid.sum()])
    BadSampleReport(world).update(loader.bad.take_unreported())
    correct1, correct5, loss, count = world.sum(totals).tolist()
    return {
        "top1": 100 * correct1 / count,
        "top5": 100 * correct5 / count,
        "loss": loss / count,
        "correct1": int(correct1),
        "correct5": int(correct5),
        "count": int(count),
    }


def check_classes(config: Config, shards: ShardSet) -> None:
    """The model's outputs must be the shards' classes.

    Raises:
        UserError: another number of classes.
    """
    if config.model.num_classes != len(shards.classes):
        raise UserError(
            f"model.num_classes is {config.model.num_classes}, but {shards.folder} has {len(shards.classes)} classes: "
            f"set model.num_classes={len(shards.classes)} or data.path to another shard set."
        )


def check_same_classes(shards: ShardSet, classes: list[str], of: str) -> None:
    """The shards' classes, in index order, must be those that the labels of ``of`` mean.

    Raises:
        UserError: they are not.
    """
    if shards.classes != classes:
        at = next(
            (i for i, pair in enumerate(zip(shards.classes, classes)) if pair[0] != pair[1]),
            min(len(shards.classes), len(classes)),
        )
        raise UserError(
            f"{shards.folder} has other classes than {of}: {len(shards.classes)} and {len(classes)}, first different at index {at}: "
            f"use shards of the same data set."
        )


@dataclass(frozen=True)
class Trained:
    """Weights, and what they were trained for."""

    config: Config
    classes: list[str]
    step: int
    kind: str  # "model" or "ema"
    weights: dict[str, Tensor]


def read_trained(source: Path, step: int | None, kind: str | None) -> Trained:
    """What is to be evaluated.

    Args:
        source: a run folder, or a file that ``python -m pipeline.checkpoint export`` wrote.
        step: which checkpoint of the run; None: the newest.
        kind: ``model`` or ``ema``; None: the model's, or those of the file.

    Raises:
        UserError: there is no such thing, or it is damaged.
    """
    if source.suffix != SUFFIX:
        saved, kind = read_weights(source, step), kind or "model"
        config = config_from_dict(saved.state.config, source=str(source))
        return Trained(config, saved.state.classes, saved.state.step, kind, saved.choose(kind))
    model, its = read_exported(source)
    for option, asked, found in (("--step", step, its.step), ("--weights", kind, its.weights)):
        if asked not in (None, found):
            raise UserError(f"{source} has {option} {found}, not {asked}: leave the option out, or pass a run folder.")
    tree = {
        "model": {key: getattr(its, key) for key in ("num_classes", "image_size", "switches")} | {"name": its.model},
        "data": {key: getattr(its, key) for key in ("mean", "std", "eval_crop")},
        "train": {"precision": its.precision},
    }
    return Trained(config_from_dict(tree, source=str(source)), its.classes, its.step, its.weights, model.state_dict())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--checkpoint", required=True, type=Path, help="a run's output_dir, or a file that pipeline.checkpoint exported"
    )
    parser.add_argument("--data", required=True, type=Path, metavar="SHARD_DIR", help="folder that holds the shards")
    parser.add_argument("--split", default="val", help="default: val")
    parser.add_argument("--weights", choices=("model", "ema"), help="default: model, or what was exported")
    parser.add_argument("--step", type=int, help="of the checkpoint (default: the newest, or what was exported)")
    parser.add_argument("--batch-size", type=int, help="images per process and forward pass (default: the run's)")
    parser.add_argument(
        "--switch",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="evaluate with another setting of the model's switches, such as ConViT's masks (may be given again)",
    )
    parser.add_argument("--json", type=Path, help="also write the result to this file")
    args = parser.parse_args()
    if args.json:
        check_writable(args.json)

    trained = read_trained(args.checkpoint, args.step, args.weights)
    config = trained.config
    if args.batch_size is not None:
        config = config_from_dict({**config.model_dump(), "eval": {"batch_size": args.batch_size}}, source="--batch-size")
    config = with_switches(config, args.switch)
    shards = ShardSet(args.data, args.split)
    check_classes(config, shards)
    check_same_classes(shards, trained.classes, of=str(args.checkpoint))

    world = init_world()
    model = create_model(config.model.name, config.model.num_classes, config.model.image_size, switches=config.model.switches)
    try:
        model.load_state_dict(trained.weights)
    except RuntimeError:  # its lists of names help nobody here
        raise UserError(
            f"{args.checkpoint} has other parameters than {config.model.name} with the switches {config.model.switches}: "
            f"leave out each --switch that adds, removes or reshapes parameters."
        ) from None
    model.to(world.device).eval()

    def forward(images: Tensor) -> Tensor:
        with torch.autocast(world.device.type, torch.bfloat16, enabled=config.train.precision == "bf16"):
            return model(images)

    loader = evaluation_loader(shards, config, world)
    result = evaluate(forward, loader, world)
    loader.close()
    if world.is_main:
        row = {
            "model": config.model.name,
            "checkpoint": str(args.checkpoint),
            "step": trained.step,
            "data": str(shards.folder),
            "split": args.split,
            "weights": trained.kind,
            "switches": config.model.switches,
            **result,
        }
        print(table(row))
        if args.json:
            args.json.write_text(json.dumps(row, indent=1) + "\n")
    disconnect()


def with_switches(config: Config, changes: list[str]) -> Config:
    """The config with some of the model's switches set otherwise.

    Args:
        changes: ``name=value``, the value in YAML.

    Raises:
        UserError: not of that form.
    """
    switches = dict(config.model.switches)
    for change in changes:
        name, equals, value = change.partition("=")
        try:
            if not equals or not name:
                raise yaml.YAMLError
            switches[name] = yaml.safe_load(value)
        except yaml.YAMLError:
            raise UserError(
                f"--switch {change!r} is not of the form name=value: write for example mask_content_layers=10."
            ) from None
    return config.model_copy(update={"model": config.model.model_copy(update={"switches": switches})})


def table(result: dict) -> str:
    """The result as aligned text, one value a line."""
    units = {"top1": " %", "top5": " %"}
    lines = [
        f"{name:<12}{value:.4f}{units.get(name, '')}" if isinstance(value, float) else f"{name:<12}{value}"
        for name, value in result.items()
    ]
    return "\n".join(lines)


def command() -> None:
    """``python -m pipeline.evaluate``."""
    run_command(main)


if __name__ == "__main__":
    command()
