"""Start or resume a run: find its checkpoint, compare config and data with it, settle, build, open the log."""

from dataclasses import dataclass
from functools import partial

from torch import Tensor

from pipeline.checkpoint.folder import sweep
from pipeline.checkpoint.loading import Verified, newest_intact
from pipeline.checkpoint.manifest import MANIFEST, RunState
from pipeline.checkpoint.mirror import Mirror
from pipeline.checkpoint.saver import Saver
from pipeline.cluster.agreement import Agreement, do_in_main
from pipeline.cluster.environment import StopSignal
from pipeline.cluster.heartbeat import Heartbeat
from pipeline.cluster.world import World
from pipeline.config import AUTO, Config, Recipe, config_from_dict
from pipeline.errors import UserError, counted
from pipeline.inference.evaluation import check_classes, check_same_classes, evaluation_loader
from pipeline.logs import pictures
from pipeline.logs.console import say_once
from pipeline.logs.profiling import StepProfiler
from pipeline.logs.reduction import StoreReport
from pipeline.logs.run_files import RunEvents, SampleLog, write_run_files
from pipeline.logs.run_log import RunLog
from pipeline.models.flops import FlopRow
from pipeline.optim.build import optimizer_description
from pipeline.runs.state import is_complete
from pipeline.shards.files.cached import cache_of
from pipeline.shards.mixed_set import MixedSet, open_training_set
from pipeline.shards.shard_set import ShardSet
from pipeline.step.captured_step import what_hinders
from pipeline.step.train_step import TrainState
from pipeline.stream.samples import images_per_epoch
from pipeline.stream.schedule import Schedule, make_schedule
from pipeline.training.building import Settled, build, settle, training_loader
from pipeline.training.compiling import BLOCKS, GRAPHS, Compilation
from pipeline.training.folder import RunLock, check_same_data, check_same_run, open_mirror, open_run_folder
from pipeline.training.state import Run


@dataclass(frozen=True)
class RunData:
    """What a run trains and is evaluated on, and for how long."""

    train_set: ShardSet | MixedSet
    val_set: ShardSet
    schedule: Schedule

    def description(self) -> str:
        """Place, images and classes in one line; of a mix, also what an epoch takes of each set."""
        train, sets = self.train_set, self.train_set.sets
        counts = f"{len(sets[0]):,} training and {len(self.val_set):,} validation images, {len(train.classes)} classes"
        line = f"{train.folder}: {counts}"
        if isinstance(train, MixedSet) and train.mixture:
            shown = zip(sets, train.mixture.shown.tolist(), train.mixture.shares)
            parts = [f"{number:,} of {len(part):,} images of {part.folder} ({share:.1%})" for part, number, share in shown]
            line += f"; an epoch mixes {', '.join(parts)}"
        return line


@dataclass(frozen=True)
class PreparedRun:
    """A run that is checked and built, and has written nothing yet."""

    settled: Settled
    data: RunData
    before: RunState | None  # what it resumes from; None: a new run
    train_state: TrainState
    cost: FlopRow  # of the model
    first_maps: Tensor | None  # peripheral attention before the first step, for the log; rank 0 of a new run only

    @property
    def step(self) -> int:
        """Steps that are done."""
        return self.before.step if self.before else 0


