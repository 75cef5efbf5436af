"""Plan the time of a run: a step by its parts, images per second, hours, Slurm jobs, GPU hours, money."""

from __future__ import annotations

import os
from dataclasses import dataclass

import torch

from pipeline.hardware import NETWORK
from pipeline.planning.length import Checkpoints, Images, Length, count_images, jobs_within, length_of, plan_checkpoints
from pipeline.planning.machine import LoaderNeed, measure_cpu, measure_loader
from pipeline.planning.measured import Measured
from pipeline.planning.memory import Subject, traced_evaluation, traced_step
from pipeline.planning.rates import CPU_LINK, GpuRates, Links, Rates, Traffic, fused, product_seconds, seconds_by_kind, traffic
from pipeline.planning.trace import KINDS
from pipeline.planning.traced_step import TEACHER, TracedStep
from pipeline.stores.place import Place

RECOMPUTED, LAUNCHES = "recomputation", "starting kernels, engine"
OPTIMIZER, NETWORKED = "optimizer and averages", "gradients over the network"
START_SECONDS = 60.0  # of a job until its first step: libraries, data, NCCL; an assumption
COMPILE_SECONDS = 90.0  # torch.compile of a model's blocks (one to two minutes on a CPU, benchmarks/RESULTS.md)
_ENGINE_HOST = 40e-6  # seconds of DeepSpeed's engine for each parameter: 8 to 15 ms of PerViT-T's 264 (benchmarks/RESULTS.md)
_COMPILED_STARTS = 0.3  # operators that are started after compiling, of those before; an assumption


@dataclass(frozen=True)
class Options:
    """What a plan takes from its command line, beside the run itself."""

    time_limit: float | None = None  # of a Slurm job, in seconds; None: no number of jobs
    price: float | None = None  # of an hour of a GPU; None: no sum
    network: float = NETWORK  # bytes per second between a node and the others
    data: Place | None = None  # shard set on which the loader is measured; None: it is not


@dataclass(frozen=True)
class StepParts:
    """An optimizer step by the model of its time."""

    parts: dict[str, float]  # seconds by part
    traffic: Traffic  # collectives
    flops: float  # of products, attention and convolutions on one process, without recomputation
    compiled: bool  # parts of it run through ``torch.compile``


@dataclass(frozen=True)
class Time:
    """What a run takes."""

    subject: Subject
    step: StepParts
    ratio: float  # of the measured run's step to the model's; 1 without one
    source: str
    images: Images | None  # sizes of the data set; None: not known, so that there are no hours
    length: Length | None  # steps and evaluations; None likewise
    checkpoints: Checkpoints | None  # their size and number; None likewise
    evaluation_seconds: float  # of one pass over the validation set, the average's included
    start_seconds: float  # of a job until its first step
    loader: LoaderNeed | None  # what the loader takes on the real shards; None: not measured
    measured: Measured | None  # the run whose figures replace the model's; None: the model's
    options: Options

    @property
    def parts(self) -> dict[str, float]:
        """Seconds of an optimizer step by part."""
        return {name: seconds * self.ratio for name, seconds in self.step.parts.items() if seconds > 0}

    @property
    def step_seconds(self) -> float:
        return sum(self.parts.values())

    @property
    def images_per_second(self) -> float:
        return self.subject.config.train.global_batch_size / self.step_seconds

    @property
    def training_seconds(self) -> float | None:
        """Steps, evaluations and what saves hold up; without the starts of jobs."""
        if self.length is None or self.checkpoints is None:
            return None
        held_up = self.checkpoints.written * self.checkpoints.hold_up
        return self.length.steps * self.step_seconds + self.length.evaluations * self.evaluation_seconds + held_up

    @property
    def jobs(self) -> int | None:
        """Slurm jobs, one after the other; None without a time limit."""
        if self.training_seconds is None or self.options.time_limit is None:
            return None
        return jobs_within(self.training_seconds, self.options.time_limit, self.start_seconds)

    @property
    def hours(self) -> float | None:
        """From the first job's start to the last one's end, without the time in the queue."""
        if self.training_seconds is None:
            return None
        return (self.training_seconds + (self.jobs or 1) * self.start_seconds) / 3600

    @property
    def gpu_hours(self) -> float | None:
        return None if self.hours is None else self.hours * self.subject.world_size

    @property
    def cost(self) -> float | None:
        return None if self.gpu_hours is None or self.options.price is None else self.gpu_hours * self.options.price


def time_of(subject: Subject, options: Options, measured: Measured | None = None) -> Time:
    """Plan the time of a run, with what has to be measured here: the CPU's rates for a run on CPUs, the loader with ``options.data``.

    Raises:
        UserError: the shards cannot be read, or the run cannot be planned.
    """
    images = count_images(subject.config, options.data)
    rates: Rates
    if subject.gpu:
        rates = GpuRates(subject.gpu)
    else:
        torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // subject.gpus_per_node))  # a process's share of the cores
        rates = measure_cpu(subject.precision)
    loader = measure_loader(subject.config, options.data) if options.data else None
    return plan_time(subject, rates, images, options, loader, measured)


