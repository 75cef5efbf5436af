"""The model of a run, and what can be known of it before it is built."""

from __future__ import annotations

from pathlib import Path

import torch

from pipeline import checkpoint
from pipeline.config import AUTO, Config, accumulation_steps
from pipeline.config.accumulation import fitting_micro_batches
from pipeline.distributed.world import World
from pipeline.logs import console
from pipeline.models import load_pretrained, model_of
from pipeline.models.common.base import VisionModel
from pipeline.optim.build import parameter_groups
from pipeline.run.compiling import choose_compilation


def check_alone(config: Config, world: World) -> None:
    """Check what every rank can check by itself, in moments: the batch sizes, the model's switches and image size, whether the optimizer suits it.

    Raises:
        UserError: the same on every rank.
    """
    if config.train.micro_batch_size == AUTO:
        fitting_micro_batches(config.train, world.size, config.augment.unit)
    else:
        accumulation_steps(config.train, world.size, config.augment.unit)
    choose_compilation(config, world)
    with torch.device("meta"):  # costs no memory
        parameter_groups(build_model(config, world, [], fresh=False), config.optim)


def build_model(config: Config, world: World, classes: list[str], fresh: bool) -> VisionModel:
    """The run's model with its first weights: from the seed, or ``train.init_from`` (not when a checkpoint follows).

    Args:
        classes: of the training set, by index.
        fresh: no checkpoint follows.

    Raises:
        UserError: ``train.init_from`` cannot be read or does not fit.
    """
    torch.manual_seed(config.seed)
    model = model_of(config)
    if config.train.init_from and fresh:
        source = f"train.init_from {config.train.init_from}"
        initial = checkpoint.read_initial_weights(Path(config.train.init_from))
        said = load_pretrained(model, initial.weights, source, initial.classes, classes)
        if world.is_main:
            for sentence in (f"{initial.what} of {config.train.init_from}", *said):
                console.say(f"init_from: {sentence}")
    return model