class Start:
    """A start of a run. A dry run takes those of its steps that write nothing. ``look_only``: leave the run folder as it is,
    damaged and half written checkpoints too."""

    def __init__(self, config: Config, world: World, look_only: bool = False) -> None:
        self.config, self.world, self.look_only = config, world, look_only
        self.folder = config.folder

    def open_run(self, stop: StopSignal, heartbeat: Heartbeat, recipe: Recipe | None = None) -> Run | None:
        """Start the run, or resume it from its newest intact checkpoint; None if nothing is left to train. Collective.
        ``recipe``: what the config is made from, to say where they differ; None: unknown."""
        data = self.open_data()
        lock, mirror = open_run_folder(self.folder, self.world), None
        try:
            mirror = open_mirror(self.config, self.world, lock)
            prepared = self.prepare(data)
            if prepared:
                run = _open(prepared, self.world, stop, heartbeat, lock, mirror)
                _introduce(run, prepared, recipe)
                return run
            if mirror:
                mirror.start()
                mirror.close(self.config.checkpoint.retry_seconds)
            if lock:
                lock.release()
            return None
        except UserError:
            if mirror:
                mirror.close()
            if lock:
                lock.abandon()
            raise

    def open_data(self, cached: bool = True) -> RunData:
        """Open both shard sets, by way of the node's cache if there is one and ``cached``. Raises UserError: they are not
        intact, or do not fit the config or each other."""
        data, cache, readers = self.config.data, cache_of(self.config.data) if cached else None, self.world.size
        train_set = open_training_set(data.path, data.mix, readers=readers, cache=cache)
        val_set = ShardSet(data.path, "val", readers=readers, cache=cache)
        check_classes(self.config, train_set)
        check_same_classes(val_set, train_set.classes, of=str(train_set.folder))
        return RunData(train_set, val_set, make_schedule(self.config, images_per_epoch(train_set), train_set.subset))

    def find_checkpoint(self, train_set: ShardSet | MixedSet) -> Verified | None:
        """The checkpoint that the run resumes from, None for a new run. Collective. Raises UserError: no checkpoint is intact,
        or they are of another config or data set."""
        if not self.look_only:
            do_in_main(lambda: sweep(self.folder), self.world)
        verified = newest_intact(self.folder, self.world, set_aside_damaged=not self.look_only)
        before = verified.state if verified else None
        begun_with = config_from_dict(before.config, source=str(self.folder)) if before else None
        check_same_run(self.config, begun_with, self.world)
        check_same_data(self.config, before.data if before else None, train_set.identity(), self.world)
        return verified

    def prepare(self, data: RunData) -> PreparedRun | None:
        """Settle what the config leaves open and build all that is trained; None if nothing is left to train. Collective."""
        verified = self.find_checkpoint(data.train_set)
        before = verified.state if verified else None
        if verified and before and before.samples != (samples := data.schedule.samples(before.step)):
            problem = f"{verified.folder / MANIFEST}: state.samples must be {samples}, those of {before.step} steps, got {before.samples}"
            raise UserError(problem, "take another checkpoint")
        if before and is_complete(before.step, before.evaluation_due, data.schedule.last_step):
            say_once(self.world, f"{self.folder} is complete at step {before.step}: nothing to train.")
            return None
        say_once(self.world, f"data: {data.description()}")
        say_once(self.world, f"resuming {self.folder} from step {before.step}" if before else f"a new run: {self.folder}")
        settled = settle(self.config, before, data.train_set, self.world)
        return PreparedRun(settled, data, before, *build(settled, self.world, data.train_set.classes, verified))


