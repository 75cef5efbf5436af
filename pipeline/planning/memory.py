"""Plan the memory of one process by part, and find the largest micro-batch that fits."""

from bisect import bisect
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from typing import Any

import torch

from pipeline.cluster.host import memory
from pipeline.config import AUTO, Config, TrainConfig, accumulation_steps, fitting_micro_batches
from pipeline.hardware import Gpu, native_bf16
from pipeline.models import model_of
from pipeline.optim.engine import zero_stage
from pipeline.planning.planned_machine import Layout
from pipeline.planning.traced_step import ACTIVATIONS, TracedStep, fake_teacher, trace_evaluation, trace_step

MIB = 2**20
LOADER, CONTEXT = "data loader (estimate)", "CUDA context and libraries (estimate)"
NCCL, FRAGMENTS = "NCCL (estimate)", "allocator's fragments (estimate)"
# Of a process on a data-centre GPU: the context and its kernels, cuBLAS's and cuDNN's workspaces; and NCCL's channels.
_CONTEXT, _NCCL = 900 * MIB, 400 * MIB
_FRAGMENTS = 0.04  # of what PyTorch's caching allocator has given out, that it holds besides
_OF_TRAINING = ("micro_batch_size", "global_batch_size", "activation_checkpointing", "teacher", "teacher_weights", "loss")
# The loader, with images of ImageNet: 500 x 375 pixels on average, of which a random crop takes 54 % (crop_scale 0.08 to 1).
_WINDOW = 0.54 * 500 * 375
# Float32 images that the two resizes of dali_graph have at once: the result, its border corrections, the sum.
_RESIZE_STAGES = 4
_NVJPEG = 32 * MIB  # of a decoder thread's buffers on the device
_DECODER_THREADS = 8  # where data.num_threads leaves it to the node


@dataclass(frozen=True)
class Subject:
    """A run that may be submitted."""

    config: Config  # the run; ``train.micro_batch_size`` is a number
    nodes: int
    gpus_per_node: int  # one process for each
    gpu: Gpu | None  # the kind of all GPUs; None: processes on CPUs, whose memory is that of PyTorch's allocator

    @property
    def world_size(self) -> int:
        return self.nodes * self.gpus_per_node

    @property
    def precision(self) -> str:
        """ "bf16" or "fp32": what ``train.precision`` is there; "auto" is what the GPU computes natively."""
        asked = self.config.train.precision
        if asked != AUTO:
            return asked
        return "bf16" if (self.gpu.bf16_flops if self.gpu else native_bf16(torch.device("cpu"))[0]) else "fp32"

    @property
    def stage(self) -> int:
        """Of ZeRO. Raises UserError: the optimizer cannot take it."""
        parameters = partial(trained_parameters, self.config)
        return zero_stage(self.config, self.world_size, parameters, self.gpu.memory if self.gpu else None)

    @property
    def compile(self) -> str:
        """What ``train.compile`` is there."""
        return self.config.compilation(self.world_size, self.stage, self.gpu is not None)

    @property
    def accumulation(self) -> int:
        """Micro-batches of a step. Raises UserError: the batch sizes do not divide."""
        return accumulation_steps(self.config.train, self.world_size, self.config.augment.unit)

    @property
    def layout(self) -> Layout:
        kernels = self.gpu is not None and self.gpu.bf16_flops is not None
        return Layout(self.world_size, self.stage, self.accumulation > 1, self.gpu is not None, kernels)

    def changed(self, values: Mapping[str, Any]) -> "Subject":
        """The subject with other values in its config: dotted key -> value."""
        return replace(self, config=self.config.with_values(values))