def plan_time(
    subject: Subject,
    rates: Rates,
    images: Images | None,
    options: Options | None = None,
    loader: LoaderNeed | None = None,
    measured: Measured | None = None,
) -> Time:
    """Plan the time of a run.

    Args:
        images: from :func:`~pipeline.planning.length.count_images`.
        loader: from :func:`~pipeline.planning.machine.measure_loader`.
        measured: of an earlier run; its ratio of measured to modelled time scales the whole plan.

    Raises:
        UserError: the batch sizes do not divide, the model cannot be built, or the schedule is shorter than a step.
    """
    config, options = subject.config, options or Options()
    modelled = step_parts(subject, rates, options)
    ratio = 1.0
    if measured:
        ratio = measured.step_seconds / sum(step_parts(measured.subject(subject), rates, options).parts.values())
    length = length_of(config, images) if images else None
    evaluation = 0.0
    if images:
        # Not compiled: the modules themselves are evaluated (pipeline.training.compiling).
        batch = sum(map(rates.seconds, traced_evaluation(subject).operators))
        batches = -(-images.val // (config.eval.batch_size * subject.world_size))
        evaluation = batches * batch * ratio * (1 + bool(config.train.ema_decay))
        if measured and measured.evaluation_seconds and measured.world_size == subject.world_size:
            evaluation = measured.evaluation_seconds
    start = START_SECONDS + (COMPILE_SECONDS if modelled.compiled else 0.0)
    return Time(
        subject=subject,
        step=modelled,
        ratio=ratio,
        source=rates.source,
        images=images,
        length=length,
        checkpoints=plan_checkpoints(config, traced_step(subject), length, subject.world_size) if length else None,
        evaluation_seconds=evaluation,
        start_seconds=measured.start_seconds if measured and measured.start_seconds else start,
        loader=loader,
        measured=measured,
        options=options,
    )


def step_parts(subject: Subject, rates: Rates, options: Options) -> StepParts:
    """Seconds of an optimizer step by part, from the operators of one micro-batch."""
    accumulation, step, compiled = subject.accumulation, traced_step(subject), _compiles(subject)
    run = fused(step.operators, step.kept) if compiled else step.operators
    teaching = sum(map(rates.seconds, step.teacher))
    busy = seconds_by_kind((operator for operator in run if not operator.recomputed), rates)
    recomputed = sum(rates.seconds(operator) for operator in run if operator.recomputed)
    forward = sum(rates.seconds(operator) for operator in run if not operator.backward)
    computing, host = sum(busy.values()) + recomputed + teaching, step.tensors * _ENGINE_HOST
    # A GPU waits for what is longer than its own work; a CPU does one after the other.
    waiting, stretch = host, 1.0
    if subject.gpu:
        host += (len(step.operators) * (_COMPILED_STARTS if compiled else 1.0) + len(step.teacher)) * rates.host
        waiting = max(0.0, host - computing)
        stretch = max(1.0, host / computing)  # what the CPU delays, it stretches: collectives have that time too
    links = Links(subject.nodes, subject.gpus_per_node, subject.gpu.link if subject.gpu else CPU_LINK, options.network)
    sent = traffic(
        links,
        step.elements,
        subject.stage,
        accumulation,
        stretch * (forward + teaching),
        stretch * (computing - forward - teaching),
    )
    parts = {kind: accumulation * busy[kind] for kind in KINDS if kind in busy}
    parts |= {RECOMPUTED: accumulation * recomputed, TEACHER: accumulation * teaching, LAUNCHES: accumulation * waiting}
    parts |= {OPTIMIZER: _optimizer_seconds(subject, step, rates), NETWORKED: sent.exposed}
    flops = accumulation * sum(operator.flops for operator in run if not operator.recomputed)
    return StepParts(parts, sent, flops, compiled)


def _compiles(subject: Subject) -> bool:
    """What ``pipeline.training.compiling`` chooses."""
    asked = subject.config.train.compile
    return subject.gpu is not None and subject.stage < 3 if asked == "auto" else asked != "off"


def _optimizer_seconds(subject: Subject, step: TracedStep, rates: Rates) -> float:
    """The update, the gradients' norm, clipping, averages and, with ZeRO, copies between flat shards and weights."""
    train, stage, count = subject.config.train, subject.stage, step.elements
    share = count / subject.world_size if stage else count  # of the optimizer's state on this process
    moved = step.optimizer_passes * share
    moved += count * (1 + 2 * bool(subject.config.optim.clip_grad_norm))
    moved += 3 * (count if stage < 3 else share) * bool(train.ema_decay)
    moved += 4 * count * bool(stage)  # into buckets, out of flat shards
    seconds = 4 * moved / rates.copies
    if step.optimizer_flops:
        seconds += product_seconds(step.optimizer_flops, "bf16" if subject.gpu and subject.gpu.bf16_flops else "fp32", rates)
    return seconds