def _open(
    prepared: PreparedRun, world: World, stop: StopSignal, heartbeat: Heartbeat, lock: RunLock | None, mirror: Mirror | None
) -> Run:
    """Open the log and the loaders: from here on the run writes. Collective."""
    say_once(world, "opening the loaders and the log")
    settled, data, before, train_state = prepared.settled, prepared.data, prepared.before, prepared.train_state
    config, step, last_step = settled.config, prepared.step, data.schedule.last_step
    folder = config.folder
    number = write_run_files(config, world, step + 1, str(settled.precision), settled.micro_batch_reason)
    events, agreement = RunEvents(folder, world), Agreement(config.distributed.collective_timeout)
    events.start(step, number=number, last_step=last_step, world_size=world.size, zero_stage=settled.zero_stage)
    heartbeat.on_loss = lambda sentence, at: events.add("end", at, reason=sentence, whole=False)
    known = {int(sample): sentence for sample, sentence in before.bad_samples.items()} if before else {}
    store = StoreReport(world, (data.train_set, data.val_set))
    flops = prepared.cost.training_flops_per_image(config.train.micro_batch)
    flops_per_image = None if config.data.size_schedule else flops  # they are of one size
    skipped, evaluation_due = (before.skipped_steps, before.evaluation_due) if before else (0, False)
    kind = settled.compile
    obstacle = what_hinders(train_state) if kind == GRAPHS else "nothing is captured"
    if obstacle is None:
        train_state.engine.decide_on_the_device(config.train.max_skipped_steps - skipped)  # type: ignore[attr-defined]
    elif kind == GRAPHS and config.train.compile == AUTO:
        kind = BLOCKS
    elif kind == GRAPHS:
        say_once(world, f"train.compile=graphs captures the passes of a micro-batch, not the whole step: {obstacle}")
    model, objective, precision = train_state.engine.module, train_state.objective, settled.precision.name
    compilation = Compilation(kind, precision, folder, world, model, objective, obstacle is None)
    run = Run(
        config=config,
        world=world,
        stop=stop,
        heartbeat=heartbeat,
        lock=lock,
        schedule=data.schedule,
        train_set=data.train_set,
        train_state=train_state,
        compilation=compilation,
        loader=training_loader(data.train_set, settled, world, step, train_state.engine.module),
        val_loader=evaluation_loader(data.val_set, config, world),
        agreement=agreement,
        saver=Saver(folder, world, config.checkpoint, agreement, partial(heartbeat.still, "saving"), mirror),
        mirror=mirror,
        log=RunLog(config, world, step, data.schedule, flops_per_image, known, store, evaluation_due),
        events=events,
        samples=SampleLog(folder, world, number) if config.log.samples else None,
        profiler=StepProfiler(folder, config.log.profile_steps, world, step, last_step),
        first_step=step,
        unsettled=None,
        step=step,
        skipped_steps=skipped,
        best=before.best if before else None,
        evaluation_due=evaluation_due,
    )
    if mirror:
        mirror.start()
    if prepared.first_maps is not None:
        run.log.image(pictures.PHI, pictures.map_grid(prepared.first_maps), step)
    return run


def _introduce(run: Run, prepared: PreparedRun, recipe: Recipe | None) -> None:
    """Log the first lines of a start: precision, batch, schedule, and what is unusual about them."""
    settled, before, cost = prepared.settled, prepared.before, prepared.cost
    config, schedule, model = run.config, run.schedule, run.train_state.engine.module
    run.log.say(str(settled.precision))
    if settled.precision.warning:
        run.log.warn(settled.precision.warning)
    batch, images = config.train.global_batch_size, len(run.train_set)
    if batch > images and not before:  # a run that was begun keeps its batch
        run.log.warn(
            f"train.global_batch_size is {batch:,}, but the train split has only {images:,} images, so that each step takes some of "
            f"them more than once: set it to {images:,} at most"
        )
    micro, notes = config.train.micro_batch, []
    if remark := optimizer_description(config.optim).remark(config.optim):
        notes.append(remark)
    if (warmup := config.optim.warmup_epochs) >= schedule.epochs:
        notes.append(f"optim.warmup_epochs {warmup:g} >= train.epochs {schedule.epochs:g}: the run ends within the warm-up")
    if run.train_state.batchnorm:
        normalizes = f"{config.model.name} has BatchNorm, which normalizes over a micro-batch, so"
        if before and (was := before.config["train"]["micro_batch_size"]) != micro:
            notes.append(f"train.micro_batch_size was {was} and is {micro}: {normalizes} the run goes on a little differently")
        if recipe and (stated := recipe.config.train.micro_batch_size) not in (AUTO, micro):
            notes.append(f"train.micro_batch_size is {micro}, {stated} in {recipe.name}: {normalizes} this is not its recipe")
    for note in notes:
        run.log.say(f"note: {note}")
    processes = counted(run.world.size, "process")
    per_epoch = round(schedule.steps_per_epoch, 1) or schedule.steps_per_epoch
    run.log.say(
        f"{config.model.name} on {run.world.device}: {cost.params:,} parameters, {cost.gmacs:.3f} GMACs per image; batch {batch} = "
        f"{micro} x {processes} x {settled.accumulation}; steps {run.step} to {schedule.last_step}, {per_epoch:,.10g} per epoch"
    )
    for sentence in [*model.remarks(config.data.mean, config.data.std), *cost.remarks()]:
        run.log.say(sentence)
    if remark := run.profiler.remark():
        run.log.warn(remark)
