"""Plan the time of a run: a step by its parts, images per second, hours, Slurm jobs, GPU hours, money.

The figures of an earlier run replace those of the model of a step.
"""

from __future__ import annotations

import os
from collections import defaultdict
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from statistics import median

import numpy as np
import torch

from pipeline.config import Config
from pipeline.errors import UserError
from pipeline.hardware import NETWORK, gpu_of_driver
from pipeline.planning.length import Checkpoints, Images, Length, LoaderNeed, jobs_within, length_of, plan_checkpoints
from pipeline.planning.memory import Subject, traced_evaluation, traced_step
from pipeline.planning.rates import CPU_LINK, GpuRates, Links, Rates, Traffic, measure_cpu, traffic
from pipeline.planning.trace import KINDS, PRODUCT, Operator, fused
from pipeline.planning.traced_step import TEACHER, TracedStep
from pipeline.runs import METRICS
from pipeline.runs.folder import read_run, starts_of

RECOMPUTED, LAUNCHES = "recomputation", "starting kernels, engine"
OPTIMIZER, NETWORKED = "optimizer and averages", "gradients over the network"
START_SECONDS = 60.0  # of a job until its first step: libraries, data, NCCL; an assumption
COMPILE_SECONDS = 90.0  # torch.compile of a model's blocks (one to two minutes on a CPU, docs/results/step.md)
_ENGINE_HOST = 40e-6  # seconds of DeepSpeed's engine for each parameter: 8 to 15 ms of PerViT-T's 264 (docs/results/step.md)
_FEWEST = 5  # steps of an earlier run that are measured
_COMPILED_STARTS = 0.3  # operators that are started after compiling, of those before; an assumption


