"""Train a detector."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from examples.detection import plan
from examples.detection.checkpoints import (
    Manifest,
    check_same_run,
    load_checkpoint,
    newest_checkpoint,
    save_checkpoint,
)
from examples.detection.coco import CocoSet, check_same_categories, check_trainable, read_coco
from examples.detection.config import DetectionConfig
from examples.detection.evaluation import evaluate
from examples.detection.loader import Batch, batches
from examples.detection.log import DetectionLog, Step, was_evaluated
from examples.detection.model import Detector, build_detector
from pipeline.cluster.agreement import Agreement, do_in_main, raise_on_all
from pipeline.cluster.environment import StopSignal
from pipeline.cluster.heartbeat import Heartbeat
from pipeline.cluster.rendezvous import disconnect, init_world
from pipeline.cluster.world import World
from pipeline.config import accumulation_steps
from pipeline.errors import PREEMPTED, UserError
from pipeline.logs import console
from pipeline.optim.averages import StepStatistics
from pipeline.training.folder import RunLock


@dataclass
class Run:
    """What the loop works with."""

    config: DetectionConfig
    world: World
    heartbeat: Heartbeat
    train_set: CocoSet
    val_set: CocoSet
    schedule: plan.Schedule
    model: Detector
    optimizer: torch.optim.AdamW
    statistics: StepStatistics | None  # None: BatchNorm is frozen
    log: DetectionLog
    accumulation: int  # micro-batches per rank and step
    step: int = 0

    @property
    def has_masks(self) -> bool:
        return self.config.model.detector == "mask_rcnn"


def connect_and_train(config: DetectionConfig, stop: StopSignal) -> int:
    """Join the other ranks and train to the end of the schedule, from the newest intact checkpoint if there is one.

    Returns:
        The exit code: 0 at the end, ``PREEMPTED`` after a signal, with a checkpoint.

    Raises:
        UserError: config, annotations, images and run folder do not fit together, or a gradient is not finite.
    """
    world = init_world(config.distributed.collective_timeout, Path(config.output_dir))
    torch.backends.cudnn.benchmark = False  # images differ in size, and each size would be tried out
    with Heartbeat(world, config.distributed, Path(config.output_dir)) as heartbeat, ExitStack() as stack:
        run = _start(config, world, heartbeat, stack)
        code = _train(run, stop, Agreement(config.distributed.collective_timeout)) if run else 0
    disconnect()
    return code


def _start(config: DetectionConfig, world: World, heartbeat: Heartbeat, stack: ExitStack) -> Run | None:
    """Read the data, build the model, load the newest checkpoint. None if there is nothing left to train. Collective."""
    accumulation = accumulation_steps(config.batches, world.size)
    train_set, val_set = _read_sets(config, world)
    run_folder = Path(config.output_dir)
    lock = do_in_main(lambda: RunLock.take(run_folder), world)
    if lock:
        stack.callback(lock.release)
    found = world.gather(vars(do_in_main(lambda: newest_checkpoint(run_folder), world) or Manifest(0, 0, "", {}, "")))[0]
    begun = Manifest(**found)
    schedule = plan.Schedule(
        len(train_set.trained), config.train.epochs, config.train.global_batch_size, config.train.max_steps
    )
    if begun.step:
        check_same_run(config, train_set.digest, begun)
        if begun.step >= schedule.last_step and _is_evaluated(config, world, begun.step):
            if world.is_main:
                console.say(f"{run_folder} is complete at step {begun.step}: nothing to train")
            return None
    torch.manual_seed(config.seed)  # equal weights on all ranks
    model, notes = build_detector(config, len(train_set.category_ids), fresh=not begun.step)
    model.to(world.device)
    optimizer = torch.optim.AdamW(
        (parameter for parameter in model.parameters() if parameter.requires_grad),
        lr=config.optim.lr,
        weight_decay=config.optim.weight_decay,
        fused=True,
    )
    if begun.step:
        load_checkpoint(run_folder, begun.step, model, optimizer)
    log = DetectionLog(config, world, begun.step, schedule.last_step)
    stack.callback(log.close)
    for sentence in (*train_set.notes, *(note for note in val_set.notes if val_set.path != train_set.path), *notes):
        log.say(sentence)
    count = sum(parameter.numel() for parameter in model.parameters())
    log.say(
        f"{config.model.detector} on {config.model.name}, {world.device}: {count:,} parameters; {schedule.images:,} training and "
        f"{len(val_set.images):,} validation images, {len(train_set.category_ids)} categories; batch "
        f"{config.train.global_batch_size} = {config.train.micro_batch_size} x {world.size} x {accumulation}; steps {begun.step} "
        f"to {schedule.last_step}"
    )
    statistics = None if model.frozen else StepStatistics(model, world)
    return Run(
        config, world, heartbeat, train_set, val_set, schedule, model, optimizer, statistics, log, accumulation, begun.step
    )


def _read_sets(config: DetectionConfig, world: World) -> tuple[CocoSet, CocoSet]:
    data, masks, error, sets = config.data, config.model.detector == "mask_rcnn", None, []
    try:
        for split in ("train", "val"):
            key = f"data.{split}_annotations"
            sets.append(
                read_coco(Path(getattr(data, f"{split}_annotations")), Path(getattr(data, f"{split}_images")), masks, key)
            )
        check_same_categories(*sets)
        check_trainable(sets[0])
    except UserError as problem:
        error = problem
    raise_on_all(error, world)
    return sets[0], sets[1]


def _train(run: Run, stop: StopSignal, agreement: Agreement) -> int:
    stopping = agreement.ask(stop.received != 0)
    every = run.config.checkpoint.every_steps
    images, first_label = run.train_set.trained, 1 if run.has_masks else 0
    if run.step and not stopping and _evaluation_is_due(run):  # it was killed during one
        _evaluate(run)
    threads = run.config.data.num_threads or run.world.cpu_threads
    loading = batches(images, _requests(run), run.has_masks, first_label, threads, run.config.data.read_ahead)
    with loading as loader:
        while run.step < run.schedule.last_step and not stopping:
            _step(run, loader)
            stopping = agreement.exchange(stop.received).stop != 0 and run.step < run.schedule.last_step
            evaluates = run.schedule.evaluates(run.step, run.config.eval.every_epochs)
            if stopping or evaluates or (every is not None and run.step % every == 0):
                _save(run)
            if evaluates and not stopping:
                _evaluate(run)
    run.log.say(
        f"stopped by a signal at step {run.step}: the same command continues from here"
        if stopping
        else f"done at step {run.step}"
    )
    return PREEMPTED if stopping else 0


def _requests(run: Run) -> Iterator[plan.Request]:
    """Of this rank, from the next step on."""
    parts = run.accumulation * run.world.size
    for step in itertools.count(run.step):
        for number in range(run.accumulation):
            yield plan.request(run.config, run.schedule.images, step, number * run.world.size + run.world.rank, parts)


def _step(run: Run, loader: Iterator[Batch]) -> None:
    """Take one optimizer step."""
    step, waited = run.step + 1, 0.0
    sums: dict[str, Tensor] = {}  # by name: the mean over this rank's micro-batches
    rate = plan.learning_rate(run.step, run.schedule, run.config)
    for group in run.optimizer.param_groups:
        group["lr"] = rate
    run.model.train()
    run.optimizer.zero_grad()
    if run.statistics:
        run.statistics.begin()
    for number in range(run.accumulation):
        run.heartbeat.at(step, "reading data")
        started = time.perf_counter()
        batch = next(loader)
        waited += time.perf_counter() - started
        run.heartbeat.at(step, "training")
        if run.statistics:
            run.statistics.micro_batch(number)
        losses = run.model.losses(*batch.to(run.world.device), _noise(run, batch), batch.request.torch_seed.tolist())
        torch.stack(list(losses.values())).sum().div(run.accumulation).backward()
        for name, loss in losses.items():
            mean = loss.detach() / run.accumulation
            sums[name] = sums[name] + mean if name in sums else mean
    norm = _reduce_gradients(run)
    if not math.isfinite(norm):
        raise UserError(
            f"the gradient of step {step} must be finite, got {norm}",
            "lower optim.lr, raise optim.warmup_steps, or set optim.clip_grad_norm; the newest checkpoint is from before this step",
        )
    run.optimizer.step()
    if run.statistics:
        run.statistics.end(taken=True)
    run.step = step
    run.log.step(Step(step, run.schedule.epoch(step), rate, sums, norm, waited))


def _noise(run: Run, batch: Batch) -> Tensor | None:
    """The backbone's uniform numbers (B, noise_per_sample), a function of each image's place in the stream."""
    count = run.model.noise_per_sample
    if not count:
        return None
    noise = plan.noise(batch.request, run.config.seed, count)
    return torch.from_numpy(np.minimum(noise, np.float32(1 - 2.0**-24))).to(
        run.world.device
    )  # rounded to 1 it would be no longer in [0, 1)


def _reduce_gradients(run: Run) -> float:
    """Average the gradients over all ranks as one tensor, clip them; returns their norm before that. Collective.

    A parameter that the detector does not use has no gradient, on any rank alike.
    """
    gradients = [parameter.grad for parameter in run.model.parameters() if parameter.grad is not None]
    if run.world.size > 1:
        flat = torch.cat([gradient.flatten() for gradient in gradients])
        run.world.sum(flat).div_(run.world.size)
        for gradient, mean in zip(gradients, flat.split([gradient.numel() for gradient in gradients])):
            gradient.copy_(mean.view_as(gradient))
    limit = run.config.optim.clip_grad_norm
    return float(torch.nn.utils.clip_grad_norm_(run.model.parameters(), math.inf if limit is None else limit))


def _save(run: Run) -> None:
    run.heartbeat.at(run.step, "saving")
    run.log.flush()  # the rows that lead to a checkpoint are there when it is
    do_in_main(lambda: save_checkpoint(run.config, run.step, run.train_set.digest, run.model, run.optimizer), run.world)
    run.log.restart_clock()


def _evaluation_is_due(run: Run) -> bool:
    if not run.schedule.evaluates(run.step, run.config.eval.every_epochs):
        return False
    return not _is_evaluated(run.config, run.world, run.step)


def _is_evaluated(config: DetectionConfig, world: World, step: int) -> bool:
    """What rank 0 finds in its log. Collective."""
    return world.gather(do_in_main(lambda: was_evaluated(Path(config.output_dir), step), world))[0]


def _evaluate(run: Run) -> None:
    results = evaluate(run.config, run.model, run.val_set, run.world, run.heartbeat, run.step)
    run.log.evaluation(run.step, run.schedule.epoch(run.step), results)
