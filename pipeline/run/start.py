"""Start or resume a run: find its checkpoint, compare config and data with it, build everything, open the log."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from pipeline import checkpoint
from pipeline.checkpoint.whole import Verified
from pipeline.config import Config, Recipe, accumulation_steps, flatten
from pipeline.data.cached_files import cache_of
from pipeline.data.mixed_set import MixedSet, open_training_set
from pipeline.data.shards import ShardSet
from pipeline.distributed.agreement import Agreement, do_in_main
from pipeline.distributed.world import World
from pipeline.errors import UserError
from pipeline.faults.heartbeat import Heartbeat
from pipeline.faults.stop_signal import StopSignal
from pipeline.logs import console, pictures
from pipeline.logs.bad_sample_report import BadSampleReport
from pipeline.logs.run_events import RunEvents
from pipeline.logs.run_files import write_run_files
from pipeline.logs.run_log import RunLog
from pipeline.logs.sample_log import SampleLog
from pipeline.logs.store_report import store_report
from pipeline.models import create_model, flops, load_pretrained
from pipeline.models.common.base import VisionModel
from pipeline.optim.batchnorm import StepStatistics
from pipeline.optim.ema import WeightAverage
from pipeline.optim.engine import Engine, build_engine, zero_stage
from pipeline.optim.groups import describe
from pipeline.run.compiling import Compilation
from pipeline.run.decoding import choose_decoding, training_loader
from pipeline.run.evaluation import check_classes, check_same_classes, evaluation_loader
from pipeline.run.folder import as_begun, check_same_data, check_same_run, choose_stream, open_run_folder
from pipeline.run.precision import Precision, choose_precision, with_precision
from pipeline.run.progress import make_schedule
from pipeline.run.run_keys import recorded_config
from pipeline.run.state import Run
from pipeline.run.teacher import describe_teacher, load_teacher


def start_run(config: Config, world: World, stop: StopSignal, heartbeat: Heartbeat, recipe: Recipe | None = None) -> Run | None:
    """Start a run, or resume it from its newest intact checkpoint. Collective.

    Args:
        config: the run.
        world: all ranks.
        stop: tells whether this process has received a signal to stop.
        heartbeat: of this process.
        recipe: what the config is made from, to say where they differ; None: unknown.

    Returns:
        None if there is nothing left to train.

    Raises:
        UserError: config, data and run folder do not fit together.
    """
    cache = cache_of(config.data)
    train_set = open_training_set(config.data.path, config.data.mix, readers=world.size, cache=cache)
    val_set = ShardSet(config.data.path, "val", readers=world.size, cache=cache)
    check_classes(config, train_set)
    check_same_classes(val_set, train_set.classes, of=str(train_set.folder))
    schedule = make_schedule(config, train_set)
    lock = open_run_folder(config, world)
    try:
        verified = find_start(config, world, train_set)
        before = verified.state if verified else None
        if before and before.step >= schedule.last_step and not before.evaluation_due:
            if world.is_main:
                console.say(f"{config.output_dir} is complete at step {before.step}: nothing to train.")
            if lock:
                lock.release()
            return None
        _say(world, _describe_data(train_set, val_set))
        _say(world, f"resuming {config.output_dir} from step {before.step}" if before else f"a new run: {config.output_dir}")
        config = _as_begun(config, before, world)
        precision = choose_precision(config.train.precision, before.config["train"]["precision"] if before else None, world)
        config = with_precision(config, precision.name)
        begun_with = before.config["data"].get("decode") if before else None
        decode = choose_decoding(config.data.decode, begun_with, world, repeatable=config.train.deterministic)
        stream = choose_stream(config, before.stream_version if before else None, world)
        learner = _build_learner(config, world, train_set.classes, verified)

        _say(world, "opening the loaders and the log")
        step = before.step if before else 0
        # Only now: a start that was refused does not change them.
        number = write_run_files(config, world, step + 1, str(precision), stream)
        flops_per_image = learner.cost.training_flops_per_image(config.train.micro_batch_size)
        known = {int(sample): sentence for sample, sentence in before.bad_samples.items()} if before else {}
        agreement, folder = Agreement(config.distributed.collective_timeout), Path(config.output_dir)
        events, stage = RunEvents(folder, world), zero_stage(config, world.size)
        events.start(step, number=number, last_step=schedule.last_step, world_size=world.size, zero_stage=stage)
        heartbeat.on_loss = lambda sentence, at: events.add("end", at, reason=sentence, whole=False)
        run = Run(
            config=config,
            world=world,
            stop=stop,
            heartbeat=heartbeat,
            lock=lock,
            schedule=schedule,
            train_set=train_set,
            engine=learner.engine,
            compilation=Compilation(config, world, learner.engine.module),
            batchnorm=StepStatistics(learner.engine.module, world),
            ema=learner.ema,
            teacher=learner.teacher,
            loader=training_loader(train_set, config, decode, world, step, stream),
            val_loader=evaluation_loader(val_set, config, world),
            agreement=agreement,
            saver=checkpoint.Saver(folder, world, config.checkpoint, agreement, partial(heartbeat.still, "saving")),
            log=RunLog(
                config,
                world,
                step,
                schedule.last_step,
                flops_per_image,
                BadSampleReport(world, known),
                store_report(world, (train_set, val_set)),
            ),
            events=events,
            samples=SampleLog(folder, world, step + 1) if config.log.samples else None,
            first_step=step,
            step=step,
            skipped_steps=before.skipped_steps if before else 0,
            best=before.best if before else None,
            evaluation_due=before.evaluation_due if before else False,
        )
    except UserError:
        if lock:
            lock.abandon()
        raise
    if learner.first_maps is not None:
        run.log.image(pictures.PHI, pictures.map_grid(learner.first_maps), step)
    _introduce(run, precision, learner.cost, before, recipe)
    return run


def find_start(config: Config, world: World, train_set: ShardSet | MixedSet) -> Verified | None:
    """The checkpoint that the run goes on from, None for a new run. Collective.

    Raises:
        UserError: no checkpoint is whole, or they are of another config or data set.
    """
    folder = Path(config.output_dir)
    do_in_main(lambda: checkpoint.sweep(folder), world)
    verified = checkpoint.newest_whole(folder, world)
    before = verified.state if verified else None
    begun_with = recorded_config(before.config, source=str(folder)) if before else None
    check_same_run(config, begun_with, world)
    check_same_data(config, before.data if before else None, train_set.identity(), world)
    return verified


def _describe_data(train_set: ShardSet | MixedSet, val_set: ShardSet) -> str:
    sets = train_set.sets if isinstance(train_set, MixedSet) else [train_set]
    counts = f"{len(sets[0]):,} training and {len(val_set):,} validation images, {len(train_set.classes)} classes"
    line = f"data: {train_set.folder}: {counts}"
    if isinstance(train_set, MixedSet) and train_set.mixture:
        shown = zip(sets, train_set.mixture.shown.tolist(), train_set.mixture.shares)
        parts = [f"{number:,} of {len(one):,} images of {one.folder} ({share:.1%})" for one, number, share in shown]
        line += f"; an epoch mixes {', '.join(parts)}"
    return line


def _as_begun(config: Config, before: checkpoint.RunState | None, world: World) -> Config:
    """:func:`as_begun`, said in the log."""
    kept = as_begun(config, recorded_config(before.config, source=config.output_dir) if before else None)
    was, now = flatten(kept), flatten(config)
    for key in was:
        if was[key] != now[key]:
            _say(world, f"note: {key} stays {was[key]}, with which this run was begun; {now[key]} is the default of new runs")
    return kept


@dataclass(frozen=True)
class _Learner:
    """What is trained, and what it costs."""

    engine: Engine[VisionModel]
    ema: WeightAverage | None
    teacher: Callable[[Tensor], Tensor] | None
    cost: flops.FlopRow
    first_maps: Tensor | None  # peripheral attention before the first step, for the log; rank 0 of a new run only


def _build_learner(config: Config, world: World, classes: list[str], verified: Verified | None) -> _Learner:
    """The model in its engine, with first weights or those of the checkpoint. Collective."""
    fresh = verified is None
    _say(world, f"building {config.model.name}")
    count = (config.model.name, config.model.image_size, config.model.num_classes, config.model.switches)
    counted = world.from_main(asdict(flops.count(*count)) if world.is_main else None)  # before ZeRO-3 patches F.linear
    model = build_model(config, world, classes, fresh)
    first_maps = None
    if world.is_main and fresh:  # before ZeRO-3 has the weights
        first_maps = pictures.peripheral_maps(model.eval(), config.model.image_size)
        model.train()
    teacher = None
    if config.train.teacher:  # a run that was begun keeps its teacher
        _say(world, f"loading the teacher: {describe_teacher(config)}")
        teacher = load_teacher(config, world.device, classes if fresh else None)
    stage, asked = zero_stage(config, world.size), config.train.zero_stage
    alone = f" (train.zero_stage {asked} has nothing to share out on one process)" if stage != asked else ""
    _say(world, f"building the optimizer, {describe(model, config.optim)}, and DeepSpeed's engine, ZeRO stage {stage}{alone}")
    engine = build_engine(model, config, world)
    ema = WeightAverage(engine, config.train.ema_decay) if config.train.ema_decay else None
    if verified:
        checkpoint.load(engine, verified, ema, world)
    return _Learner(engine, ema, teacher, flops.FlopRow(**counted), first_maps)


def build_model(config: Config, world: World, classes: list[str], fresh: bool) -> VisionModel:
    """The run's model with its first weights: from the seed, or ``train.init_from`` (not when a checkpoint follows).

    Args:
        classes: of the training set, by index.
        fresh: no checkpoint follows.

    Raises:
        UserError: ``train.init_from`` cannot be read or does not fit.
    """
    torch.manual_seed(config.seed)
    model = create_model(
        config.model.name,
        config.model.num_classes,
        config.model.image_size,
        config.model.drop_path,
        config.train.activation_checkpointing,
        config.model.switches,
    )
    if config.train.init_from and fresh:
        source = f"train.init_from {config.train.init_from}"
        initial = checkpoint.read_initial_weights(Path(config.train.init_from))
        said = load_pretrained(model, initial.weights, source, initial.classes, classes)
        if world.is_main:
            for sentence in (f"{initial.what} of {config.train.init_from}", *said):
                console.say(f"init_from: {sentence}")
    return model


def _say(world: World, text: str) -> None:
    """Log what a start is doing, which takes seconds, or minutes on a busy disk. Rank 0 only."""
    if world.is_main:
        console.say(text)


def _introduce(
    run: Run, precision: Precision, cost: flops.FlopRow, before: checkpoint.RunState | None, recipe: Recipe | None
) -> None:
    """The first lines of the log."""
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
    if config.optim.name == "lamb" and not config.optim.clip_grad_norm:
        run.log.say(
            "note: optim.clip_grad_norm is null, so nothing clips the gradients; LAMB in timm and apex clips them at 1.0"
        )
    if config.optim.warmup_epochs >= schedule.epochs:
        run.log.say(
            f"note: optim.warmup_epochs {config.optim.warmup_epochs:g} >= train.epochs {schedule.epochs:g}: the run ends within the warm-up"
        )
    micro_batch_size = before.config["train"]["micro_batch_size"] if before else config.train.micro_batch_size
    if micro_batch_size != config.train.micro_batch_size and run.batchnorm:
        run.log.say(
            f"note: train.micro_batch_size was {micro_batch_size} and is {config.train.micro_batch_size}: {config.model.name} has BatchNorm, which "
            f"normalizes over a micro-batch, so the run goes on a little differently"
        )
    if recipe and recipe.config.train.micro_batch_size != config.train.micro_batch_size and run.batchnorm:
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
    for sentence in [*run.engine.module.remarks(config.data.mean, config.data.std), *cost.remarks()]:
        run.log.say(sentence)
