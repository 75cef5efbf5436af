"""Plan the time of a run: a step by its parts, images per second, hours, Slurm jobs, GPU hours, money.

The figures of an earlier run replace those of the model of a step, and the loader bounds it by the CPU cores that a node has.
"""

import os
from collections import defaultdict
from dataclasses import dataclass
from functools import cached_property

import torch

from pipeline.hardware import NETWORK
from pipeline.optim.build import optimizer_description
from pipeline.planning.length import Checkpoints, Images, Length, LoaderNeed, jobs_within, length_of, plan_checkpoints
from pipeline.planning.measured import Measured
from pipeline.planning.memory import Subject, traced_evaluation, traced_step
from pipeline.planning.rates import CPU_LINK, GpuRates, Links, Rates, Traffic, measure_cpu, traffic
from pipeline.planning.trace import KINDS, PRODUCT, Operator, fused
from pipeline.planning.traced_step import TEACHER, TracedStep

RECOMPUTED, LAUNCHES = "recomputation", "starting kernels, engine"
OPTIMIZER, NETWORKED = "optimizer and averages", "gradients over the network"
WAITING = "waiting for images"
START_SECONDS = 60.0  # of a job until its first step: libraries, data, NCCL; an assumption
COMPILE_SECONDS = 90.0  # torch.compile of a model's blocks (64 s of PerViT-T, 89 s of M on one core, docs/tuning.md)
_ENGINE_HOST = 40e-6  # seconds of DeepSpeed's engine for each parameter, 8 to 15 ms of 264 (docs/results/step.md); ours copies gradients only
# Kernels that the CPU starts, of a step's operators: counted 0.86 (PerViT-T) to 0.95 (M) with blocks (docs/results/gpu_step.md); graphs: 4.
_STARTS = {"off": 1.0, "blocks": 0.87, "model": 0.9, "graphs": 0.0}


@dataclass(frozen=True)
class StepParts:
    """An optimizer step by the model of its time."""

    parts: dict[str, float]  # seconds by part
    traffic: Traffic  # collectives
    flops: float  # of products, attention and convolutions on one process, without recomputation


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
    """What a run takes. Its properties raise a ``UserError`` if the batch sizes do not divide, the model cannot be built, the schedule is
    shorter than a step, or the time limit than a start."""

    subject: Subject
    rates: Rates
    images: Images | None
    network: float = NETWORK  # bytes per second between a node and the others
    time_limit: float | None = None  # of a Slurm job, in seconds; None: no number of jobs
    price: float | None = None  # of an hour of a GPU; None: no sum
    loader: LoaderNeed | None = None  # what an image takes of the CPU; None: not known
    cpus: int | None = None  # cores of a node; None: not known, so that the loader is taken to keep up
    measured: Measured | None = None  # an earlier run or a measured step, whose figures replace the model's

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
    def compute_rate(self) -> float:
        """Images per second if none has to be waited for."""
        return self.subject.config.train.global_batch_size / (self.ratio * sum(self.step.parts.values()))

    @property
    def loader_rate(self) -> float | None:
        """Images per second that the cores of all nodes decode; None: not known, or the GPU decodes."""
        if self.loader is None or self.cpus is None or (self.subject.gpu and self.subject.config.data.decode == "gpu"):
            return None
        free = max(1, self.cpus - self.subject.gpus_per_node)  # each process has a core to start kernels
        return self.subject.nodes * free / self.loader.cpu_seconds

    @property
    def cores(self) -> float | None:
        """Of a node, with which the loader keeps up with the computing; None: not known."""
        if self.loader is None:
            return None
        return self.loader.cpu_seconds * self.compute_rate / self.subject.nodes + self.subject.gpus_per_node

    @property
    def bound_by_loader(self) -> bool:
        return self.loader_rate is not None and self.loader_rate < self.compute_rate

    @property
    def parts(self) -> dict[str, float]:
        """Seconds of an optimizer step by part."""
        parts = {name: seconds * self.ratio for name, seconds in self.step.parts.items() if seconds > 0}
        waiting = self.subject.config.train.global_batch_size / self.images_per_second - sum(parts.values())
        return {**parts, WAITING: waiting} if self.bound_by_loader else parts

    @property
    def step_seconds(self) -> float:
        return sum(self.parts.values())

    @property
    def images_per_second(self) -> float:
        """Of the slower one, computing or loading."""
        return min(self.compute_rate, self.loader_rate or self.compute_rate)

    @property
    def start_seconds(self) -> float:
        """Of a job until its first step."""
        if self.measured and self.measured.start_seconds:
            return self.measured.start_seconds
        return START_SECONDS + (COMPILE_SECONDS if self.subject.compile != "off" else 0.0)

    @cached_property
    def run(self) -> WholeRun | None:
        """None: the number of images is not known."""
        if self.images is None:
            return None
        config, world = self.subject.config, self.subject.world_size
        length, evaluation = length_of(config, self.images), self._evaluation_seconds(self.images)
        saved = plan_checkpoints(config, traced_step(self.subject), length, world)
        seconds = length.steps * self.step_seconds + length.evaluations * evaluation
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
        loading = images.val / self.loader_rate if self.loader_rate else 0.0
        return max(batches * batch * self.ratio, loading) * (1 + bool(config.train.ema_decay))


