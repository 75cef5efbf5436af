"""Start or resume a run: find its checkpoint, compare config and data with it, build everything, open the log."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

from torch import Tensor

from pipeline import checkpoint
from pipeline.checkpoint.whole import Verified
from pipeline.config import Config, Recipe, flatten
from pipeline.data.cached_files import cache_of
from pipeline.data.mixed_set import MixedSet, open_training_set
from pipeline.data.samples import images_per_epoch
from pipeline.data.schedule import Schedule, make_schedule
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
from pipeline.models import flops
from pipeline.optim.batchnorm import StepStatistics
from pipeline.optim.build import describe
from pipeline.optim.ema import WeightAverage
from pipeline.optim.engine import build_engine, zero_stage
from pipeline.run.building import build_model
from pipeline.run.compiling import Compilation
from pipeline.run.decoding import choose_decoding, training_loader
from pipeline.run.evaluation import check_classes, check_same_classes, evaluation_loader
from pipeline.run.folder import as_begun, check_same_data, check_same_run, open_run_folder
from pipeline.run.introduction import introduce
from pipeline.run.micro_batch import choose_micro_batch, with_micro_batch
from pipeline.run.precision import Precision, choose_precision, with_precision
from pipeline.run.profiling import StepProfiler
from pipeline.run.run_keys import recorded_config
from pipeline.run.state import Run
from pipeline.run.teacher import describe_teacher, load_teacher
from pipeline.step.loss import Objective, label_loss
from pipeline.step.train_step import TrainState


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
    data = open_data(config, world)
    lock = open_run_folder(config, world)
    try:
        verified = find_start(config, world, data.train_set)
        if said := nothing_to_train(config, data.schedule, verified):
            _say(world, said)
            if lock:
                lock.release()
            return None
        ready = prepare(config, world, data, verified)
        config, before = ready.config, ready.before

        _say(world, "opening the loaders and the log")
        step = before.step if before else 0
        # Only now: a start that was refused does not change them.
        number = write_run_files(config, world, step + 1, str(ready.precision), ready.micro_batch)
        flops_per_image = ready.cost.training_flops_per_image(config.train.micro_batch)
        known = {int(sample): sentence for sample, sentence in before.bad_samples.items()} if before else {}
        agreement, folder = Agreement(config.distributed.collective_timeout), Path(config.output_dir)
        events, stage = RunEvents(folder, world), zero_stage(config, world.size)
        events.start(step, number=number, last_step=data.schedule.last_step, world_size=world.size, zero_stage=stage)
        heartbeat.on_loss = lambda sentence, at: events.add("end", at, reason=sentence, whole=False)
        run = Run(
            config=config,
            world=world,
            stop=stop,
            heartbeat=heartbeat,
            lock=lock,
            schedule=data.schedule,
            train_set=data.train_set,
            trained=ready.trained,
            compilation=Compilation(config, world, ready.trained.engine.module, ready.trained.objective),
            loader=training_loader(data.train_set, config, ready.decode, world, step),
            val_loader=evaluation_loader(data.val_set, config, world),
            agreement=agreement,
            saver=checkpoint.Saver(folder, world, config.checkpoint, agreement, partial(heartbeat.still, "saving")),
            log=RunLog(
                config,
                world,
                step,
                data.schedule.last_step,
                flops_per_image,
                BadSampleReport(world, known),
                store_report(world, (data.train_set, data.val_set)),
            ),
            events=events,
            samples=SampleLog(folder, world, step + 1) if config.log.samples else None,
            profiler=StepProfiler(config, world, step, data.schedule.last_step),
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
    if ready.first_maps is not None:
        run.log.image(pictures.PHI, pictures.map_grid(ready.first_maps), step)
    introduce(run, ready.precision, ready.cost, before, recipe)
    return run


@dataclass(frozen=True)
class RunData:
    """What a run trains and is evaluated on, and for how long."""

    train_set: ShardSet | MixedSet
    val_set: ShardSet
    schedule: Schedule

    def description(self) -> str:
        """Place, images and classes in one line; of a mix, also what an epoch takes of each set."""
        train = self.train_set
        sets = train.sets if isinstance(train, MixedSet) else [train]
        counts = f"{len(sets[0]):,} training and {len(self.val_set):,} validation images, {len(train.classes)} classes"
        line = f"{train.folder}: {counts}"
        if isinstance(train, MixedSet) and train.mixture:
            shown = zip(sets, train.mixture.shown.tolist(), train.mixture.shares)
            parts = [f"{number:,} of {len(one):,} images of {one.folder} ({share:.1%})" for one, number, share in shown]
            line += f"; an epoch mixes {', '.join(parts)}"
        return line


def open_data(config: Config, world: World) -> RunData:
    """Open both shard sets.

    Raises:
        UserError: they are not whole, or do not fit the config or each other.
    """
    cache = cache_of(config.data)
    train_set = open_training_set(config.data.path, config.data.mix, readers=world.size, cache=cache)
    val_set = ShardSet(config.data.path, "val", readers=world.size, cache=cache)
    check_classes(config, train_set)
    check_same_classes(val_set, train_set.classes, of=str(train_set.folder))
    return RunData(train_set, val_set, make_schedule(config, images_per_epoch(train_set), train_set.subset))


def nothing_to_train(config: Config, schedule: Schedule, verified: Verified | None) -> str | None:
    """The sentence for a run that is at its end; None for any other."""
    before = verified.state if verified else None
    if before and before.step >= schedule.last_step and not before.evaluation_due:
        return f"{config.output_dir} is complete at step {before.step}: nothing to train."
    return None


def find_start(config: Config, world: World, train_set: ShardSet | MixedSet, look_only: bool = False) -> Verified | None:
    """The checkpoint that the run goes on from, None for a new run. Collective.

    Args:
        look_only: leave the folder as it is, damaged and half written checkpoints too.

    Raises:
        UserError: no checkpoint is whole, or they are of another config or data set.
    """
    folder = Path(config.output_dir)
    if not look_only:
        do_in_main(lambda: checkpoint.sweep(folder), world)
    verified = checkpoint.newest_whole(folder, world, set_aside_damaged=not look_only)
    before = verified.state if verified else None
    begun_with = recorded_config(before.config, source=str(folder)) if before else None
    check_same_run(config, begun_with, world)
    check_same_data(config, before.data if before else None, train_set.identity(), world)
    return verified


def _as_begun(config: Config, before: checkpoint.RunState | None, world: World) -> Config:
    """:func:`as_begun`, said in the log."""
    kept = as_begun(config, recorded_config(before.config, source=config.output_dir) if before else None)
    was, now = flatten(kept), flatten(config)
    for key in was:
        if was[key] != now[key]:
            _say(world, f"note: {key} stays {was[key]}, with which this run was begun; {now[key]} is the default of new runs")
    return kept


@dataclass(frozen=True)
class Ready:
    """A run that is checked and built, and has written nothing yet."""

    config: Config  # of this start, with everything settled
    before: checkpoint.RunState | None  # what it goes on from; None: a new run
    precision: Precision
    decode: str
    micro_batch: str | None  # why it has the size that it has; None: the config states it
    trained: TrainState
    cost: flops.FlopRow  # of the model
    first_maps: Tensor | None  # peripheral attention before the first step, for the log; rank 0 of a new run only


def prepare(config: Config, world: World, data: RunData, verified: Verified | None) -> Ready:
    """Settle what the config leaves open and build everything that is trained. Collective. Writes nothing.

    Args:
        config: of this start.
        world: all ranks.
        data: :func:`open_data`.
        verified: :func:`find_start`.

    Raises:
        UserError: something does not fit.
    """
    train_set, before = data.train_set, verified.state if verified else None
    _say(world, f"data: {data.description()}")
    _say(world, f"resuming {config.output_dir} from step {before.step}" if before else f"a new run: {config.output_dir}")
    config = _as_begun(config, before, world)
    precision = choose_precision(config.train.precision, before.config["train"]["precision"] if before else None, world)
    config = with_precision(config, precision.name)
    begun_with = before.config["data"].get("decode") if before else None
    decode = choose_decoding(config.data.decode, begun_with, world, repeatable=config.train.deterministic)
    micro_batch = choose_micro_batch(config, before, world)
    config = with_micro_batch(config, micro_batch.size)
    built = _build(config, world, train_set.classes, verified)
    return Ready(config, before, precision, decode, micro_batch.reason, *built)


def _build(
    config: Config, world: World, classes: list[str], verified: Verified | None
) -> tuple[TrainState, flops.FlopRow, Tensor | None]:
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
    trained = TrainState(engine, StepStatistics(engine.module, world), ema, Objective(label_loss(config.train), teacher))
    return trained, flops.FlopRow(**counted), first_maps


def _say(world: World, text: str) -> None:
    """Log what a start is doing, which takes seconds, or minutes on a busy disk. Rank 0 only."""
    if world.is_main:
        console.say(text)