@dataclass(frozen=True)
class Measured:
    """What a run has measured."""

    source: str
    config: Config
    world_size: int  # its processes
    nodes: int  # their hosts
    stage: int  # of ZeRO
    device: str  # as it calls itself
    step_seconds: float  # median of its optimizer steps, waiting for data included
    steps: int
    data_wait: float  # share of a step spent waiting for data
    evaluation_seconds: float | None = None  # median of its evaluations; None: none is recorded
    start_seconds: float | None = None  # median from a start to its first step; None: not recorded

    def subject(self, planned: Subject) -> Subject:
        """The run itself, on the planned kind of GPU."""
        there = Subject(self.config, self.nodes, max(1, self.world_size // self.nodes), planned.gpu)
        return there.changed("train", precision=planned.precision, zero_stage=self.stage)


@dataclass(frozen=True)
class StepParts:
    """An optimizer step by the model of its time."""

    parts: dict[str, float]  # seconds by part
    traffic: Traffic  # collectives
    flops: float  # of products, attention and convolutions on one process, without recomputation
    compiled: bool  # parts of it run through ``torch.compile``


@dataclass(frozen=True)
class WholeRun:
    """A run from its first step to its last."""

    images: Images
    length: Length
    checkpoints: Checkpoints
    evaluation_seconds: float  # of one pass over the validation set, the average's included
    jobs: int | None  # of Slurm, one after the other; None without a time limit
    hours: float  # from the first job's start to the last one's end, without the time in the queue
    gpu_hours: float
    cost: float | None  # None without a price


@dataclass(frozen=True)
class Time:
    """What a run takes.

    Its properties raise a ``UserError`` if the batch sizes do not divide, the model cannot be built, the schedule is shorter than a step,
    or the time limit than a start.
    """

    subject: Subject
    rates: Rates
    images: Images | None
    network: float = NETWORK  # bytes per second between a node and the others
    time_limit: float | None = None  # of a Slurm job, in seconds; None: no number of jobs
    price: float | None = None  # of an hour of a GPU; None: no sum
    loader: LoaderNeed | None = None  # what the loader takes on the real shards; None: not measured
    measured: Measured | None = None  # an earlier run, whose figures replace the model's

    @cached_property
    def step(self) -> StepParts:
        return step_parts(self.subject, self.rates, self.network)

    @cached_property
    def ratio(self) -> float:
        """Of the measured run's step to the model's, by which the whole plan is scaled; 1 without one."""
        if self.measured is None:
            return 1.0
        modelled = step_parts(self.measured.subject(self.subject), self.rates, self.network)
        return self.measured.step_seconds / sum(modelled.parts.values())

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
    def start_seconds(self) -> float:
        """Of a job until its first step."""
        if self.measured and self.measured.start_seconds:
            return self.measured.start_seconds
        return START_SECONDS + (COMPILE_SECONDS if self.step.compiled else 0.0)

    @cached_property
    def run(self) -> WholeRun | None:
        """None: the number of images is not known."""
        if self.images is None:
            return None
        config, world = self.subject.config, self.subject.world_size
        length, evaluation = length_of(config, self.images), self._evaluation_seconds(self.images)
        saved = plan_checkpoints(config, traced_step(self.subject), length, world)
        seconds = length.steps * self.step_seconds + length.evaluations * evaluation + saved.written * saved.hold_up
        jobs = None if self.time_limit is None else jobs_within(seconds, self.time_limit, self.start_seconds)
        hours = (seconds + (jobs or 1) * self.start_seconds) / 3600
        cost = None if self.price is None else hours * world * self.price
        return WholeRun(self.images, length, saved, evaluation, jobs, hours, hours * world, cost)

    def _evaluation_seconds(self, images: Images) -> float:
        config, world, measured = self.subject.config, self.subject.world_size, self.measured
        if measured and measured.evaluation_seconds and measured.world_size == world:
            return measured.evaluation_seconds
        # Not compiled: the modules themselves are evaluated (pipeline.training.compiling).
        batch = sum(map(self.rates.seconds, traced_evaluation(self.subject).operators))
        batches = -(-images.val // (config.eval.batch_size * world))
        return batches * batch * self.ratio * (1 + bool(config.train.ema_decay))


def rates_of(subject: Subject) -> Rates:
    """The GPU's; or this CPU's, measured here with a process's share of the cores."""
    if subject.gpu:
        return GpuRates(subject.gpu)
    torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // subject.gpus_per_node))
    return measure_cpu(subject.precision)


def step_parts(subject: Subject, rates: Rates, network: float = NETWORK) -> StepParts:
    """Seconds of an optimizer step by part, from the operators of one micro-batch."""
    accumulation, step, compiled = subject.accumulation, traced_step(subject), _compiles(subject)
    run = fused(step.operators, step.kept) if compiled else step.operators
    busy: dict[str, float] = defaultdict(float)
    forward = 0.0
    for operator in run:
        seconds = rates.seconds(operator)
        busy[RECOMPUTED if operator.recomputed else operator.kind] += seconds
        forward += 0.0 if operator.backward else seconds
    recomputed, teaching = busy.pop(RECOMPUTED, 0.0), sum(map(rates.seconds, step.teacher))
    computing, host = sum(busy.values()) + recomputed + teaching, step.tensors * _ENGINE_HOST
    # A GPU waits for what is longer than its own work; a CPU does one after the other.
    waiting, stretch = host, 1.0
    if subject.gpu:
        host += (len(step.operators) * (_COMPILED_STARTS if compiled else 1.0) + len(step.teacher)) * rates.host
        waiting = max(0.0, host - computing)
        stretch = max(1.0, host / computing)  # what the CPU delays, it stretches: collectives have that time too
    links = Links(subject.nodes, subject.gpus_per_node, subject.gpu.link if subject.gpu else CPU_LINK, network)
    ahead, behind = stretch * (forward + teaching), stretch * (computing - forward - teaching)
    sent = traffic(links, step.elements, subject.stage, accumulation, ahead, behind)
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
        dtype = torch.bfloat16 if subject.gpu and subject.gpu.bf16_flops else torch.float32
        seconds += rates.seconds(Operator("mm", PRODUCT, step.optimizer_flops, (), (), 0, dtype))
    return seconds


def read_measured(path: Path) -> Measured:
    """Measure a run's newest start that has enough steps; the first rows of a start, which warm up and compile, are left out.

    Raises:
        UserError: it is not a run folder, its config cannot be read, or it has too few steps.
    """
    run = read_run(path)
    config, columns = run.settings, run.metrics.steps
    if "images_per_second" not in columns:
        raise UserError(f"{path / METRICS} must have at least {_FEWEST} training steps, got 0", "pass a run that has trained")
    steps, rates = columns["step"], columns["images_per_second"]
    for start in reversed(starts_of(run)):
        done = start.step or 0
        first = done + config.log.every_steps  # the last row of those that were written first
        mine = (steps > first) & (steps <= (start.reached or np.inf)) & ~np.isnan(rates)
        if mine.sum() >= _FEWEST and start.world_size:
            break
    else:
        raise UserError(
            f"{path / METRICS} must have at least {_FEWEST} steps after the first {config.log.every_steps} of a start, which warm up",
            "pass a run that has trained longer",
        )
    waits = columns.get("data_wait", np.full(len(steps), np.nan))[mine]
    evaluations = run.seconds_of("evaluation")
    first_ends = columns["time"][steps == done + 1] if "time" in columns else np.empty(0)
    began = float(first_ends[0]) - start.began if len(first_ends) and start.began is not None else -1.0
    hosts, stage = len(start.hosts) or 1, start.zero_stage or 0
    return Measured(
        source=str(path),
        config=config,
        world_size=start.world_size,
        nodes=hosts if start.world_size % hosts == 0 else 1,
        stage=stage if start.world_size > 1 else 0,
        device=start.device or "",
        step_seconds=config.train.global_batch_size / float(np.median(rates[mine])),
        steps=int(mine.sum()),
        data_wait=0.0 if np.isnan(waits).all() else float(np.nanmedian(waits)),
        evaluation_seconds=median(evaluations) if evaluations else None,
        start_seconds=began if began >= 0 else None,
    )


def difference(measured: Measured, planned: Subject) -> str | None:
    """Why the run's figures say nothing about the plan; None if they do. Another number of processes, batch sizes, ZeRO stage and
    activation checkpointing are not an obstacle: the model of time knows them."""
    ours, theirs = planned.config, measured.config
    for name in ("name", "image_size", "num_classes", "switches"):
        if getattr(ours.model, name) != getattr(theirs.model, name):
            return f"its model.{name} is {getattr(theirs.model, name)}, not {getattr(ours.model, name)}"
    if theirs.train.precision not in ("auto", planned.precision):
        return f"its train.precision is {theirs.train.precision}, not {planned.precision}"
    known = gpu_of_driver(measured.device)
    on_gpu = any(maker in measured.device.lower() for maker in ("nvidia", "tesla", "geforce"))
    if not (known is not None and known.chip == planned.gpu.chip if planned.gpu else not on_gpu):
        return f"it ran on {measured.device}, and the plan is for {'CPUs' if planned.gpu is None else planned.gpu.name}"
    return None
