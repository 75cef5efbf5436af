"""Train a run to its end: steps, evaluations, checkpoints."""

import dataclasses
import json
import time
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor

from pipeline.analysis.during_training import FirstImages, layer_means, nothing_to_follow
from pipeline.checkpoint.saver import Saver
from pipeline.cluster.agreement import Agreement, do_in_main
from pipeline.cluster.environment import StopSignal, has_agent
from pipeline.cluster.heartbeat import Heartbeat
from pipeline.cluster.rendezvous import disconnect, init_world
from pipeline.cluster.world import World
from pipeline.config import Config, Recipe, config_to_yaml
from pipeline.errors import PREEMPTED, UserError, first_few
from pipeline.files import replace_text, write_error
from pipeline.inference.evaluation import evaluate
from pipeline.loader.loader import Batch
from pipeline.logs import pictures, tensorboard
from pipeline.logs.console import say_once, stage
from pipeline.metrics import Metric, record, recording
from pipeline.optim.build import learning_rate
from pipeline.step.precision import make_deterministic, refusals_explained
from pipeline.step.train_step import StepResult, train_step
from pipeline.training.building import check_alone
from pipeline.training.dry_run import dry_run
from pipeline.training.start import Start
from pipeline.training.state import Run

_STOPPED_EARLY = "stopped by a signal before the first step of this start: nothing new to save; the same command begins where this one would have"
FOLDER, REPORT = "nonfinite", "report.json"  # of a step whose gradient is not finite
_SHOWN = 8  # losses in a message; the report has all


def connect_and_train(
    config: Config, stop: StopSignal, recipe: Recipe | None = None, dry: bool = False, doctor: bool = False
) -> int:
    """Join the other ranks, then :func:`train`, or :func:`dry_run`: the command once its config is loaded. Returns the exit code.
    ``doctor``: examine the nodes before. Raises UserError: one of them is not fit."""
    if config.train.deterministic:
        make_deterministic()
    world = init_world(config.distributed.collective_timeout, None if dry else config.folder)
    if doctor:
        from pipeline.health.nodes import see_that_nodes_are_fit

        see_that_nodes_are_fit(config, world)
    with stop if has_agent() and not dry else nullcontext():
        code = dry_run(config, world) if dry else train(config, world, stop, recipe)
    disconnect()
    return code


def train(config: Config, world: World, stop: StopSignal | None = None, recipe: Recipe | None = None) -> int:
    """Train to the end of the schedule, from the newest intact checkpoint if there is one. Collective. Returns the exit code: 0
    at the end of the schedule, ``PREEMPTED`` after a signal, with a checkpoint if a step was taken. Raises UserError: config,
    data and run folder do not fit together, or that of :func:`train_to_the_end`."""
    stop = stop or StopSignal()
    start = Start(config, world)
    check_alone(config, world)
    with Heartbeat(world, config.distributed, start.folder) as heartbeat, refusals_explained():
        if any(world.gather(stop.received)):  # received while the libraries were loading: build nothing
            say_once(world, _STOPPED_EARLY)
            return PREEMPTED
        with stage("starting"):
            run = start.open_run(stop, heartbeat, recipe)
        if run is None:
            return 0
        with run:
            stopped = train_to_the_end(run)
    return PREEMPTED if stopped else 0


def train_to_the_end(run: Run) -> bool:
    """Take the steps of a run until its schedule ends or a rank has to stop; returns whether it was stopped. Collective. Raises
    UserError: a gradient is not finite, a rank's data cannot be read, or nothing can be written."""
    if run.config.eval.analyses and (reason := nothing_to_follow(run.train_state.engine.module)):
        run.log.say(f"note: eval.analyses writes nothing for {run.config.model.name}: {reason}")
    if run.agreement.ask(run.stop.received != 0):  # received while the run was built
        run.log.say(_STOPPED_EARLY)
        return True
    stopping = run.evaluation_due and complete_step(run, stopping=False)
    while run.step < run.schedule.last_step and not stopping:
        first = run.step == run.first_step  # which compiles, starts the loader's threads and fills caches
        with run.profiler.step(run.step + 1), stage("taking the first step") if first else nullcontext():
            batch = training_step(run)
        if run.profiler.ends_with(run.step):
            run.heartbeat.still("writing a profile")
            run.profiler.close()
            run.log.restart_clock()
        stopping = run.exchange_status() and run.step < run.schedule.last_step
        run.evaluation_due = run.schedule.passes(run.step, run.config.eval.every_epochs)
        if run.step == run.first_step + 1:
            grid = pictures.image_grid(batch, run.train_set.class_names, run.config.data.mean, run.config.data.std)
            run.log.image(pictures.IMAGES, grid, run.step)
        stopping = complete_step(run, stopping)
    with stage("finishing the checkpoint"):
        run.saver.finish()
    if run.mirror:
        limit, still = run.config.checkpoint.retry_seconds if stopping else None, partial(run.heartbeat.still, "uploading")
        with stage(f"uploading to {run.config.output_dir}"):
            stopping |= not run.mirror.finish(run.agreement, lambda: run.stop.received != 0, still, limit)
    if stopping:
        run.raise_failure()
        run.log.say(f"stopped by a signal at step {run.step}: the same command resumes from here")
    else:
        run.compilation.drop_cache()
        run.log.say(f"done at step {run.step}; curves, beside those of other runs: tensorboard --logdir {run.folder.parent}")
    return stopping


