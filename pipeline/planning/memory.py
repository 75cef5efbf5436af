"""Memory per GPU of a planned run, by part, and the largest micro-batch that fits."""

from __future__ import annotations

import os
from collections import Counter
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from pipeline.config import AUTO, Config, TrainConfig, accumulation_steps, fitting_micro_batches
from pipeline.planning.loader_memory import loader_bytes
from pipeline.planning.subject import Subject

MIB = 2**20
LOADER, CONTEXT, NCCL, FRAGMENTS = (
    "data loader (estimate)",
    "CUDA context and libraries (estimate)",
    "NCCL (estimate)",
    "allocator's fragments (estimate)",
)
# Of a process on a data-centre GPU: the context and its kernels, cuBLAS's and cuDNN's workspaces; and NCCL's channels.
_CONTEXT, _NCCL = 900 * MIB, 400 * MIB
_FRAGMENTS = 0.04  # of what PyTorch's caching allocator has given out, that it holds besides
_OF_TRAINING = ("micro_batch_size", "global_batch_size", "activation_checkpointing", "teacher", "teacher_weights", "loss")
_CPU_LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")


@dataclass(frozen=True)
class Memory:
    """What one process of a run holds at the moment when it holds most.

    Attributes:
        parts: bytes by name, in the order of the page.
        capacity: bytes of the GPU that a process can allocate; for processes on CPUs this machine's memory, shared out.
        micro_batch, accumulation: images per forward pass and GPU, and forward passes per optimizer step.
        stage: of ZeRO, 0 on one process.
        precision: "bf16" or "fp32".
        in_evaluation: that moment is in an evaluation; else in a training step.
        remarks: sentences about what the figures leave out.
    """

    parts: dict[str, int]
    capacity: int
    micro_batch: int
    accumulation: int
    stage: int
    precision: str
    in_evaluation: bool = False
    remarks: list[str] = field(default_factory=list)

    @property
    def total(self) -> int:
        return sum(self.parts.values())

    @property
    def fits(self) -> bool:
        return self.total <= self.capacity

    @property
    def left(self) -> int:
        """Bytes that remain; negative where it does not fit."""
        return self.capacity - self.total


def plan_memory(subject: Subject, micro_batch: int | None = None) -> Memory:
    """Plan the memory of one process.

    Args:
        subject: the run; its precision "auto" is what its GPU computes natively.
        micro_batch: in place of ``train.micro_batch_size``.

    Raises:
        UserError: the batch sizes do not divide, or the model cannot be built.
    """
    if micro_batch is not None:
        subject = changed(subject, "train", micro_batch_size=micro_batch)
    subject = changed(subject, "train", precision=precision_of(subject))
    config, world = subject.config, subject.world_size
    accumulation = accumulation_steps(config.train, world, config.augment.unit)
    stage = config.train.zero_stage if world > 1 else 0
    # What the trace does not depend on is the same for all, so that its result is kept for a question that differs in it.
    traced = config.model_copy(
        update={"output_dir": Config().output_dir, "seed": 0, "data": Config().data, "augment": Config().augment}
    )
    kernels = subject.gpu is not None and subject.gpu.bf16_flops is not None
    where = (world, stage, subject.gpu is not None, kernels)
    step = _traced(traced.model_dump_json(), min(accumulation, 2), *where)
    # An evaluation does not depend on the training's batches.
    train = config.train.model_copy(update={name: getattr(TrainConfig(), name) for name in _OF_TRAINING})
    evaluation = _evaluated(traced.model_copy(update={"train": train}).model_dump_json(), *where)
    in_evaluation = sum(evaluation.values()) > sum(step.values())
    step = evaluation if in_evaluation else step
    parts, remarks = Counter(dict(step)), []
    if config.train.teacher:
        from pipeline.planning.teacher import fake_teacher

        remarks.append(fake_teacher(config)[1] or "the teacher's forward pass is in the memory, not in the time")
    if subject.gpu:
        held = sum(step.values())
        parts[LOADER] = loader_bytes(config)
        parts[CONTEXT] = _CONTEXT
        parts[NCCL] = _NCCL if world > 1 else 0
        parts[FRAGMENTS] = int(_FRAGMENTS * held)
        if config.train.compile != "off" and stage < 3:
            remarks.append("train.compile is not in the figures: compiled blocks keep as much or less")
    else:
        parts[LOADER] = loader_bytes(config, on_gpu=False)
    parts += Counter()  # without those of 0 bytes
    return Memory(
        dict(sorted(parts.items(), key=lambda part: -part[1])),
        subject.gpu.memory if subject.gpu else _cpu_memory() // subject.gpus_per_node,
        config.train.micro_batch,
        accumulation,
        stage,
        config.train.precision,
        in_evaluation,
        remarks,
    )


