"""Whether a training step with micro-batches of some size fits into memory: it is tried, and nothing of it stays.

The step is computed without DeepSpeed, whose engine cannot be taken down again once an allocation within it has failed. What the
engine and the loader hold beside it is there as plain memory of that size. Not compiled, where a step takes the more memory.
"""

from __future__ import annotations

import ctypes
import gc
from contextlib import suppress
from pathlib import Path

import torch
from torch import Tensor

from pipeline.command_line import lacks_memory
from pipeline.config import Config, accumulation_steps
from pipeline.distributed.world import World
from pipeline.hardware import memory_gib
from pipeline.run.building import build_model
from pipeline.run.teacher import load_teacher
from pipeline.step.forward import autocast, random_batch
from pipeline.step.loss import Objective, label_loss
from pipeline.step.train_step import forward_backward

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
    batch = random_batch(train.micro_batch, config.model, device)
    copies = _MOMENTS + (train.ema_decay is not None) + (world.size > 1)  # the last: ZeRO's buckets and its copy of a shard
    held = [torch.ones(copies, *parameter.shape, device=device) for parameter in parameters]
    held += [torch.ones_like(batch.images) for _ in range(config.data.prefetch)]
    noise = torch.rand(len(batch.images), model.noise_per_sample, device=device) if model.noise_per_sample else None
    if model.draws_from_generator:
        model.generator_seed = 0
    objective = Objective(label_loss(train), teacher)

    def forward(images: Tensor, noise: Tensor | None) -> Tensor:
        with autocast(device, train.precision):
            return model(images, noise)

    for _ in range(min(_MICRO_BATCHES, accumulation_steps(train, world.size, config.augment.unit))):
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


def _give_back(world: World) -> None:
    """Return what the trial has freed, so that it is there for the run, and for others."""
    gc.collect()
    if world.device.type == "cuda":
        torch.cuda.empty_cache()
    else:
        with suppress(OSError, AttributeError):
            ctypes.CDLL(None).malloc_trim(0)  # glibc's
    _forget_peak()
