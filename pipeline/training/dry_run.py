"""Start a run up to its first step, taken on random images, without writing anything: ``pipeline.train --dry-run``.

All checks are those of a real start, in its order, so that what would stop a start stops the dry run with the same sentence. Left
out: compiling (``train.compile``), whose cache is files, and evaluation.
"""

import os
import socket
import sys
import time
from collections.abc import Iterable
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import torch

from pipeline.checkpoint.folder import FOLDER
from pipeline.checkpoint.rank_slices import saved_tensors
from pipeline.cluster.agreement import do_in_main, do_on_all
from pipeline.cluster.heartbeat import Heartbeat
from pipeline.cluster.world import World
from pipeline.config import Config, DataConfig
from pipeline.errors import UserError, counted
from pipeline.files import being_written, check_space, free_bytes
from pipeline.hardware import memory_gib
from pipeline.logs.console import say_once, stage
from pipeline.logs.run_files import check_run_files
from pipeline.optim.build import learning_rate
from pipeline.shards.files.cached import cache_of, check_cache
from pipeline.shards.mixed_set import MixedSet
from pipeline.shards.shard_set import ShardSet
from pipeline.step.precision import refusals_explained
from pipeline.step.train_step import train_step
from pipeline.terminal import fitted
from pipeline.training.building import check_alone, training_loader
from pipeline.training.compiling import OFF
from pipeline.training.folder import check_lock
from pipeline.training.micro_batch import MICRO_BATCHES
from pipeline.training.start import PreparedRun, Start


def dry_run(config: Config, world: World) -> int:
    """Check everything that a start checks, build everything that it builds, and take a step. Collective. Returns the exit code: 0 if
    a real start would train, or has nothing left to train."""
    start = Start(config, world, look_only=True)
    check_alone(config, world)
    with Heartbeat(world, config.distributed) as heartbeat, refusals_explained():
        data = start.open_data(cached=False)  # the node's cache, which reading would fill
        cache = do_on_all(lambda: check_cache_room(config.data, (data.train_set, data.val_set)), world)  # nodes may differ
        do_in_main(lambda: check_lock(start.folder), world)
        with stage("building the model and the optimizer"):
            prepared = start.prepare(data)
        if prepared is None:
            return 0
        do_in_main(lambda: check_run_files(start.folder), world)
        heartbeat.at(0, "training")
        read_seconds, step = _take_step(prepared, world)
        train_state = prepared.train_state
        saved = sum(tensor.nbytes for tensor in saved_tensors(train_state.engine, train_state.ema, world).values())
        checkpoint_bytes = sum(world.gather(saved))
        do_in_main(lambda: check_room(start.folder, checkpoint_bytes), world)
        heartbeat.still("ending")
        if world.is_main:
            print(fitted(_summary(prepared, world, read_seconds, step, checkpoint_bytes, cache), sys.stdout), flush=True)
    return 0


def _take_step(prepared: PreparedRun, world: World) -> tuple[float, str]:
    """Take an optimizer step, of the first micro-batches only, with the run's next batch, but random pixels. Returns seconds
    until the batch was there; and what the step was, for people."""
    settled, train_state, schedule = prepared.settled, prepared.train_state, prepared.data.schedule
    config, began = settled.config, time.perf_counter()
    say_once(world, f"reading a batch of {counted(config.train.micro_batch, 'image')}")
    made = training_loader(prepared.data.train_set, settled, world, prepared.step, train_state.engine.module)
    with closing(made) as loader:
        with stage("reading a batch"):
            batch = next(loader)
        read_seconds = time.perf_counter() - began
        generator = torch.Generator(world.device).manual_seed(config.seed)
        batch = replace(batch, images=torch.randn(batch.images.shape, generator=generator, device=world.device))  # (B, 3, S, S)
    lr = learning_rate(prepared.step, schedule.steps_per_epoch, schedule.epochs, schedule.global_batch_size, config.optim)
    count = min(MICRO_BATCHES, settled.accumulation)
    train_state.engine.train()
    images = counted(count * config.train.micro_batch, "random image")
    say_once(world, f"a step on {images}: {count} of {counted(settled.accumulation, 'micro-batch')}, forward and backward")
    began = time.perf_counter()
    with stage("taking a step"):
        result = train_step(train_state, lambda: batch, lr, config.seed, count=count)
        loss = (world.sum(result.loss) / world.size).item()  # waits for the device
    seconds = time.perf_counter() - began
    peak = max(world.gather(memory_gib(world.device)[1]))
    return read_seconds, (
        f"{count} of {settled.accumulation} micro-batches of random images: loss {loss:.4f}, gradient norm "
        f"{float(result.grad_norm):.3g}, {seconds:.1f} s; at most {peak:.2f} GiB in a process"
    )