def largest_micro_batch(subject: Subject) -> int:
    """The largest micro-batch size that fits: one that the run may have, so that it is a multiple of ``config.augment.unit`` and a
    whole number of micro-batches makes a global batch. 0: none fits.

    Raises:
        UserError: no micro-batch size divides the global batch on this number of processes.
    """
    sizes = fitting_micro_batches(subject.config.train, subject.world_size, subject.config.augment.unit)
    low, high = 0, len(sizes)  # of so many, the smallest fit; of so many, the last does not
    probe, known = high, {}  # the largest first: with a small model all fit
    while low < high:
        plan = plan_memory(subject, sizes[probe - 1])
        known[sizes[probe - 1]] = plan.total
        low, high = (probe, high) if plan.fits else (low, probe - 1)
        probe = min(max(_expected(known, sizes, plan.capacity), low + 1), high)
    return sizes[low - 1] if low else 0


def _expected(known: dict[int, int], sizes: list[int], capacity: int) -> int:
    """How many of the sizes fit if memory grows evenly with the micro-batch, as it nearly does; from one plan alone, half of them."""
    if len(known) < 2:
        return (len(sizes) + 1) // 2
    (small, least), *_, (large, most) = sorted(known.items())
    if most <= least:
        return len(sizes)
    limit = small + (capacity - least) / (most - least) * (large - small)
    return sum(size <= limit for size in sizes)


def settled(subject: Subject) -> Subject:
    """The subject with a number for ``train.micro_batch_size``: for "auto" the largest that fits, or the smallest where none does."""
    train = subject.config.train
    if train.micro_batch_size != AUTO:
        return subject
    smallest = fitting_micro_batches(train, subject.world_size, subject.config.augment.unit)[0]
    return changed(subject, "train", micro_batch_size=largest_micro_batch(subject) or smallest)


def changed(subject: Subject, section: str, **values: Any) -> Subject:
    """The subject with other values in a section of its config."""
    config = subject.config
    return replace(subject, config=config.model_copy(update={section: getattr(config, section).model_copy(update=values)}))


def precision_of(subject: Subject) -> str:
    """ "bf16" or "fp32": what ``train.precision`` is there."""
    asked = subject.config.train.precision
    if asked != "auto":
        return asked
    if subject.gpu:
        return "bf16" if subject.gpu.bf16_flops else "fp32"
    import torch

    return "bf16" if torch.cpu._is_avx512_bf16_supported() else "fp32"


@lru_cache(maxsize=256)
def _traced(config: str, accumulation: int, world: int, stage: int, on_gpu: bool, kernels: bool) -> Counter[str]:
    from pipeline.planning.traced_step import step_memory  # PyTorch takes seconds

    return step_memory(Config.model_validate_json(config), world, stage, accumulation, on_gpu, kernels)


@lru_cache(maxsize=256)
def _evaluated(config: str, world: int, stage: int, on_gpu: bool, kernels: bool) -> Counter[str]:
    from pipeline.planning.traced_evaluation import evaluation_memory

    return evaluation_memory(Config.model_validate_json(config), world, stage, on_gpu, kernels)


def _cpu_memory() -> int:
    """Bytes of this machine, or that its cgroup may use."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    for file in map(Path, _CPU_LIMITS):
        try:
            limit = file.read_text().strip()
        except OSError:
            continue
        if limit.isdigit():
            total = min(total, int(limit))
    return total
