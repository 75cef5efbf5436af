"""Choose the largest micro-batch that fits, once for a run (``train.micro_batch_size: auto``).

A new run takes the largest that :mod:`pipeline.planning.memory` allows and a trial step confirms, the same on all ranks. It is written
to the run's config, environment and checkpoints as a number, and later starts keep it: all draws and mixing groups depend on places in
the global batch, but BatchNorm normalizes over a micro-batch, and sums are rounded by it. A later start takes a smaller one only where
its number of processes does not divide the global batch by this one, or where it does not fit into another kind of GPU.
"""

import ctypes
import gc
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import torch

from pipeline.cluster.agreement import do_in_main
from pipeline.cluster.host import memory, this_node
from pipeline.cluster.world import World
from pipeline.command_line import lacks_memory
from pipeline.config import AUTO, Config, accumulation_steps, fitting_micro_batches, load_config
from pipeline.errors import UserError, first_line
from pipeline.hardware import DEFAULT_GPU, GIB, gpu_named, memory_gib
from pipeline.inference.teacher import load_teacher
from pipeline.logs.console import say_once
from pipeline.logs.run_files import AUTO_REASON, earlier_starts
from pipeline.models import model_of
from pipeline.optim.build import optimizer_description, parameter_groups
from pipeline.planning.memory import Subject, largest_micro_batch, plan_memory
from pipeline.runs import CONFIG
from pipeline.step.loss import Objective, label_loss
from pipeline.step.precision import autocast
from pipeline.step.train_step import forward_backward, random_batch
from pipeline.training.folder import config_hash

_SIZE = "train.micro_batch_size"
MICRO_BATCHES = 2  # of a step that is tried: from the second on, gradients and activations are in memory together


def choose_micro_batch(config: Config, begun_with: int | None, world: World) -> tuple[int, str | None]:
    """Settle ``train.micro_batch_size`` for all ranks alike. Collective. Returns the size; and why, for the log, None if the
    config states it. Raises UserError: on every rank: no micro-batch fits. ``begun_with``: the size that the checkpoint has
    recorded; None: there is no checkpoint."""
    if config.train.micro_batch_size != AUTO:
        return config.train.micro_batch, None
    sizes = fitting_micro_batches(config.train, world.size, config.augment.unit)
    begun, device = world.from_main(do_in_main(lambda: _begun_with(config, begun_with), world))
    size, reason = _keep(config, world, sizes, begun, device) if begun else _largest(config, world, sizes)
    say_once(world, f"train.micro_batch_size is {size}: {reason}")
    return size, reason


def _begun_with(config: Config, recorded: int | None) -> list[int | str | None]:
    """The size of the run so far and the device of its last start; None: there is none.

    A start that was stopped before its first checkpoint counts if it left its choice to ``auto`` in the same run: what is begun again
    then repeats it.
    """
    last = (earlier_starts(config.folder) or [{}])[-1]
    if recorded:
        return [recorded, last.get("device")]
    with suppress(UserError):
        if AUTO_REASON in last and config_hash(load_config(config.folder / CONFIG)) == config_hash(config):
            return [last.get("micro_batch_size"), last.get("device")]
    return [None, None]


def _keep(config: Config, world: World, sizes: list[int], begun: int, device: str | None) -> tuple[int, str]:
    """The size with which the run was begun, or the next smaller one that this start can have. Collective."""
    fitting = [size for size in sizes if size <= begun] or sizes[:1]
    if fitting[-1] == begun:
        reason = "auto keeps that with which this run was started"
    else:
        reason = f"auto; this run was started with {begun}, by which {world.size} processes cannot share out {config.train.global_batch_size}"
    moved = world.device.type == "cuda" and device != torch.cuda.get_device_name(world.device)
    if not any(world.gather(moved)):
        return fitting[-1], reason
    size, refused = _largest_tried(config, world, fitting)
    return size, f"auto; this run was started with {begun}, but {refused}" if refused else reason


