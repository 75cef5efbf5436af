"""Start a run up to its first step, taken on random images, without writing anything: ``pipeline.train --dry-run``.

All checks are those of a real start, in its order, so that what would stop a start stops the dry run with the same sentence. Left
out: compiling (``train.compile``), whose cache is files, and evaluation.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from pipeline.checkpoint.folder import FOLDER
from pipeline.checkpoint.rank_slices import saved_tensors
from pipeline.cluster.agreement import do_in_main, raise_on_all
from pipeline.cluster.environment import StopSignal
from pipeline.cluster.heartbeat import Heartbeat
from pipeline.cluster.world import World
from pipeline.config import Config, DataConfig
from pipeline.errors import PREEMPTED, UserError, counted
from pipeline.files import check_space, free_bytes, write_error
from pipeline.hardware import memory_gib
from pipeline.loader.loader import Batch
from pipeline.logs.run_files import check_run_files
from pipeline.optim.build import learning_rate
from pipeline.shards.files.cached import cache_of, check_cache
from pipeline.shards.mixed_set import MixedSet
from pipeline.shards.shard_set import ShardSet
from pipeline.step.precision import refusals_explained
from pipeline.step.train_step import train_step
from pipeline.training.building import say, training_loader
from pipeline.training.compiling import OFF
from pipeline.training.lock import check_lock
from pipeline.training.settle import check_alone
from pipeline.training.start import PreparedRun, Start

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

    Returns:
        The exit code: 0 if a real start would train, or has nothing left to train; ``PREEMPTED`` after a signal.

    Raises:
        UserError: what a real start would raise.
    """
    start = Start(config, world, look_only=True)
    check_alone(config, world)
    with Heartbeat(world, config.distributed) as heartbeat, refusals_explained():
        data = start.open_data(cached=False)  # the node's cache, which reading would fill
        cache = _check_on_all(lambda: check_cache_room(config.data, (data.train_set, data.val_set)), world)
        do_in_main(lambda: check_lock(start.folder), world)
        verified = start.find_checkpoint(data.train_set)
        if start.is_complete(data, verified):
            return 0
        prepared = start.prepare(data, verified)
        do_in_main(lambda: check_run_files(start.folder), world)
        if any(world.gather(stop.received)):
            say(world, _STOPPED)
            return PREEMPTED
        heartbeat.at(0, "training")
        step, train_state = _take_step(prepared, world), prepared.built.train_state
        saved = sum(tensor.nbytes for tensor in saved_tensors(train_state.engine, train_state.ema, world).values())
        checkpoint_bytes = sum(world.gather(saved))
        do_in_main(lambda: check_room(start.folder, checkpoint_bytes), world)
        heartbeat.still("ending")
        if world.is_main:
            print("\n".join(_summary(prepared, world, step, checkpoint_bytes, cache)), flush=True)
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


def _take_step(prepared: PreparedRun, world: World) -> _Step:
    """One optimizer step, of the first micro-batches only, with the labels and augmentation of the first batch and random pixels."""
    config, train_state, schedule = prepared.settled.config, prepared.built.train_state, prepared.data.schedule
    batch, read_seconds = _fake_batch(prepared, world)
    lr = learning_rate(prepared.step, schedule.steps_per_epoch, schedule.epochs, schedule.global_batch_size, config.optim)
    count = min(_MICRO_BATCHES, prepared.settled.accumulation)
    train_state.engine.train()
    began = time.perf_counter()
    result = train_step(train_state, lambda: batch, lr, config.seed, count=count)
    loss = (world.sum(result.loss) / world.size).item()  # waits for the device
    seconds = time.perf_counter() - began
    peak = max(world.gather(memory_gib(world.device)[1]))
    return _Step(count, loss, float(result.grad_norm), seconds, read_seconds, peak)


def _fake_batch(prepared: PreparedRun, world: World) -> tuple[Batch, float]:
    """The run's next batch, read and decoded, with random pixels instead of its own; and the seconds until it was there."""
    began, settled = time.perf_counter(), prepared.settled
    loader = training_loader(prepared.data.train_set, settled.config, settled.decode, world, prepared.step)
    try:
        batch = next(loader)
        seconds = time.perf_counter() - began
        generator = torch.Generator(world.device).manual_seed(settled.config.seed)
        pixels = torch.randn(batch.images.shape, generator=generator, device=world.device)  # (B, 3, S, S)
        return replace(batch, images=pixels), seconds
    finally:
        loader.close()


