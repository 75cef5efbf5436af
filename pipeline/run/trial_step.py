"""Whether a training step with micro-batches of some size fits into memory: it is tried, and nothing of it stays.

The step is computed without DeepSpeed, whose engine cannot be taken down again once an allocation within it has failed. What the
engine and the loader hold beside it is there as plain memory of that size. Not compiled, where a step takes the more memory.
"""

from __future__ import annotations

import ctypes
import gc
from contextlib import suppress
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from pipeline.command_line import lacks_memory
from pipeline.config import Config, accumulation_steps
from pipeline.data.augment.crop import eval_geometry
from pipeline.data.batches import BatchRequest
from pipeline.data.loader import Batch
from pipeline.distributed.world import World
from pipeline.hardware import memory_gib
from pipeline.run.building import build_model
from pipeline.run.loss import spread_nonfinite, training_loss
from pipeline.run.precision import autocast
from pipeline.run.teacher import hard_distillation_loss, load_teacher

_MOMENTS = 2  # of a parameter, AdamW's
_MICRO_BATCHES = 2  # with the second, gradients and activations are in memory together
_GIB = 2**30


def try_step(config: Config, world: World, capacity: int) -> str | None:
    """Compute the micro-batches of a step on random images, on this rank alone.

    Args:
        config: with ``train.micro_batch_size`` and ``train.precision`` settled.
        world: this rank's device.
        capacity: bytes that this process may take besides what it has, on a CPU, where nothing else says so before the system kills it.

    Returns:
        Why it does not fit, in half a sentence; None: it does.
    """
    on_cpu = world.device.type == "cpu"
    _forget_peak()
    before = memory_gib(world.device)[0]
    try:
        _compute(config, world)
        taken = int((memory_gib(world.device)[1] - before) * _GIB)
        if on_cpu and taken > capacity:
            return f"a step took {taken / _GIB:.1f} GiB, {capacity / _GIB:.1f} GiB are there for a process"
        return None
    except (RuntimeError, MemoryError) as error:
        if not lacks_memory(error):
            raise
        return str(error).partition("\n")[0].rstrip(".") or "out of memory"
    finally:
        _give_back(world)


def _compute(config: Config, world: World) -> None:
    train, device = config.train, world.device
    model = build_model(config, world, [], fresh=False).to(device).train()
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    teacher = load_teacher(config, device, None) if train.teacher else None
    batch = random_batch(config, device)
    copies = _MOMENTS + (train.ema_decay is not None) + (world.size > 1)  # the last: ZeRO's buckets and its copy of a shard
    held = [torch.ones(copies, *parameter.shape, device=device) for parameter in parameters]
    held += [torch.ones_like(batch.images) for _ in range(config.data.prefetch)]
    noise = torch.rand(len(batch.images), model.noise_per_sample, device=device) if model.noise_per_sample else None
    if model.draws_from_generator:
        model.generator_seed = 0
    for _ in range(min(_MICRO_BATCHES, accumulation_steps(train, world.size, config.augment.unit))):
        with autocast(device, train.precision):
            scores = model(batch.images, noise)
        loss = training_loss(scores, batch, train)
        if teacher:
            loss = hard_distillation_loss(loss, scores, teacher(batch.images))
        spread_nonfinite(loss).backward()
        del scores, loss
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    del held


def random_batch(config: Config, device: torch.device) -> Batch:
    """A micro-batch of noise: the shapes of a batch, without data."""
    size, side = config.train.micro_batch, config.model.image_size
    images = torch.randn(size, 3, side, side, device=device)
    labels = torch.arange(size, device=device) % config.model.num_classes
    numbers = np.arange(size, dtype=np.int64)
    sides = np.full(size, side)
    geometry = eval_geometry(sides, sides, side, 1.0)
    request = BatchRequest(numbers, numbers, np.zeros_like(numbers), numbers, np.ones(size, dtype=bool), geometry)
    weight: Tensor = torch.ones(size, device=device)
    return Batch(images, labels, labels, weight, weight > 0, request, 0)


def _forget_peak() -> None:
    """Let the peak of this process's memory begin anew."""
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")  # proc(5): the peak of the resident set


def _give_back(world: World) -> None:
    """Return what the trial has freed, so that it is there for the run, and for others."""
    gc.collect()
    if world.device.type == "cuda":
        torch.cuda.empty_cache()
    else:
        with suppress(OSError, AttributeError):
            ctypes.CDLL(None).malloc_trim(0)  # glibc's
    _forget_peak()
