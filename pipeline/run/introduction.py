"""The first lines of a run's log: precision, batch, schedule, and what is unusual about them."""

from __future__ import annotations

from pipeline import checkpoint
from pipeline.config import AUTO, Recipe, accumulation_steps
from pipeline.models import flops
from pipeline.optim.build import optimizer_description
from pipeline.run.precision import Precision
from pipeline.run.state import Run


def introduce(
    run: Run, precision: Precision, cost: flops.FlopRow, before: checkpoint.RunState | None, recipe: Recipe | None
) -> None:
    """Log them.

    Args:
        run: before its first step.
        precision: the one chosen, and why.
        cost: of the model.
        before: the checkpoint's state; None for a new run.
        recipe: what the config is made from, to say where they differ; None: unknown.
    """
    config, schedule, world = run.config, run.schedule, run.world
    run.log.say(str(precision))
    if precision.warning:
        run.log.warn(precision.warning)
    whole, images = config.train.global_batch_size, len(run.train_set)
    if whole > images and not before:  # a run that was begun keeps its batch
        run.log.warn(
            f"train.global_batch_size is {whole:,}, but the train split has only {images:,} images, so that each step takes some of "
            f"them more than once: set it to {images:,} at most"
        )
    if note := optimizer_description(config.optim).remark(config.optim):
        run.log.say(f"note: {note}")
    if config.optim.warmup_epochs >= schedule.epochs:
        run.log.say(
            f"note: optim.warmup_epochs {config.optim.warmup_epochs:g} >= train.epochs {schedule.epochs:g}: the run ends within the warm-up"
        )
    micro_batch_size = before.config["train"]["micro_batch_size"] if before else config.train.micro_batch_size
    if micro_batch_size != config.train.micro_batch_size and run.trained.batchnorm:
        run.log.say(
            f"note: train.micro_batch_size was {micro_batch_size} and is {config.train.micro_batch_size}: {config.model.name} has BatchNorm, which "
            f"normalizes over a micro-batch, so the run goes on a little differently"
        )
    if recipe and recipe.config.train.micro_batch_size not in (AUTO, config.train.micro_batch_size) and run.trained.batchnorm:
        run.log.say(
            f"note: train.micro_batch_size is {config.train.micro_batch_size}, {recipe.config.train.micro_batch_size} in {recipe.name}: "
            f"{config.model.name} has BatchNorm, which normalizes over a micro-batch, so this is not quite its recipe"
        )
    steps, per_epoch = accumulation_steps(config.train, world.size), schedule.steps_per_epoch
    run.log.say(
        f"{config.model.name} on {world.device}: {cost.params:,} parameters, {cost.gmacs:.3f} GMACs per image; batch {config.train.global_batch_size} = "
        f"{config.train.micro_batch_size} x {world.size} process{'' if world.size == 1 else 'es'} x {steps}; steps {run.step} to "
        f"{schedule.last_step}, {round(per_epoch, 1) or per_epoch:,.10g} per epoch"
    )
    for sentence in [*run.trained.engine.module.remarks(config.data.mean, config.data.std), *cost.remarks()]:
        run.log.say(sentence)
    if remark := run.profiler.remark():
        run.log.warn(remark)
