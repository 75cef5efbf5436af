"""A run between its start and its end: everything that the loop of ``train.py`` works with, and how it is put together."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from pipeline import checkpoint, flops
from pipeline.agreement import Agreed, Agreement, do_in_main
from pipeline.batchnorm import StepStatistics
from pipeline.checkpoint.held import optimizer_step_count
from pipeline.checkpoint.whole import Verified
from pipeline.config import Config, accumulation_steps, config_from_dict
from pipeline.data.loader import Loader
from pipeline.data.plan import TrainPlan
from pipeline.data.shards import ShardSet
from pipeline.distillation import load_teacher
from pipeline.distributed import World
from pipeline.ema import WeightAverage
from pipeline.engine import build_engine
from pipeline.errors import UserError
from pipeline.evaluation import check_classes, check_same_classes, evaluation_loader
from pipeline.faults.heartbeat import Heartbeat
from pipeline.faults.stop_signal import StopSignal
from pipeline.logs import console, pictures
from pipeline.logs.bad_sample_report import BadSampleReport
from pipeline.logs.run_files import write_run_files
from pipeline.logs.run_log import RunLog
from pipeline.logs.sample_log import SampleLog
from pipeline.models import create_model, load_pretrained
from pipeline.precision import Precision, choose_precision, with_precision
from pipeline.run_folder import check_same_data, check_same_run, config_hash, open_run_folder
from pipeline.run_lock import RunLock
from pipeline.schedule import Schedule, make_schedule

_HEARTBEAT_NEEDS = 120.0  # seconds, on top of distributed.progress_timeout


@dataclass
class Run:
    """A run that was started; a context manager. The last four fields change as it goes on, and are what a checkpoint keeps of it."""

    config: Config
    world: World
    stop: StopSignal
    heartbeat: Heartbeat
    folder: Path
    lock: RunLock | None  # held by the main process
    schedule: Schedule
    train_set: ShardSet
    engine: Any  # deepspeed.DeepSpeedEngine
    norms: StepStatistics
    ema: WeightAverage | None
    teacher: Callable[[Tensor], Tensor] | None
    loader: Loader
    val_loader: Loader
    agreement: Agreement
    saver: checkpoint.Saver
    log: RunLog
    samples: SampleLog | None

    first_step: int  # done before this start

    step: int  # done
    skipped_steps: int
    best: dict[str, Any] | None
    evaluation_due: bool

    def tell(self) -> Agreed:
        """Once a step, or batch of an evaluation: hear how all processes stand, and complete a save that all have written."""
        agreed = self.agreement.exchange(self.stop.received, self.saver.failed, self.saver.written)
        self.saver.settle(agreed)
        return agreed

    def state(self) -> checkpoint.RunState:
        """What a checkpoint of this moment says."""
        return checkpoint.RunState(
            step=self.step,
            samples=self.schedule.samples(self.step),
            optimizer_step=optimizer_step_count(self.engine),
            skipped_steps=self.skipped_steps,
            config=self.config.model_dump(mode="json"),
            config_hash=config_hash(self.config),
            classes=self.train_set.classes,
            data=self.train_set.identity(),
            world_size=self.world.size,
            zero_stage=self.config.train.zero_stage,
            bad_samples={str(sample): sentence for sample, sentence in self.log.bad_samples.state().items()},
            best=self.best,
            evaluation_due=self.evaluation_due,
        )

    def still_saving(self) -> None:
        """To be called while the run waits for a save: a sign that it does not hang."""
        self.heartbeat.at(self.step, "saving")

    def __enter__(self) -> Run:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        """Stop threads and close files. After an error the lock stays with the process, whose threads may still be writing."""
        with ExitStack() as parts:
            if error is None:
                parts.callback(self.release)
            for part in (self.samples, self.log, self.val_loader, self.loader):
                if part:
                    parts.callback(part.close if error is None else partial(_close_quietly, part))

    def release(self) -> None:
        """Let the next run have the folder."""
        if self.lock:
            self.lock.release()


def _close_quietly(part: Any) -> None:
    with suppress(Exception):  # it would hide the error that matters
        part.close()


def start_run(config: Config, world: World, stop: StopSignal, heartbeat: Heartbeat) -> Run | None:
    """Start a run, or go on with it from its newest whole checkpoint; every process must call.

    Returns:
        None if there is nothing left to train.

    Raises:
        UserError: config, data and run folder do not fit together.
    """
    train_set, val_set = ShardSet(config.data.path, "train"), ShardSet(config.data.path, "val")
    check_classes(config, train_set)
    check_same_classes(val_set, train_set.classes, of=str(train_set.folder))
    schedule = make_schedule(config, train_set)
    lock = open_run_folder(config, world)
    try:
        start = find_start(config, world, train_set)
        before = start.state if start else None
        if before and before.step >= schedule.last_step and not before.evaluation_due:
            if world.is_main:
                console.say(f"{config.output_dir} is complete at step {before.step}: nothing to train.")
                lock.release()
            return None
        _say(
            world,
            f"data: {train_set.folder}: {len(train_set):,} training and {len(val_set):,} validation images, {len(train_set.classes)} classes",
        )
        _say(world, f"resuming {config.output_dir} from step {before.step}" if before else f"a new run: {config.output_dir}")
        precision = choose_precision(config.train.precision, before.config["train"]["precision"] if before else None, world)
        config = with_precision(config, precision.name)
        return _build_run(config, precision, world, stop, heartbeat, lock, schedule, train_set, val_set, start)
    except UserError:
        if lock:
            lock.abandon()
        raise


def find_start(config: Config, world: World, train_set: ShardSet) -> Verified | None:
    """The checkpoint that the run goes on from, None for a new run; every process must call.

    Raises:
        UserError: no checkpoint is whole, or they are of another config or data set.
    """
    folder = Path(config.output_dir)
    do_in_main(lambda: checkpoint.sweep(folder), world)
    verified = checkpoint.newest_whole(folder, world)
    before = verified.state if verified else None
    check_same_run(config, config_from_dict(before.config, source=str(folder)) if before else None, world)
    check_same_data(config, before.data if before else None, train_set.identity(), world)
    return verified


def _build_run(
    config: Config,
    precision: Precision,
    world: World,
    stop: StopSignal,
    heartbeat: Heartbeat,
    lock: RunLock | None,
    schedule: Schedule,
    train_set: ShardSet,
    val_set: ShardSet,
    start: Verified | None,
) -> Run:
    before = start.state if start else None
    folder, step = Path(config.output_dir), before.step if before else 0
    _say(world, f"building {config.model.name}")
    count = (config.model.name, config.model.image_size, config.model.num_classes, config.model.switches)
    counted = world.gather(asdict(flops.count(*count)) if world.is_main else None)[0]  # before ZeRO-3 patches F.linear
    cost = flops.FlopRow(**counted)
    model = build_model(config, world, train_set.classes, fresh=before is None)
    first_maps = None
    if world.is_main and not before:  # for the log, and before ZeRO-3 has the weights
        first_maps = pictures.peripheral_maps(model.eval(), config.model.image_size)
        model.train()
    teacher = None
    if config.train.teacher:  # a run that was begun keeps its teacher
        teacher = load_teacher(config, world.device, None if before else train_set.classes)
    _say(world, f"building the optimizer and DeepSpeed's engine, ZeRO stage {config.train.zero_stage}")
    engine = build_engine(model, config, world)
    ema = WeightAverage(engine, config.train.ema_decay) if config.train.ema_decay else None
    if start:
        checkpoint.load(engine, start, ema, world)

    _say(world, "opening the loaders and the log")
    write_run_files(config, world, step + 1, str(precision))  # only now: a start that was refused does not change them
    flops_per_image = cost.training_flops_per_image(config.train.micro_batch_size)
    known = {int(sample): sentence for sample, sentence in before.bad_samples.items()} if before else {}
    agreement = Agreement(patience(config))
    run = Run(
        config=config,
        world=world,
        stop=stop,
        heartbeat=heartbeat,
        folder=folder,
        lock=lock,
        schedule=schedule,
        train_set=train_set,
        engine=engine,
        norms=StepStatistics(engine.module, world),
        ema=ema,
        teacher=teacher,
        loader=training_loader(train_set, config, world, step),
        val_loader=evaluation_loader(val_set, config, world),
        agreement=agreement,
        saver=checkpoint.Saver(folder, world, config.checkpoint, agreement, lambda: run.still_saving()),
        log=RunLog(config, world, step, schedule.last_step, flops_per_image, BadSampleReport(world, known)),
        samples=SampleLog(folder, world, step + 1) if config.log.samples else None,
        first_step=step,
        step=step,
        skipped_steps=before.skipped_steps if before else 0,
        best=before.best if before else None,
        evaluation_due=before.evaluation_due if before else False,
    )
    if first_maps is not None:
        run.log.image(pictures.PHI, pictures.map_grid(first_maps), step)
    _introduce(run, precision, cost, before)
    return run


def patience(config: Config) -> float:
    """Seconds that a collective operation may wait: longer than the heartbeat needs to say who is hung."""
    return config.distributed.progress_timeout + _HEARTBEAT_NEEDS


def build_model(config: Config, world: World, classes: list[str], fresh: bool) -> nn.Module:
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


def training_loader(shards: ShardSet, config: Config, world: World, first_step: int) -> Loader:
    """This process's micro-batches from the first one of step ``first_step`` on."""
    plan = TrainPlan(
        shards=shards,
        seed=config.seed,
        image_size=config.model.image_size,
        global_batch_size=config.train.global_batch_size,
        micro_batch_size=config.train.micro_batch_size,
        rank=world.rank,
        world_size=world.size,
        data=config.data,
        augment=config.augment,
    )
    return Loader(plan, config.data, world.device, world.cpu_threads, start=first_step * plan.batches_per_step)