def _largest(config: Config, world: World, sizes: list[int]) -> tuple[int, str]:
    """The largest size that the plan allows and a trial confirms. Collective."""
    say_once(world, "train.micro_batch_size=auto: planning the memory of a step, then trying it")
    places, gpu = world.gather(this_node()), None
    if world.device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(world.device)
        memory = free + torch.cuda.memory_reserved(world.device)
        gpu = replace(gpu_named(DEFAULT_GPU), name=torch.cuda.get_device_name(world.device), memory=memory)
    nodes = len(set(places)) if world.size % len(set(places)) == 0 else 1
    subject = Subject(config.with_values({_SIZE: sizes[0]}), nodes, world.size // nodes, gpu)
    allowed = largest_micro_batch(subject)
    if gpu is None:  # the plan is of the whole machine, of which others may have taken some
        fitting = (size for size in reversed(sizes) if size <= allowed and plan_memory(subject, size).total <= _free(places))
        allowed = next(fitting, 0)
    planned = min(world.gather(allowed))
    size, refused = _largest_tried(config, world, [size for size in sizes if size <= planned] or sizes[:1])
    why = f"the plan allows {planned}, but {refused}" if refused else "the largest that the plan allows, tried in a step"
    return size, f"auto: {why}"


def _largest_tried(config: Config, world: World, sizes: list[int]) -> tuple[int, str]:
    """The largest of ascending sizes with which a step fits on every rank, and why not the largest of all, or "". Collective."""
    first = why = ""
    places = world.gather(this_node())
    for size in reversed(sizes):
        capacity = _free(places)
        world.barrier()  # all have looked before any takes memory
        refused = world.gather(try_step(config.with_values({_SIZE: size}), world, capacity))
        why = next((reason for reason in refused if reason), "")
        if not why:
            return size, first
        first = first or f"{size} does not fit: {why}"
    must = f"train.micro_batch_size=auto requires memory for {sizes[0]} images of each process at least"
    helps = "take a larger train.zero_stage or more memory; pervit plan says what helps"
    raise UserError(f"{must}, got too little ({why})", f"set train.activation_checkpointing=true, {helps}")


def _free(places: list[str]) -> int:
    """Bytes of this machine's memory for each of its processes, by the nodes of all ranks."""
    return memory()[1] // places.count(this_node())


def try_step(config: Config, world: World, capacity: int) -> str | None:
    """Compute the micro-batches of a step on random images, on this rank alone; nothing of it stays.

    The step is computed without DeepSpeed, whose engine cannot be taken down again once an allocation within it has failed. What the
    engine and the loader hold beside it is there as plain memory of that size. Not compiled, where a step takes the more
    memory. ``capacity``: bytes that this process may take besides what it has, on a CPU, where nothing else says so before the
    system kills it. Returns why it does not fit, in half a sentence; None: it does.
    """
    on_cpu = world.device.type == "cpu"
    _forget_peak()
    before = memory_gib(world.device)[0]
    try:
        _compute(config, world)
        taken = int((memory_gib(world.device)[1] - before) * GIB)
        if on_cpu and taken > capacity:
            return f"a step took {taken / GIB:.1f} GiB, {capacity / GIB:.1f} GiB are there for a process"
        return None
    except (RuntimeError, MemoryError) as error:
        if not lacks_memory(error):
            raise
        return first_line(error)
    finally:  # return what was freed, so that it is there for the run, and for others
        gc.collect()
        if on_cpu:
            with suppress(OSError, AttributeError):
                ctypes.CDLL(None).malloc_trim(0)  # glibc's
        else:
            torch.cuda.empty_cache()
        _forget_peak()


def _compute(config: Config, world: World) -> None:
    train, device = config.train, world.device
    model = model_of(config).to(device).train()
    teacher = load_teacher(config, device, None) if train.teacher else None
    batch = random_batch(train.micro_batch, config.model, device)
    copies = (train.ema_decay is not None) + (world.size > 1)  # the second: ZeRO's buckets and its copy of a shard
    optimizer, held = optimizer_description(config.optim), []
    for group in parameter_groups(model, config.optim):
        kept = copies + len(optimizer.state(group).tensors)
        held += [torch.ones(kept, *parameter.shape, device=device) for parameter in group["params"]]
    held += [torch.ones_like(batch.images) for _ in range(config.data.prefetch)]
    noise = torch.rand(len(batch.images), model.noise_per_sample, device=device) if model.noise_per_sample else None
    if model.draws_from_generator:
        model.generator_seed = 0
    objective = Objective(label_loss(train), teacher)
    forward = autocast(device, train.precision)(model.__call__)
    for _ in range(min(MICRO_BATCHES, accumulation_steps(train, world.size, config.augment.unit))):
        forward_backward(forward, torch.Tensor.backward, batch, noise, objective)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    del held


def _forget_peak() -> None:
    """Let the peak of this process's memory begin anew."""
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")  # proc(5): the peak of the resident set