def training_step(run: Run) -> Batch:
    """Take one optimizer step; returns its last micro-batch. It is settled when the next step is under way, if a GPU takes it."""
    schedule, step = run.schedule, run.step + 1  # the step's number once it is taken
    lr = learning_rate(run.step, schedule.steps_per_epoch, schedule.epochs, schedule.global_batch_size, run.config.optim)

    def next_batch() -> Batch:
        run.heartbeat.at(step, "reading data")
        return next(run.loader)

    def before_forward(batch: Batch, noise: Tensor | None) -> None:
        if run.compilation.pending:
            run.heartbeat.at(step, "compiling")
            with recording():  # the step will record the same
                accumulates = run.train_state.engine.gradient_accumulation_steps() > 1
                run.compilation.prepare(batch, noise, accumulates, partial(run.heartbeat.still, "compiling"))
            run.log.restart_clock()
        run.heartbeat.at(step, "training")

    with recording() as metrics:
        if run.mirror:
            record("upload_backlog_mib", run.mirror.backlog / 2**20, reduce="sum")
        result = train_step(run.train_state, next_batch, lr, run.config.seed, before_forward, lambda: settle_step(run))
    run.step, run.unsettled = step, (step, result, metrics)
    if not result.taken.late or step == run.first_step + 1:
        settle_step(run)
    if run.compilation.captures:
        run.heartbeat.still("capturing a step")
        run.compilation.capture(run.train_state, result.batch, run.config.seed)
        run.log.restart_clock()
    return result.batch


def settle_step(run: Run) -> None:
    """Find out whether the last step was taken, and log it: before the weights change again. Collective."""
    if run.unsettled is None:
        return
    (step, result, metrics), run.unsettled = run.unsettled, None
    if not result.taken:
        skip_or_stop(run, step, result)
    metrics["skipped_steps"] = Metric("max", [run.skipped_steps])
    run.log.step(step, metrics, run.loader.bad.take_unreported())
    if run.samples and result.taken:
        for request in result.requests:
            run.samples.add(request)
        run.samples.write(step)


def complete_step(run: Run, stopping: bool) -> bool:
    """After a step, evaluate and save a checkpoint if they are due; returns whether the run stops here.

    With ``stopping``, on which all ranks have agreed, an evaluation that is due is left to the next start.
    """
    every, improved = run.config.checkpoint.every_steps, False
    made_up_for = run.evaluation_due and run.step == run.first_step
    if run.evaluation_due and not stopping:
        settle_step(run)
        run.heartbeat.at(run.step, "evaluating")
        run.log.flush()
        began = time.perf_counter()
        results = evaluate_run(run)
        run.events.add("evaluation", run.step, seconds=round(time.perf_counter() - began, 3))
        if results:
            improved = note_results(run, results)
            run.log.restart_clock()  # evaluating is not training, nor are its pictures, which rank 0 draws alone
            run.evaluation_due = False
        run.train_state.engine.train()
        stopping = results is None
    reasons = {
        "a signal": stopping,
        "the best accuracy so far": improved,
        "an evaluation that the last checkpoint says is due": made_up_for,
        run.schedule.end: run.step == run.schedule.last_step,
        "checkpoint.every_steps": every is not None and run.step % every == 0,
    }
    if any(reasons.values()):
        settle_step(run)
        run.heartbeat.at(run.step, "saving")
        run.log.flush(to_disk=True)  # the rows that lead to a checkpoint are there when it is, also after a power failure
        if run.samples:
            run.samples.sync()
        began = time.perf_counter()
        run.saver.save(run.train_state.engine, run.train_state.ema, run.state())
        reason = next(reason for reason, applies in reasons.items() if applies)
        run.events.add("save", run.step, seconds=round(time.perf_counter() - began, 3), reason=reason)
        run.log.restart_clock()
    return stopping


def evaluate_run(run: Run) -> dict[str, dict[str, Any]] | None:
    """Evaluate the current weights, and their average if there is one; None if a signal interrupted it.

    With ``eval.analyses``, also logs what the current weights do with the first images. Leaves the engine in eval mode.
    """
    state, step = run.train_state, run.step

    def stopped() -> bool:
        run.heartbeat.at(step, "evaluating")
        return run.exchange_status()

    state.engine.eval()
    first = FirstImages.of(state.engine, run.config, run.world)
    own = evaluate(state.engine, run.val_loader, run.world, stopped, consumer=first)
    if own is None:
        return None
    results = {"model": own}
    if state.ema:
        with state.ema.applied():
            average = evaluate(state.engine, run.val_loader, run.world, stopped)
        if average is None:
            return None
        results["ema"] = average
    if first:  # before the rows of the evaluation, which stay the last ones
        measures = first.measures()
        run.log.analysis(step, measures, layer_means(measures))
    return results


