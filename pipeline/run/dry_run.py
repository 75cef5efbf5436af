"""``pipeline.train --dry-run``: a start up to its first step, which is taken on random images, without writing anything.

All checks are those of a real start, in its order, so that what would stop a start stops the dry run with the same sentence. Left
out: compiling (``train.compile``), whose cache is files, and evaluation.
"""

from __future__ import annotations

import errno
import os
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from pipeline.checkpoint.folder import FOLDER
from pipeline.checkpoint.snapshot import saved_tensors
from pipeline.config import Config, accumulation_steps
from pipeline.data.loader import Batch
from pipeline.distributed.agreement import do_in_main, raise_on_all
from pipeline.distributed.world import World
from pipeline.errors import PREEMPTED, UserError
from pipeline.faults.heartbeat import Heartbeat
from pipeline.faults.stop_signal import StopSignal
from pipeline.files import write_error
from pipeline.hardware import memory_gib
from pipeline.logs import console
from pipeline.logs.run_files import check_run_files
from pipeline.optim.learning_rate import learning_rate
from pipeline.run.building import check_alone
from pipeline.run.cache_room import check_cache_room
from pipeline.run.compiling import OFF, choose_compilation
from pipeline.run.decoding import training_loader
from pipeline.run.determinism import refusals_explained
from pipeline.run.lock import check_lock
from pipeline.run.start import Ready, RunData, find_start, nothing_to_train, open_data, prepare
from pipeline.step.train_step import train_step

_MICRO_BATCHES = 2  # of the step: with the second, gradients and activations are in memory together, as in all that follow
_STOPPED = "stopped by a signal: a dry run has nothing to save"


@dataclass(frozen=True)
class _Step:
    """The step on random images."""

    micro_batches: int
    loss: float
    grad_norm: float
    seconds: float
    read_seconds: float  # for the one real batch that was read
    peak_gib: float  # of the process that took most


def dry_run(config: Config, world: World, stop: StopSignal) -> int:
    """Check everything that a start checks, build everything that it builds, and take a step. Collective.

    Args:
        config: the run.
        world: all ranks.
        stop: tells whether this process has received a signal to stop.

    Returns:
        The exit code: 0 if a real start would train, or has nothing left to train; ``PREEMPTED`` after a signal.

    Raises:
        UserError: what a real start would raise.
    """
    folder = Path(config.output_dir)
    check_alone(config, world)
    with Heartbeat(world, config.distributed) as heartbeat, refusals_explained():
        # Without the node's cache, which reading would fill.
        data = open_data(config.model_copy(update={"data": config.data.model_copy(update={"cache": None})}), world)
        cache = _check_on_all(lambda: check_cache_room(config, (data.train_set, data.val_set)), world)
        do_in_main(lambda: check_lock(folder), world)
        verified = find_start(config, world, data.train_set, look_only=True)
        if said := nothing_to_train(config, data.schedule, verified):
            return _end(world, said)
        ready = prepare(config, world, data, verified)
        do_in_main(lambda: check_run_files(folder), world)
        if any(world.gather(stop.received)):
            return _end(world, _STOPPED, PREEMPTED)
        heartbeat.at(0, "training")
        step = _take_step(ready, data, world)
        sizes = world.gather(
            sum(each.nbytes for each in saved_tensors(ready.trained.engine, ready.trained.ema, world).values())
        )
        do_in_main(lambda: check_space(folder, sum(sizes)), world)
        heartbeat.still("ending")
        if world.is_main:
            print("\n".join(_summary(ready, data, world, step, sum(sizes), cache)), flush=True)
    return 0


def _check_on_all(check: Callable[[], str | None], world: World) -> str | None:
    """Call ``check`` on every rank, whose nodes may differ; the result of this one."""
    found = failure = None
    try:
        found = check()
    except UserError as error:
        failure = error
    raise_on_all(failure, world)
    return found


def _end(world: World, sentence: str, code: int = 0) -> int:
    if world.is_main:
        console.say(sentence)
    return code


