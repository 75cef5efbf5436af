"""Build the parts of a run: the model in its engine, its teacher, the loader."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from pipeline import checkpoint
from pipeline.checkpoint import Verified
from pipeline.cluster.world import World
from pipeline.config import AUTO, Config
from pipeline.inference.teacher import describe_teacher, load_teacher
from pipeline.loader.batches import TrainBatches
from pipeline.loader.loader import CPU, GPU, Loader
from pipeline.loader.reader import BadSamples
from pipeline.loader.trial import TrialLoader, Turns
from pipeline.logs import console, pictures
from pipeline.models import flops, load_pretrained, model_of
from pipeline.models.common.base import VisionModel
from pipeline.optim.averages import StepStatistics, WeightAverage
from pipeline.optim.build import describe
from pipeline.optim.engine import build_engine, zero_stage
from pipeline.shards.mixed_set import MixedSet
from pipeline.shards.shard_set import ShardSet
from pipeline.step.loss import Objective, label_loss
from pipeline.step.train_step import TrainState


def build_model(config: Config, world: World, classes: list[str], fresh: bool) -> VisionModel:
    """The run's model with its first weights: from the seed, or ``train.init_from``.

    Args:
        classes: of the training set, by index.
        fresh: no checkpoint follows, whose weights would replace those of ``train.init_from``.

    Raises:
        UserError: ``train.init_from`` cannot be read or does not fit.
    """
    torch.manual_seed(config.seed)
    model = model_of(config)
    if config.train.init_from and fresh:
        source = f"train.init_from {config.train.init_from}"
        initial = checkpoint.read_initial_weights(Path(config.train.init_from))
        said = load_pretrained(model, initial.weights, source, initial.classes, classes)
        for sentence in (f"{initial.what} of {config.train.init_from}", *said):
            say(world, f"init_from: {sentence}")
    return model


def build(
    config: Config, world: World, classes: list[str], verified: Verified | None
) -> tuple[TrainState, flops.FlopRow, Tensor | None]:
    """Build the model in its engine, with first weights or those of the checkpoint. Collective.

    Args:
        config: settled.
        classes: of the training set, by index.
        verified: the checkpoint that the run resumes from; None: a new run.

    Returns:
        What is trained; the model's cost; and on rank 0 of a new run its peripheral attention before the first step.

    Raises:
        UserError: weights or a teacher cannot be read or do not fit.
    """
    fresh = verified is None
    say(world, f"building {config.model.name}")
    count = (config.model.name, config.model.image_size, config.model.num_classes, config.model.switches)
    counted = world.from_main(asdict(flops.count(*count)) if world.is_main else None)  # before ZeRO-3 patches F.linear
    model = build_model(config, world, classes, fresh)
    first_maps = None
    if world.is_main and fresh:  # before ZeRO-3 has the weights
        first_maps = pictures.peripheral_maps(model.eval(), config.model.image_size)
        model.train()
    teacher = None
    if config.train.teacher:  # a run that was begun keeps its teacher
        say(world, f"loading the teacher: {describe_teacher(config.train)}")
        teacher = load_teacher(config, world.device, classes if fresh else None)
    stage, asked = zero_stage(config, world.size), config.train.zero_stage
    alone = f" (train.zero_stage {asked} has nothing to share out on one process)" if stage != asked else ""
    say(world, f"building the optimizer, {describe(model, config.optim)}, and DeepSpeed's engine, ZeRO stage {stage}{alone}")
    engine = build_engine(model, config, world)
    ema = WeightAverage(engine, config.train.ema_decay) if config.train.ema_decay else None
    if verified:
        checkpoint.load(engine, verified, ema, world)
    train_state = TrainState(engine, StepStatistics(engine.module, world), ema, Objective(label_loss(config.train), teacher))
    return train_state, flops.FlopRow(**counted), first_maps


def training_loader(
    shards: ShardSet | MixedSet, config: Config, decode: str, world: World, first_step: int
) -> Loader[TrainBatches] | TrialLoader:
    """This process's micro-batches from the first one after ``first_step`` steps on.

    Args:
        config: settled.
        decode: "gpu", "cpu", or "auto": to be measured.
    """
    batches = TrainBatches.of_run(shards, config, world.rank, world.size)
    start = first_step * batches.batches_per_step

    def open_loader(start: int | Iterator[int], decode: str, bad: BadSamples | None = None) -> Loader[TrainBatches]:
        return Loader(batches, config.data, world.device, world.cpu_threads, start, bad, decode)

    if decode != AUTO or world.device.type == "cpu":
        return open_loader(start, decode)
    turns = Turns.of_steps(start, config.data.prefetch, batches.batches_per_step)
    say(
        world,
        f"decoding on the GPU and on the CPU in turns for {turns.total} micro-batches, to keep the faster: "
        f"data.decode=gpu or cpu settles it",
    )
    bad = BadSamples(shards, config.data.max_bad_samples)
    return TrialLoader(batches, turns, bad, open_loader, partial(keep_faster, world))


def keep_faster(world: World, seconds: dict[str, float]) -> str:
    """The way of decoding with which the slowest rank is faster. Collective.

    Args:
        seconds: what a micro-batch of training took on this rank, by ``data.decode``.
    """
    of_ranks = world.gather(seconds)
    slowest = {decode: max(rank[decode] for rank in of_ranks) for decode in (GPU, CPU)}
    kept, other = sorted(slowest, key=lambda decode: slowest[decode])
    say(
        world,
        f"decoding on the {kept.upper()} from now on: a micro-batch takes {1e3 * slowest[kept]:.1f} ms, and "
        f"{1e3 * slowest[other]:.1f} ms with the {other.upper()} decoding",
    )
    return kept


def say(world: World, text: str) -> None:
    """Log what a start is doing, which takes seconds, or minutes on a busy disk. Rank 0 only."""
    if world.is_main:
        console.say(text)