def check_room(folder: Path, needed: int) -> None:
    """Check that a checkpoint of ``needed`` bytes fits."""
    try:
        check_space(folder, needed)
    except OSError as error:
        raise write_error(folder / FOLDER, error) from None


def check_cache_room(data: DataConfig, sets: Iterable[ShardSet | MixedSet]) -> str | None:
    """Look at the cache on this node, of which a training only warns, and write nothing; how much of the
    shards is there and fits, None without a cache.

    Raises:
        UserError: the folder cannot be written on this node, is that of the shards, or has no room for one of them.
    """
    cache = cache_of(data)
    if cache is None:
        return None
    parts = [part for split in sets for part in split.sets]
    for part in parts:
        check_cache(cache, part.files, "data.cache")
    folder, host = cache.folder, socket.gethostname()
    if why := _refusal(folder):
        raise UserError(
            f"data.cache {folder} cannot be used on {host}: {why}",
            "have it made on every node, choose another folder, or leave data.cache out",
        )
    shards = {cache.path(shard): shard.bytes for part in parts for shard in part.info.shards}
    wanted, largest = sum(shards.values()), max(shards.values())
    there = sum(size for path, size in shards.items() if path.is_file() and path.stat().st_size == size)
    room = cache.room()
    if room < largest:
        limit = "" if cache.limit is None else f"; data.cache_gib={data.cache_gib:g}"
        raise UserError(
            f"data.cache {folder} on {host} must have room for one shard, {largest / 1e6:,.1f} MB, got {max(room, 0) / 1e6:,.1f} MB "
            f"(the last {cache.keep_free:.0%} of the disk stay free{limit})",
            "free some space, or choose another folder",
        )
    fits = "all of it fits" if room >= wanted else f"{room / 1e9:,.2f} GB fit, the rest is read from data.path"
    return f"{folder} on {host}: {there / 1e9:,.2f} of {wanted / 1e9:,.2f} GB there; {fits}"


def _refusal(folder: Path) -> str:
    """Why shards cannot be written into a folder, which is made if the one that it is in is there; empty if they can."""
    if folder.exists():
        if not folder.is_dir():
            return "it is not a folder"
        return "" if os.access(folder, os.W_OK | os.X_OK) else "it cannot be written to"
    if not folder.absolute().parent.is_dir():
        return f"{folder.absolute().parent} does not exist"
    return "" if os.access(folder.absolute().parent, os.W_OK | os.X_OK) else f"{folder.absolute().parent} cannot be written to"


def _summary(prepared: PreparedRun, world: World, step: _Step, checkpoint_bytes: int, cache: str | None) -> list[str]:
    """What a person reads: a line, and a table of what was found."""
    settled, data, config = prepared.settled, prepared.data, prepared.settled.config
    processes = counted(world.size, "process")
    last = f"the last is step {data.schedule.last_step:,}"
    where = f"resumes from step {prepared.step:,}" if prepared.before else "a new run"
    kept = config.checkpoint.keep_last + config.checkpoint.keep_best + 1
    rows = {
        "run": f"{config.output_dir}: {where}; {last}",
        "data": f"{data.description()}; a batch was read in {step.read_seconds:.1f} s",
        "model": f"{config.model.name}, {prepared.built.cost.params:,} parameters, on {world.device}; {settled.precision}",
        "batch": f"{config.train.global_batch_size} = {config.train.micro_batch} x {processes} x {settled.accumulation}"
        + (f"; {settled.micro_batch_reason}" if settled.micro_batch_reason else ""),
        "step": f"{step.micro_batches} of {settled.accumulation} micro-batches of random images: loss {step.loss:.4f}, gradient norm "
        f"{step.grad_norm:.3g}, {step.seconds:.1f} s; at most {step.peak_gib:.2f} GiB in a process",
        "checkpoint": f"{checkpoint_bytes / 1e6:,.1f} MB, up to {kept} at a time; {free_bytes(Path(config.output_dir)) / 1e9:,.1f} GB free",
    }
    if cache:
        rows["cache"] = cache
    if settled.compile != OFF:
        rows["not tried"] = f"train.compile={settled.compile}, which a start compiles at its first step"
    width = max(map(len, rows))
    return [
        "the dry run found nothing wrong; no file was written",
        *(f"  {name:<{width}}  {text}" for name, text in rows.items()),
    ]