def _say(world: World, text: str) -> None:
    """What is being done: a start takes seconds, on a busy disk minutes."""
    if world.is_main:
        console.say(text)


def _introduce(run: Run, precision: Precision, cost: flops.FlopRow, before: checkpoint.RunState | None) -> None:
    """The first lines of the log."""
    config, schedule, world = run.config, run.schedule, run.world
    run.log.say(str(precision))
    if precision.warning:
        run.log.say(f"warning: {precision.warning}")
    whole, images = config.train.global_batch_size, len(run.train_set)
    if whole > images and not before:  # a run that was begun keeps its batch
        run.log.say(
            f"warning: train.global_batch_size is {whole:,}, but the train split has only {images:,} images, so that each step takes some of "
            f"them more than once: set it to {images:,} at most"
        )
    if config.optim.warmup_epochs >= schedule.epochs:
        run.log.say(
            f"note: optim.warmup_epochs {config.optim.warmup_epochs:g} >= train.epochs {schedule.epochs:g}: the run ends within the warm-up"
        )
    micro_batch_size = before.config["train"]["micro_batch_size"] if before else config.train.micro_batch_size
    if micro_batch_size != config.train.micro_batch_size and run.norms:
        run.log.say(
            f"note: train.micro_batch_size was {micro_batch_size} and is {config.train.micro_batch_size}: {config.model.name} has BatchNorm, which "
            f"normalizes over a micro-batch, so the run goes on a little differently"
        )
    steps, per_epoch = accumulation_steps(config.train, world.size), schedule.steps_per_epoch
    run.log.say(
        f"{config.model.name} on {world.device}: {cost.params:,} parameters, {cost.gmacs:.3f} GMACs per image; batch {config.train.global_batch_size} = "
        f"{config.train.micro_batch_size} x {world.size} process{'' if world.size == 1 else 'es'} x {steps}; steps {run.step} to "
        f"{schedule.last_step}, {round(per_epoch, 1) or per_epoch:,.10g} per epoch"
    )