@dataclass(frozen=True)
class Memory:
    """What one process of a run holds at the moment when it holds most."""

    parts: dict[str, int]  # bytes by name, in the order of the page
    capacity: int  # bytes of the GPU that a process can allocate; for processes on CPUs this machine's memory, shared out
    in_evaluation: bool = False  # that moment is in an evaluation; else in a training step
    remarks: list[str] = field(default_factory=list)  # sentences about what the figures leave out

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
    """Plan the memory of one process. ``micro_batch``: instead of ``train.micro_batch_size``. Raises UserError: the batch sizes do not
    divide, or the model cannot be built or traced."""
    if micro_batch is not None:
        subject = subject.changed({"train.micro_batch_size": micro_batch})
    config = subject.config
    step, evaluation = traced_step(subject).parts, traced_evaluation(subject).parts
    if subject.compile == "graphs":  # which keep what a step allocates
        evaluation = step + Counter({ACTIVATIONS: evaluation[ACTIVATIONS]})
    in_evaluation = evaluation.total() > step.total()
    traced = evaluation if in_evaluation else step
    parts, (_, missing) = traced.copy(), fake_teacher(config)
    remarks = [missing] if missing else []
    parts[LOADER] = _loader_bytes(config, subject.gpu is not None)
    if subject.gpu:
        parts[CONTEXT] = _CONTEXT
        parts[NCCL] = _NCCL if subject.world_size > 1 else 0
        parts[FRAGMENTS] = int(_FRAGMENTS * traced.total())
        if subject.compile != "off":
            remarks.append("train.compile is not in the figures: compiled blocks keep as much or less")
    capacity = subject.gpu.memory if subject.gpu else memory()[0] // subject.gpus_per_node
    return Memory(dict((+parts).most_common()), capacity, in_evaluation, remarks)


def largest_micro_batch(subject: Subject) -> int:
    """The largest micro-batch size that fits, of those that the run may have; 0: not even the smallest. Raises UserError: no
    size divides the global batch by the number of processes."""
    sizes = fitting_micro_batches(subject.config.train, subject.world_size, subject.config.augment.unit)
    if plan_memory(subject, sizes[-1]).fits:  # as with a small model
        return sizes[-1]
    fitting = bisect(sizes[:-1], False, key=lambda size: not plan_memory(subject, size).fits)
    return sizes[fitting - 1] if fitting else 0


def settled(subject: Subject) -> Subject:
    """The subject with a number for ``train.micro_batch_size``: for "auto" the largest that fits, or the smallest where none does."""
    train = subject.config.train
    if train.micro_batch_size != AUTO:
        return subject
    smallest = fitting_micro_batches(train, subject.world_size, subject.config.augment.unit)[0]
    return subject.changed({"train.micro_batch_size": largest_micro_batch(subject) or smallest})


def traced_step(subject: Subject) -> TracedStep:
    """The trace of the run's step, of which the plan's memory and time are made."""
    return _trace(_traced_config(subject).model_dump_json(), subject.layout, evaluation=False)


def traced_evaluation(subject: Subject) -> TracedStep:
    """The trace of the run's evaluation, which does not depend on the training's batches."""
    default = TrainConfig()
    config = _traced_config(subject).with_values({f"train.{name}": getattr(default, name) for name in _OF_TRAINING})
    return _trace(config.model_dump_json(), replace(subject.layout, accumulates=False), evaluation=True)


def _traced_config(subject: Subject) -> Config:
    """The same for all runs that differ in what no trace depends on, so that its result is kept."""
    default = Config()
    same = {"output_dir": default.output_dir, "seed": 0, "data": default.data, "augment": default.augment}
    return subject.config.with_values({**same, "train.precision": subject.precision})


@lru_cache(maxsize=128)
def _trace(config: str, layout: Layout, evaluation: bool) -> TracedStep:
    return (trace_evaluation if evaluation else trace_step)(Config.model_validate_json(config), layout)


def _loader_bytes(config: Config, on_gpu: bool) -> int:
    """Estimate the bytes on the training device of both loaders, which live as long as the run: training and evaluation. On a
    CPU, PyTorch's allocator has the finished batches only; a GPU that decodes also has DALI's buffers."""
    side, prefetch, total = config.model.image_size, config.data.prefetch, 0.0
    for size in (config.train.micro_batch, config.eval.batch_size):
        pixels = size * 3 * side * side
        total += 4 * pixels * (prefetch + 1) + pixels  # normalized float32 batches, and one in the making with its uint8 pixels
        if on_gpu and config.data.decode != "cpu":
            rows = _WINDOW**0.5  # of a window that is a square
            resizes = _RESIZE_STAGES * 4 * 3 * (rows * side + side * side)
            total += size * (3 * _WINDOW + resizes + prefetch * 3 * side * side)
            total += (config.data.num_threads or _DECODER_THREADS) * _NVJPEG
    return int(total)


def trained_parameters(config: Config) -> int:
    """How many numbers the model learns."""
    return _trained_parameters(config.model_dump_json(include={"model": True, "train": {"activation_checkpointing", "freeze"}}))


@lru_cache(maxsize=128)
def _trained_parameters(config: str) -> int:
    with torch.device("meta"):
        built = model_of(Config.model_validate_json(config))
    return sum(parameter.numel() for parameter in built.parameters() if parameter.requires_grad)