def note_results(run: Run, results: dict[str, dict[str, Any]]) -> bool:
    """Log an evaluation; returns whether this is the best accuracy so far, so that its checkpoint is kept."""
    run.log.evaluation(run.step, results)
    for weights, result in results.items():
        if "nonfinite" in result:
            run.log.warn(f"{weights} scores of {result['nonfinite']} images are not finite: these count as wrong")
        bars = pictures.class_bars(run.train_set.class_names, result["class_correct"], result["class_count"])
        run.log.image(pictures.CLASSES + tensorboard.suffix(weights), bars, run.step)
    phi = pictures.peripheral_maps(run.train_state.engine.module, run.config.model.image_size)
    if phi is not None:
        run.log.image(pictures.PHI, pictures.map_grid(phi), run.step)
    weights, result = max(results.items(), key=lambda item: item[1]["top1"])
    if run.best and result["top1"] <= run.best["top1"]:
        return False
    run.best = {"top1": result["top1"], "step": run.step, "weights": weights}
    return run.config.checkpoint.keep_best


def skip_or_stop(run: Run, step: int, result: StepResult) -> None:
    """Count a step that was skipped, or stop, with the run in the state before the step: none has changed the weights since.
    Collective. Raises UserError: more than ``train.max_skipped_steps``. ``nonfinite/step-...`` in the run folder is then a run
    folder itself: the state before the step, a config that repeats this step alone, a report of every sample and loss."""
    run.skipped_steps += 1
    losses = [loss for part in run.world.gather([loss.item() for loss in result.losses]) for loss in part]
    shown = first_few([f"{loss:.4g}" for loss in losses], _SHOWN)
    allowed = run.config.train.max_skipped_steps
    if run.skipped_steps <= allowed:
        said = f"step {step} is skipped, its gradient is not finite (losses of its micro-batches: {shown})"
        run.log.warn(f"{said}; {run.skipped_steps} of {allowed} that train.max_skipped_steps allows")
        return
    run.step = step - 1
    run.train_state.batchnorm.restore()  # the next step's passes may have begun
    what = f"at step {step} the gradient is not finite (losses of its micro-batches: {shown})"
    remedy = "lower optim.lr, raise optim.warmup_epochs, set optim.clip_grad_norm or raise train.max_skipped_steps"
    sentence = f"{what}, and train.max_skipped_steps is {allowed}: {remedy}"
    if (run.folder / REPORT).exists():  # this run repeats such a step
        raise UserError(f"{sentence}; {run.folder / REPORT} names the samples.")
    folder = run.folder / FOLDER / f"step-{step:08d}"
    try:
        run.saver.finish()  # a checkpoint in progress is from before this step
        _write_dump(run, step, folder, result)
    except UserError as error:
        raise UserError(f"{sentence}; what reproduces the step could not be written: {error}") from None
    raise UserError(
        f"{sentence}; {folder / REPORT} names the samples, and pervit train --config {folder / 'config.yaml'} repeats the step."
    )


def _write_dump(run: Run, step: int, folder: Path, result: StepResult) -> None:
    rows = [
        {
            "rank": run.world.rank,
            "micro_batch": number,
            "loss": repr(loss.item()),  # JSON has no NaN
            "keys": [run.train_set.key(sample) for sample in request.index.tolist()],
            "labels": request.label.tolist(),
            "epoch": request.epoch.tolist(),
            "position": request.position.tolist(),
        }
        for number, (request, loss) in enumerate(zip(result.requests, result.losses))
    ]
    of_ranks = run.world.gather(rows)
    report = {"step": step, "world_size": run.world.size, "data": str(run.train_set.folder)}
    report["micro_batches"] = [row for rows in of_ranks for row in rows]

    def write() -> None:
        config = run.config.with_values({"output_dir": str(folder), "train.max_steps": step})
        try:
            folder.mkdir(parents=True, exist_ok=True)
            replace_text(folder / REPORT, json.dumps(report, indent=1) + "\n")
            replace_text(folder / "config.yaml", config_to_yaml(config))
        except OSError as error:
            raise write_error(Path(error.filename or folder), error) from None

    do_in_main(write, run.world)
    agreement = Agreement(run.config.distributed.collective_timeout)  # a separate one: the run's counts the run's saves
    saver = Saver(folder, run.world, run.config.checkpoint, agreement, partial(run.heartbeat.still, "saving"))
    before = dataclasses.replace(run.state(), skipped_steps=run.skipped_steps - 1)
    saver.save(run.train_state.engine, run.train_state.ema, before)
    saver.finish()