def _take_step(ready: Ready, data: RunData, world: World) -> _Step:
    """One optimizer step, of the first micro-batches only, with the labels and augmentation of the first batch and random pixels."""
    config, trained, step = ready.config, ready.trained, ready.before.step if ready.before else 0
    batch, read_seconds = _fake_batch(ready, data, world, step)
    epochs, per_epoch = data.schedule.epochs, data.schedule.steps_per_epoch
    lr = learning_rate(step, per_epoch, epochs, config.train.global_batch_size, config.optim)
    count = min(_MICRO_BATCHES, trained.engine.gradient_accumulation_steps())
    trained.engine.train()
    began = time.perf_counter()
    result = train_step(trained, lambda: batch, lr, config.seed, count=count)
    loss = (world.sum(result.loss) / world.size).item()  # waits for the device
    seconds = time.perf_counter() - began
    peak = max(world.gather(memory_gib(world.device)[1]))
    return _Step(count, loss, float(result.grad_norm), seconds, read_seconds, peak)


def _fake_batch(ready: Ready, data: RunData, world: World, step: int) -> tuple[Batch, float]:
    """The run's next batch, read and decoded, with random pixels in place of its own; and the seconds until it was there."""
    began = time.perf_counter()
    loader = training_loader(data.train_set, ready.config, ready.decode, world, step)
    try:
        batch = next(loader)
        seconds = time.perf_counter() - began
        generator = torch.Generator(world.device).manual_seed(ready.config.seed)
        pixels = torch.randn(batch.images.shape, generator=generator, device=world.device)  # (B, 3, S, S)
        return replace(batch, images=pixels), seconds
    finally:
        loader.close()


def check_space(folder: Path, needed: int) -> None:
    """Check that a checkpoint of ``needed`` bytes fits.

    Raises:
        UserError: it does not.
    """
    if _free(folder) < needed:
        raise write_error(folder / FOLDER, OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)))


def _free(folder: Path) -> int:
    """Bytes free where the folder is, or will be."""
    return shutil.disk_usage(next(each for each in (folder.absolute(), *folder.absolute().parents) if each.exists())).free


def _summary(ready: Ready, data: RunData, world: World, step: _Step, checkpoint_bytes: int, cache: str | None) -> list[str]:
    """What a person reads: a line, and a table of what was found."""
    config, before, schedule = ready.config, ready.before, data.schedule
    accumulation = accumulation_steps(config.train, world.size)
    processes = f"{world.size} process{'' if world.size == 1 else 'es'}"
    last = f"the last is step {schedule.last_step:,}"
    where = f"goes on from step {before.step:,}" if before else "a new run"
    kept = config.checkpoint.keep_last + config.checkpoint.keep_best + 1
    compilation = choose_compilation(config, world)
    rows = {
        "run": f"{config.output_dir}: {where}; {last}",
        "data": f"{data.description()}; a batch was read in {step.read_seconds:.1f} s",
        "model": f"{config.model.name}, {ready.cost.params:,} parameters, on {world.device}; {ready.precision}",
        "batch": f"{config.train.global_batch_size} = {config.train.micro_batch} x {processes} x {accumulation}"
        + (f"; {ready.micro_batch}" if ready.micro_batch else ""),
        "step": f"{step.micro_batches} of {accumulation} micro-batches of random images: loss {step.loss:.4f}, gradient norm "
        f"{step.grad_norm:.3g}, {step.seconds:.1f} s; at most {step.peak_gib:.2f} GiB in a process",
        "checkpoint": f"{checkpoint_bytes / 1e6:,.1f} MB, up to {kept} at a time; {_free(Path(config.output_dir)) / 1e9:,.1f} GB free",
    }
    if cache:
        rows["cache"] = cache
    if compilation != OFF:
        rows["not tried"] = f"train.compile={compilation}, which a start compiles at its first step"
    width = max(map(len, rows))
    return [
        "the dry run found nothing wrong; no file was written",
        *(f"  {name:<{width}}  {text}" for name, text in rows.items()),
    ]