def check_room(folder: Path, needed: int) -> None:
    """Check that a checkpoint of ``needed`` bytes fits."""
    with being_written(folder / FOLDER):
        check_space(folder, needed)


def check_cache_room(data: DataConfig, sets: Iterable[ShardSet | MixedSet]) -> str | None:
    """Say how much of the shards the node's cache has and has room for; None without a cache. Nothing is written. Raises
    UserError: the folder cannot be written on this node, is that of the shards, or has no room for one of them: what a training
    only warns of."""
    cache = cache_of(data)
    if cache is None:
        return None
    parts = [part for split in sets for part in split.sets]
    for part in parts:
        check_cache(cache, part.files, "data.cache")
    folder, host = cache.folder, socket.gethostname()
    if why := _refusal(folder):
        problem = f"data.cache {folder} cannot be used on {host}: {why}"
        raise UserError(problem, "have it made on every node, choose another folder, or leave data.cache out")
    shards = {cache.path(shard): shard.bytes for part in parts for shard in part.info.shards}
    wanted, largest = sum(shards.values()), max(shards.values())
    there = sum(size for path, size in shards.items() if path.is_file() and path.stat().st_size == size)
    room = cache.room()
    if room < largest:
        limit = "" if cache.limit is None else f"; data.cache_gib={data.cache_gib:g}"
        got = f"{max(room, 0) / 1e6:,.1f} MB (the last {cache.keep_free:.0%} of the disk stay free{limit})"
        problem = f"data.cache {folder} on {host} must have room for one shard, {largest / 1e6:,.1f} MB, got {got}"
        raise UserError(problem, "free some space, or choose another folder")
    fits = "all of it fits" if room >= wanted else f"{room / 1e9:,.2f} GB fit, the rest is read from data.path"
    return f"{folder} on {host}: {there / 1e9:,.2f} of {wanted / 1e9:,.2f} GB there; {fits}"


def _refusal(folder: Path) -> str:
    """Why shards cannot be written into a folder, which is made if the one that it is in is there; empty if they can."""
    parent = folder.absolute().parent
    if folder.exists():
        if not folder.is_dir():
            return "it is not a folder"
        return "" if os.access(folder, os.W_OK | os.X_OK) else "it cannot be written to"
    if not parent.is_dir():
        return f"{parent} does not exist"
    return "" if os.access(parent, os.W_OK | os.X_OK) else f"{parent} cannot be written to"


def _summary(
    prepared: PreparedRun, world: World, read_seconds: float, step: str, checkpoint_bytes: int, cache: str | None
) -> str:
    """What a person reads: a line, and a table of what was found."""
    settled, data, config = prepared.settled, prepared.data, prepared.settled.config
    where = f"resumes from step {prepared.step:,}" if prepared.before else "a new run"
    batch = f"{config.train.global_batch_size} = {config.train.micro_batch} x {counted(world.size, 'process')} x {settled.accumulation}"
    kept = config.checkpoint.keep_last + config.checkpoint.keep_best + 1
    rows = {
        "run": f"{config.output_dir}: {where}; the last is step {data.schedule.last_step:,}",
        "data": f"{data.description()}; a batch was read in {read_seconds:.1f} s",
        "model": f"{config.model.name}, {prepared.cost.params:,} parameters, on {world.device}; {settled.precision}",
        "batch": f"{batch}; {settled.micro_batch_reason}" if settled.micro_batch_reason else batch,
        "step": step,
        "checkpoint": f"{checkpoint_bytes / 1e6:,.1f} MB, up to {kept} at a time; {free_bytes(config.folder) / 1e9:,.1f} GB free",
        "cache": cache,
        "not tried": settled.compile != OFF and f"train.compile={settled.compile}, which a start compiles at its first step",
    }
    width = max(len(name) for name, text in rows.items() if text)
    lines = [f"  {name:<{width}}  {text}" for name, text in rows.items() if text]
    return "\n".join(["the dry run found nothing wrong; no file was written", *lines])
