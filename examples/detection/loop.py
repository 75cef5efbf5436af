"""Train a detector on the package's parts: its engine, schedule, checkpoints, log and agreement between ranks."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from examples.detection.coco import CocoSet, check_sets, read_coco
from examples.detection.config import DetectionConfig, is_free
from examples.detection.data import Batch, Request, batches, request
from examples.detection.evaluation import evaluate
from examples.detection.model import build_detector
from pipeline.checkpoint import loading
from pipeline.checkpoint.folder import sweep
from pipeline.checkpoint.manifest import RunState
from pipeline.checkpoint.saver import Saver
from pipeline.cluster.agreement import Agreement, do_in_main, raise_on_all
from pipeline.cluster.environment import StopSignal
from pipeline.cluster.heartbeat import Heartbeat
from pipeline.cluster.rendezvous import disconnect, init_world
from pipeline.cluster.world import World
from pipeline.config import Config, accumulation_steps, config_to_yaml, flatten
from pipeline.errors import PREEMPTED, UserError
from pipeline.files import replace_text
from pipeline.logs.console import say_once
from pipeline.logs.run_log import RunLog
from pipeline.metrics import record, recording
from pipeline.optim.averages import StepStatistics
from pipeline.optim.build import optimizer_description
from pipeline.optim.description import MATRICES
from pipeline.optim.engine import build_engine, micro_batches, optimizer_step, set_learning_rate
from pipeline.runs import CONFIG
from pipeline.runs.state import is_complete
from pipeline.stream.schedule import Schedule
from pipeline.training.folder import config_hash, open_run_folder


@dataclass
class Run:
    """What the loop works with. The last two fields change as it goes on."""

    config: DetectionConfig
    settings: Config  # the same, for the package
    world: World
    stop: StopSignal
    heartbeat: Heartbeat
    train_set: CocoSet
    val_set: CocoSet
    schedule: Schedule
    engine: Any  # DeepSpeed's, with the Detector as its module
    statistics: StepStatistics
    agreement: Agreement
    saver: Saver
    log: RunLog

    step: int  # done
    evaluation_due: bool

    def exchange_status(self) -> bool:
        """Whether some rank has received a signal; publish a checkpoint that all ranks have written. Collective, once per step."""
        agreed = self.agreement.exchange(self.stop.received, self.saver.failed, self.saver.written)
        self.saver.settle(agreed)
        return agreed.stop != 0

    def state(self) -> RunState:
        """What a checkpoint of this moment says."""
        return RunState(
            step=self.step,
            samples=self.schedule.samples(self.step),
            skipped_steps=0,
            config={**self.settings.model_dump(mode="json"), "detection": self.config.model_dump(mode="json")},
            config_hash=config_hash(self.settings),
            classes=self.train_set.category_names,
            data={"samples": self.schedule.images, "fingerprint": self.train_set.digest},
            world_size=self.world.size,
            zero_stage=0,
            last_step=self.schedule.last_step,
            evaluation_due=self.evaluation_due,
        )


def connect_and_train(config: DetectionConfig, stop: StopSignal) -> int:
    """Join the other ranks and train to the end of the schedule, from the newest intact checkpoint if there is one.

    Returns:
        The exit code: 0 at the end, ``PREEMPTED`` after a signal, with a checkpoint.

    Raises:
        UserError: config, annotations, images and run folder do not fit together, or a gradient is not finite.
    """
    folder = Path(config.output_dir)
    world = init_world(config.distributed.collective_timeout, folder)
    torch.backends.cudnn.benchmark = False  # images differ in size, and each size would be tried out
    with Heartbeat(world, config.distributed, folder) as heartbeat, ExitStack() as stack:
        run = _start(config, world, stop, heartbeat, stack)
        stopped = run is not None and _train(run)
    disconnect()
    return PREEMPTED if stopped else 0


def _start(config: DetectionConfig, world: World, stop: StopSignal, heartbeat: Heartbeat, stack: ExitStack) -> Run | None:
    """Read the data, build the model, load the newest checkpoint. None if there is nothing left to train. Collective."""
    train_set, val_set = _read_sets(config, world)
    folder, train, images = Path(config.output_dir), config.train, len(train_set.trained)
    settings = config.for_package(len(train_set.category_ids))
    accumulation = accumulation_steps(settings.train, world.size)
    schedule = Schedule(images, train.global_batch_size, train.epochs, train.max_steps)
    if lock := open_run_folder(folder, world):
        stack.callback(lock.release)
    do_in_main(lambda: sweep(folder), world)
    verified = loading.newest_intact(folder, world)
    before = verified.state if verified else None
    if before:
        check_same_run(config, train_set.digest, before)
        if is_complete(before.step, before.evaluation_due, schedule.last_step):
            say_once(world, f"{folder} is complete at step {before.step}: nothing to train")
            return None
    torch.manual_seed(config.seed)  # equal weights on all ranks
    model, notes = build_detector(config, len(train_set.category_ids), fresh=before is None)
    engine = build_engine(model, settings, world, _all_decayed(model, settings))
    if verified:
        loading.load(engine, verified, None, world)
    step, agreement = before.step if before else 0, Agreement(config.distributed.collective_timeout)
    log = RunLog(settings, world, step, schedule, flops_per_image=None)
    stack.callback(log.close)
    do_in_main(lambda: replace_text(folder / CONFIG, config_to_yaml(config)), world)
    for sentence in dict.fromkeys((*train_set.notes, *val_set.notes, *notes)):
        log.say(sentence)
    log.say(
        f"{config.model.detector} on {config.model.name}, {world.device}: {sum(map(torch.numel, model.parameters())):,} parameters; "
        f"{images:,} training and {len(val_set.images):,} validation images, {len(train_set.category_ids)} categories; batch "
        f"{train.global_batch_size} = {train.micro_batch_size} x {world.size} x {accumulation}; steps {step} to {schedule.last_step}"
    )
    statistics = StepStatistics(nn.Identity() if model.frozen else model, world)  # of a frozen model there are none
    saver = Saver(folder, world, settings.checkpoint, agreement, partial(heartbeat.still, "saving"))
    due = before.evaluation_due if before else False
    parts = (config, settings, world, stop, heartbeat, train_set, val_set, schedule, engine, statistics, agreement, saver, log)
    return Run(*parts, step, due)


def _read_sets(config: DetectionConfig, world: World) -> tuple[CocoSet, CocoSet]:
    data, error = config.data, None
    try:
        train = read_coco(Path(data.train_annotations), Path(data.train_images), config.has_masks, "data.train_annotations")
        val = read_coco(Path(data.val_annotations), Path(data.val_images), config.has_masks, "data.val_annotations")
        check_sets(train, val)
    except UserError as problem:
        error = problem
    raise_on_all(error, world)
    return train, val


def check_same_run(config: DetectionConfig, data: str, before: RunState) -> None:
    """Check that a run continues with its config and its data, whose digest is ``data``.

    Raises:
        UserError: a key differs that determines the weights, or the training annotations do.
    """
    begun, now = before.config.get("detection"), flatten(config)
    if begun is None:
        raise UserError(f"{config.output_dir} has the checkpoints of a classifier", "choose another output_dir")
    earlier = flatten(DetectionConfig.model_validate(begun))
    changed = [key for key in now if not is_free(key) and earlier[key] != now[key]]
    if changed:
        first = changed[0]
        more = f" and {len(changed) - 1} more keys" if len(changed) > 1 else ""
        problem = f"{config.output_dir} was started with {first}={earlier[first]}, got {now[first]}{more}"
        raise UserError(problem, "set it back, or choose another output_dir")
    if before.data["fingerprint"] != data:
        problem = f"{config.output_dir} was started with other annotations than {config.data.train_annotations}"
        raise UserError(problem, "set data.train_annotations back, or choose another output_dir")


def _all_decayed(model: nn.Module, settings: Config) -> torch.optim.Optimizer:
    """AdamW with one group, norms and biases too, as by mmdetection's default; the package's own groups leave those out."""
    trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    group = {
        "params": list(trained.values()),
        "names": list(trained),
        "weight_decay": settings.optim.weight_decay,
        MATRICES: False,
    }
    return optimizer_description(settings.optim).build([group], settings.optim)


def learning_rate(step: int, schedule: Schedule, config: DetectionConfig) -> float:
    """Linear warm-up, then multi-step decay, both by the step, as mmdetection's 1x schedule.

    Args:
        step: optimizer steps before this one.
    """
    optim = config.optim
    decays = sum(schedule.epoch(step) >= epoch for epoch in optim.decay_epochs)
    rate = optim.lr * optim.decay_factor**decays
    if step >= optim.warmup_steps:
        return rate
    return rate * (optim.warmup_factor + (1 - optim.warmup_factor) * step / optim.warmup_steps)


def _train(run: Run) -> bool:
    """Take the steps of a run until its schedule ends or a rank has to stop; returns whether it was stopped. Collective."""
    stopping = run.agreement.ask(run.stop.received != 0)  # received while the run was built
    if not stopping and run.evaluation_due:
        _complete_step(run, stopping)
    threads = run.config.data.num_threads or run.world.cpu_threads
    with closing(batches(run.train_set.trained, _requests(run), run.config, threads)) as loader:
        while run.step < run.schedule.last_step and not stopping:
            with recording() as metrics:
                _step(run, loader)
            run.log.step(run.step, metrics)
            stopping = run.exchange_status() and run.step < run.schedule.last_step
            run.evaluation_due = run.schedule.passes(run.step, run.config.eval.every_epochs)
            _complete_step(run, stopping)
    run.saver.finish()
    ends = (
        f"stopped by a signal at step {run.step}: the same command resumes from here"
        if stopping
        else f"done at step {run.step}"
    )
    run.log.say(ends)
    return stopping


def _requests(run: Run) -> Iterator[Request]:
    """Of this rank, from the next step on."""
    parts = run.engine.gradient_accumulation_steps() * run.world.size
    for step in itertools.count(run.step):
        for part in range(run.world.rank, parts, run.world.size):
            yield request(run.config, run.schedule.images, step, part, parts)


def _step(run: Run, loader: Iterator[Batch]) -> None:
    """Take one optimizer step, and record its metrics."""
    engine, device, step = run.engine, run.world.device, run.step + 1
    lr = learning_rate(run.step, run.schedule, run.config)
    set_learning_rate(engine, lr)
    engine.train()
    run.statistics.begin()
    for number in micro_batches(engine):
        run.heartbeat.at(step, "reading data")
        asked = time.perf_counter()
        batch = next(loader)
        record("data_wait", time.perf_counter() - asked, reduce="slowest")
        run.heartbeat.at(step, "training")
        run.statistics.micro_batch(number)
        count = engine.module.pyramid.features.noise_per_sample
        noise = batch.request.noise(run.config.seed, count).to(device) if count else None
        losses = engine(*batch.to(device), noise, batch.request.torch_seed.tolist())
        loss = torch.stack(list(losses.values())).sum()
        engine.backward(loss)
        grad_norm = optimizer_step(engine)
        for name, value in {"loss": loss, **losses}.items():
            record(name, value)
    assert grad_norm is not None  # the last micro-batch completes the step
    if not math.isfinite(grad_norm):
        raise UserError(
            f"the gradient of step {step} must be finite, got {float(grad_norm)}",
            "lower optim.lr, raise optim.warmup_steps, or set optim.clip_grad_norm; the newest checkpoint is from before this step",
        )
    run.statistics.end(taken=True)
    record("lr", lr, reduce="max")
    record("grad_norm", grad_norm, reduce="max")
    run.step = step


def _complete_step(run: Run, stopping: bool) -> None:
    """After a step, evaluate and save a checkpoint if they are due; with ``stopping`` the next start evaluates."""
    every = run.config.checkpoint.every_steps
    saves = stopping or run.evaluation_due or (every is not None and run.step % every == 0)
    if run.evaluation_due and not stopping:
        run.log.flush()
        alive = partial(run.heartbeat.at, run.step, "evaluating")
        run.log.scores(run.step, evaluate(run.config, run.engine.module, run.val_set, run.world, alive))
        run.evaluation_due = False
    if saves:
        run.heartbeat.at(run.step, "saving")
        run.log.flush(to_disk=True)  # the rows that lead to a checkpoint are there when it is
        run.saver.save(run.engine, None, run.state())
        run.log.restart_clock()
