"""Hold what ``pipeline.evaluate`` and ``pipeline.predict`` have in common: options, and a trained model on this process's device."""

from __future__ import annotations

import argparse
import logging
from typing import TYPE_CHECKING

from pipeline.checkpoint.folder import parse_step

if TYPE_CHECKING:
    from torch import nn

    from pipeline.cluster.world import World
    from pipeline.config import Config
    from pipeline.inference.trained import Trained
    from pipeline.step.precision import Precision

SOURCES = "a run folder, one of its checkpoints, an exported file (.safetensors, .onnx), a folder in timm's layout, or an authors' file"
_WEIGHTS = "default: ema if the run kept an average, else model; for --step best, those that scored best; a file has one"


def add_model_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that say which weights to take, and how to run them."""
    add, where = parser.add_argument, "where to decode the images (default: auto, a GPU if any)"
    add("--step", type=parse_step, help="which checkpoint: a number or best (default: the newest)")
    add("--weights", choices=("model", "ema"), help=_WEIGHTS)
    exact = "default: auto, as in training, but fp32 where bf16 would be emulated"
    add("--precision", choices=("auto", "bf16", "fp32"), default="auto", help=exact)
    add("--decode", choices=("auto", "gpu", "cpu"), default="auto", help=where)
    add("--batch-size", type=int, help="images per process and forward pass (default: the run's)")


def read_asked(args: argparse.Namespace) -> tuple[Trained, Config]:
    """The trained model that ``args.checkpoint`` and the options name, and its config with their batch size and decoding.
    Raises UserError: there is no such model."""
    from pipeline.config import config_from_dict
    from pipeline.inference.trained import read_trained
    from pipeline.logs import console

    console.install()
    trained = read_trained(args.checkpoint, args.step, args.weights)
    if trained.assumed:
        warn(trained.assumed)
    config = trained.config
    if args.batch_size is not None:
        config = config_from_dict({**config.model_dump(), "eval": {"batch_size": args.batch_size}}, source="--batch-size")
    return trained, config.with_values({"data.decode": args.decode})


def warn(text: str) -> None:
    """Log a warning in one process."""
    from pipeline.cluster.environment import is_first_process

    if is_first_process():
        logging.getLogger("pipeline").warning(text)


def open_session(model: nn.Module, trained_in: str, args: argparse.Namespace) -> tuple[World, Precision]:
    """Join the other ranks and move the model, ``trained_in`` a precision, to this one's device. Collective. Returns the ranks, and the
    precision in which the model is to run on them."""
    from pipeline.cluster.rendezvous import init_world
    from pipeline.inference.trained import OnnxModel
    from pipeline.loader.loader import decoding_device
    from pipeline.step.precision import Precision, choose_evaluation_precision

    world = init_world()
    decoding_device(args.decode, world.device, "--decode")
    model.to(world.device)
    if isinstance(model, OnnxModel):
        return world, Precision(model.exported_precision, "as exported")
    return world, choose_evaluation_precision(trained_in, args.precision, world)