def rates_of(subject: Subject) -> Rates:
    """The GPU's; or this CPU's, measured here with a process's share of the cores."""
    if subject.gpu:
        return GpuRates(subject.gpu)
    torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // subject.gpus_per_node))
    return measure_cpu(subject.precision)


def step_parts(subject: Subject, rates: Rates, network: float = NETWORK) -> StepParts:
    """Seconds of an optimizer step by part, from the operators of one micro-batch."""
    accumulation, step = subject.accumulation, traced_step(subject)
    run = step.operators if subject.compile == "off" else fused(step.operators, step.kept)
    busy: dict[str, float] = defaultdict(float)
    forward = 0.0
    for operator in run:
        seconds = rates.seconds(operator)
        busy[RECOMPUTED if operator.recomputed else operator.kind] += seconds
        forward += 0.0 if operator.backward else seconds
    recomputed, teaching = busy.pop(RECOMPUTED, 0.0), sum(map(rates.seconds, step.teacher))
    computing, host = sum(busy.values()) + recomputed + teaching, step.tensors * _ENGINE_HOST * bool(subject.stage)
    # A GPU waits for what is longer than its own work; a CPU does one after the other.
    waiting, stretch = host, 1.0
    if subject.gpu:
        host += (len(step.operators) * _STARTS[subject.compile] + len(step.teacher)) * rates.host
        waiting = max(0.0, host - computing)
        stretch = max(1.0, host / computing)  # what the CPU delays, it stretches: collectives have that time too
    links = Links(subject.nodes, subject.gpus_per_node, subject.gpu.link if subject.gpu else CPU_LINK, network)
    ahead, behind = stretch * (forward + teaching), stretch * (computing - forward - teaching)
    sent = traffic(links, step.elements, subject.stage, accumulation, ahead, behind)
    parts = {kind: accumulation * busy[kind] for kind in KINDS if kind in busy}
    parts |= {RECOMPUTED: accumulation * recomputed, TEACHER: accumulation * teaching, LAUNCHES: accumulation * waiting}
    parts |= {OPTIMIZER: _optimizer_seconds(subject, step, rates), NETWORKED: sent.exposed}
    flops = accumulation * sum(operator.flops for operator in run if not operator.recomputed)
    return StepParts(parts, sent, flops)


def _optimizer_seconds(subject: Subject, step: TracedStep, rates: Rates) -> float:
    """The update, the gradients' norm, clipping, averages, and copies of gradients into flat ones; with ZeRO also between flat shards and weights."""
    train, stage, count = subject.config.train, subject.stage, step.elements
    share = count / subject.world_size if stage else count  # of the optimizer's state on this process
    moved = optimizer_description(subject.config.optim).passes * share
    moved += count * (1 + 2 * bool(subject.config.optim.clip_grad_norm))
    moved += 3 * (count if stage < 3 else share) * bool(train.ema_decay)
    moved += (4 if stage else 2) * count  # into buckets, out of flat shards; without ZeRO into a flat tensor
    seconds = 4 * moved / rates.copies
    if step.optimizer_flops:
        dtype = torch.bfloat16 if subject.precision == "bf16" else torch.float32
        seconds += rates.seconds(Operator("mm", PRODUCT, step.optimizer_flops, (), (), 0, dtype))
    return seconds
