"""``train.micro_batch_size: auto``: the largest micro-batch that fits, settled once for a run.

A new run takes the largest that :mod:`pipeline.planning.memory` allows and a trial step confirms, the same on all ranks. It is written
to the run's config, environment and checkpoints as a number, and later starts keep it: all draws and mixing groups depend on places in
the global batch, but BatchNorm normalizes over a micro-batch, and sums are rounded by it. A later start takes a smaller one only where
its number of processes does not divide the global batch by this one, or where it does not fit into another kind of GPU.
"""

from __future__ import annotations

import socket
from dataclasses import dataclass, replace
from pathlib import Path

import psutil
import torch

from pipeline import checkpoint
from pipeline.config import AUTO, Config, load_config
from pipeline.config.accumulation import fitting_micro_batches
from pipeline.distributed.agreement import do_in_main
from pipeline.distributed.world import World
from pipeline.errors import UserError
from pipeline.hardware import DEFAULT_GPU, gpu_named
from pipeline.logs import console
from pipeline.logs.run_files import AUTO_REASON, CONFIG, earlier_starts
from pipeline.planning.memory import largest_micro_batch, plan_memory
from pipeline.planning.subject import Subject
from pipeline.run.folder import config_hash
from pipeline.run.trial_step import try_step


@dataclass(frozen=True)
class MicroBatch:
    """The size that a start takes."""

    size: int  # images per forward pass and rank
    reason: str | None  # why, for the log; None: the config states the number


def with_micro_batch(config: Config, size: int) -> Config:
    """The config with ``train.micro_batch_size`` settled."""
    return config.model_copy(update={"train": config.train.model_copy(update={"micro_batch_size": size})})


def choose_micro_batch(config: Config, before: checkpoint.RunState | None, world: World) -> MicroBatch:
    """Settle ``train.micro_batch_size`` for all ranks alike. Collective.

    Args:
        config: of this start, with its precision settled.
        before: the checkpoint that it goes on from; None: there is none.
        world: all ranks.

    Raises:
        UserError: on every rank: no micro-batch fits.
    """
    if config.train.micro_batch_size != AUTO:
        return MicroBatch(config.train.micro_batch, None)
    sizes = fitting_micro_batches(config.train, world.size, config.augment.unit)
    begun, device = world.from_main(do_in_main(lambda: _begun_with(config, before), world))
    chosen = _keep(config, world, sizes, begun, device) if begun else _largest(config, world, sizes)
    if world.is_main:
        console.say(f"train.micro_batch_size is {chosen.size}: {chosen.reason}")
    return chosen


def _begun_with(config: Config, before: checkpoint.RunState | None) -> list[int | str | None]:
    """The size of the run so far and the device of its last start; None: there is none.

    A start that was stopped before its first checkpoint counts if it left its choice to ``auto`` in the same run: what is begun again
    then repeats it.
    """
    starts = earlier_starts(Path(config.output_dir))
    last = starts[-1] if starts else {}
    if before:
        return [before.config["train"]["micro_batch_size"], last.get("device")]
    try:
        same = AUTO_REASON in last and config_hash(load_config(Path(config.output_dir) / CONFIG)) == config_hash(config)
    except UserError:
        same = False
    return [last.get("micro_batch_size"), last.get("device")] if same else [None, None]


def _keep(config: Config, world: World, sizes: list[int], begun: int, device: str | None) -> MicroBatch:
    """The size with which the run was begun, or the next smaller one that this start can have. Collective."""
    fitting = [size for size in sizes if size <= begun] or sizes[:1]
    if fitting[-1] == begun:
        reason = "auto keeps that with which this run was begun"
    else:
        reason = f"auto; this run was begun with {begun}, by which {world.size} processes cannot share out {config.train.global_batch_size}"
    moved = world.device.type == "cuda" and device != torch.cuda.get_device_name(world.device)
    if not any(world.gather(moved)):
        return MicroBatch(fitting[-1], reason)
    size, refused = _largest_tried(config, world, fitting)
    return MicroBatch(size, f"auto; this run was begun with {begun}, but {refused}" if refused else reason)


def _largest(config: Config, world: World, sizes: list[int]) -> MicroBatch:
    """The largest size that the plan allows and a trial confirms. Collective."""
    if world.is_main:
        console.say("train.micro_batch_size=auto: planning the memory of a step, then trying it")
    hosts, gpu = world.gather(socket.gethostname()), None
    if world.device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(world.device)
        memory = free + torch.cuda.memory_reserved(world.device)
        gpu = replace(gpu_named(DEFAULT_GPU), name=torch.cuda.get_device_name(world.device), memory=memory)
    nodes = len(set(hosts)) if world.size % len(set(hosts)) == 0 else 1
    subject = Subject(with_micro_batch(config, sizes[0]), nodes, world.size // nodes, gpu)
    allowed = largest_micro_batch(subject)
    if gpu is None:  # the plan is of the whole machine, of which others may have taken some
        fitting = (size for size in reversed(sizes) if size <= allowed and plan_memory(subject, size).total <= _free(hosts))
        allowed = next(fitting, 0)
    planned = min(world.gather(allowed))
    size, refused = _largest_tried(config, world, [size for size in sizes if size <= planned] or sizes[:1])
    why = f"the plan allows {planned}, but {refused}" if refused else "the largest that the plan allows, tried in a step"
    return MicroBatch(size, f"auto: {why}")


def _largest_tried(config: Config, world: World, sizes: list[int]) -> tuple[int, str]:
    """The largest of the sizes, given in ascending order, with which a step fits on every rank, and why not the largest of all, or "". Collective.

    Raises:
        UserError: none fits.
    """
    first = why = ""
    hosts = world.gather(socket.gethostname())
    for size in reversed(sizes):
        capacity = _free(hosts)
        world.barrier()  # all have looked before any takes memory
        refused = world.gather(try_step(with_micro_batch(config, size), world, capacity))
        why = next((each for each in refused if each), "")
        if not why:
            return size, first
        first = first or f"{size} does not fit: {why}"
    raise UserError(
        f"train.micro_batch_size is auto, but not even {sizes[0]} images of each process fit into memory ({why})",
        "set train.activation_checkpointing=true, take a larger train.zero_stage or more memory; python -m pipeline.plan says what helps",
    )


def _free(hosts: list[str]) -> int:
    """Bytes of this machine's memory for each of its processes. Args: hosts: of all ranks."""
    return psutil.virtual_memory().available // hosts.count(socket.gethostname())
