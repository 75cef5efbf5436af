"""Time of a planned run: a step by its parts, images per second, hours, Slurm jobs, GPU hours, money."""

from __future__ import annotations

from dataclasses import dataclass

from pipeline.config import accumulation_steps
from pipeline.hardware import Gpu
from pipeline.planning.loader_need import LoaderNeed
from pipeline.planning.measured import Measured
from pipeline.planning.network import CPU_LINK, Links, Traffic, traffic
from pipeline.planning.operators import KINDS, Operator, Step, trace_step
from pipeline.planning.roofline import Rates, fused, product_seconds, seconds_by_kind
from pipeline.planning.schedule import Images, Length, Options, jobs_within, length_of
from pipeline.planning.storage import Checkpoints, plan_checkpoints
from pipeline.planning.subject import Subject

RECOMPUTED, LAUNCHES, OPTIMIZER, NETWORKED = (
    "recomputation",
    "starting kernels, engine",
    "optimizer and averages",
    "gradients over the network",
)
START_SECONDS = 60.0  # of a job until its first step: libraries, data, NCCL; an assumption
COMPILE_SECONDS = 90.0  # torch.compile of a model's blocks (one to two minutes on a CPU, benchmarks/RESULTS.md)
_ENGINE_HOST = 40e-6  # seconds of DeepSpeed's engine for each parameter: 8 to 15 ms of PerViT-T's 264 (benchmarks/RESULTS.md)
_COMPILED_STARTS = 0.3  # operators that are started after compiling, of those before; an assumption


@dataclass(frozen=True)
class Time:
    """What a run takes.

    Attributes:
        subject: the run.
        precision: "bf16" or "fp32".
        parts: seconds of an optimizer step by part.
        traffic: collectives of a step.
        flops: of a step's products, attention and convolutions on one process, without recomputation.
        source: of the rates.
        images: sizes of the data set; None: not known, so that there are no hours.
        length: steps and evaluations; None likewise.
        evaluation_seconds: of one pass over the validation set, the average's included.
        start_seconds: of a job until its first step.
        checkpoints: their size and number; None without a length.
        loader: what the loader takes on the real shards; None: not measured.
        measured: the run whose figures stand in place of the model's; None: the model's.
        modelled_step: seconds of a step by the model alone.
        options: of the plan.
    """

    subject: Subject
    precision: str
    parts: dict[str, float]
    traffic: Traffic
    flops: float
    source: str
    images: Images | None
    length: Length | None
    evaluation_seconds: float
    start_seconds: float
    checkpoints: Checkpoints | None
    loader: LoaderNeed | None
    measured: Measured | None
    modelled_step: float
    options: Options

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


def plan_time(
    subject: Subject,
    precision: str,
    stage: int,
    rates: Rates,
    images: Images | None,
    options: Options | None = None,
    loader: LoaderNeed | None = None,
    measured: Measured | None = None,
) -> Time:
    """Plan the time of a run.

    Args:
        subject: the run.
        precision: "bf16" or "fp32", as it would choose.
        stage: of ZeRO that its engine takes, 0 on one process.
        rates: of a process's device: :class:`~pipeline.planning.roofline.GpuRates` or what
            :func:`~pipeline.planning.machine.measure_cpu` returns.
        images: from :func:`~pipeline.planning.schedule.count_images`.
        options: of the command line.
        loader: from :func:`~pipeline.planning.loader_need.measure_loader`.
        measured: of an earlier run; its ratio of measured to modelled time scales the whole plan.

    Raises:
        UserError: the batch sizes do not divide, the model cannot be built, or the schedule is shorter than a step.
    """
    options = options or Options()
    config = subject.config
    modelled = step_parts(subject, precision, stage, rates, options)
    ratio = 1.0
    if measured:
        there = step_parts(measured.subject(subject), precision, measured.stage, rates, options)
        ratio = measured.step_seconds / sum(there.parts.values())
    length = length_of(config, images) if images else None
    evaluation = 0.0
    if images:
        # Not compiled: the modules themselves are evaluated (pipeline.run.compiling).
        forward = trace_step(config, config.eval.batch_size, precision, subject.gpu is not None, learn=False)
        batches = -(-images.val // (config.eval.batch_size * subject.world_size))
        evaluation = batches * sum(map(rates.seconds, forward.operators)) * ratio * (1 + bool(config.train.ema_decay))
        if measured and measured.evaluation_seconds and measured.world_size == subject.world_size:
            evaluation = measured.evaluation_seconds
    start = START_SECONDS + (COMPILE_SECONDS if modelled.compiled else 0.0)
    return Time(
        subject=subject,
        precision=precision,
        parts={name: seconds * ratio for name, seconds in modelled.parts.items() if seconds > 0},
        traffic=modelled.traffic,
        flops=modelled.flops,
        source=rates.source,
        images=images,
        length=length,
        evaluation_seconds=evaluation,
        start_seconds=measured.start_seconds if measured and measured.start_seconds else start,
        checkpoints=plan_checkpoints(config, modelled.step, length, subject.world_size) if length else None,
        loader=loader,
        measured=measured,
        modelled_step=sum(modelled.parts.values()),
        options=options,
    )


@dataclass(frozen=True)
class StepParts:
    """A step by the model of its time."""

    parts: dict[str, float]
    traffic: Traffic
    flops: float
    step: Step
    compiled: bool


def step_parts(subject: Subject, precision: str, stage: int, rates: Rates, options: Options) -> StepParts:
    """Seconds of an optimizer step by part, from the operators of one micro-batch."""
    config, on_gpu = subject.config, subject.gpu is not None
    accumulation = accumulation_steps(config.train, subject.world_size, config.augment.unit)
    step = trace_step(config, config.train.micro_batch, precision, on_gpu)
    compiled = _compiles(subject, stage)
    run = _run(step, compiled)
    busy = seconds_by_kind((o for o in run if not o.recomputed), rates)
    recomputed = sum(rates.seconds(o) for o in run if o.recomputed)
    computing = sum(busy.values()) + recomputed
    starts = len(step.operators) * rates.host * (_COMPILED_STARTS if compiled else 1.0) if on_gpu else 0.0
    engine = len(step.parameters) * _ENGINE_HOST
    parts = {kind: accumulation * busy[kind] for kind in KINDS if kind in busy}
    parts[RECOMPUTED] = accumulation * recomputed
    # A GPU waits for what is longer than its own work; a CPU does one after the other.
    parts[LAUNCHES] = accumulation * max(0.0, starts + engine - computing) if on_gpu else accumulation * engine
    parts[OPTIMIZER] = _optimizer_seconds(subject, step, stage, rates)
    forward = sum(rates.seconds(o) for o in run if not o.backward)
    # What the CPU delays, it stretches: collectives have that time too.
    stretch = max(1.0, (starts + engine) / computing) if on_gpu else 1.0
    links = Links(subject.nodes, subject.gpus_per_node, _link(subject.gpu), options.network)
    sent = traffic(links, step.parameter_count, stage, accumulation, stretch * forward, stretch * (computing - forward))
    parts[NETWORKED] = sent.exposed
    return StepParts(parts, sent, accumulation * sum(o.flops for o in run if not o.recomputed), step, compiled)


def _run(step: Step, compiled: bool) -> list[Operator]:
    """The operators as they run."""
    return fused(step.operators, step.kept) if compiled else step.operators


def _compiles(subject: Subject, stage: int) -> bool:
    """What ``pipeline.run.compiling`` chooses."""
    asked = subject.config.train.compile
    return subject.gpu is not None and stage < 3 if asked == "auto" else asked != "off"


def _link(gpu: Gpu | None) -> float:
    return gpu.link if gpu else CPU_LINK


def _optimizer_seconds(subject: Subject, step: Step, stage: int, rates: Rates) -> float:
    """The update, the gradients' norm, clipping, averages and, with ZeRO, copies between flat shards and weights."""
    config, count = subject.config, step.parameter_count
    share = count / subject.world_size if stage else count  # of the optimizer's state on this process
    passes = {"adamw": 7, "lamb": 12, "muon": 8}[config.optim.name]  # numbers read and written for each parameter
    moved = 4 * passes * share
    moved += 4 * count * (1 + 2 * bool(config.optim.clip_grad_norm))
    moved += 4 * 3 * (count if stage < 3 else share) * bool(config.train.ema_decay)
    moved += 4 * 4 * count * bool(stage)  # into buckets, out of flat shards
    seconds = moved / rates.copies
    if config.optim.name == "muon":
        seconds += product_seconds(_muon_flops(step), "bf16" if subject.gpu and subject.gpu.bf16_flops else "fp32", rates)
    return seconds


def _muon_flops(step: Step) -> float:
    """Five rounds of Newton-Schulz on each matrix (Jordan et al., 2024): X Xᵀ, its square, and their product with X."""
    flops = 0.0
    for shape in step.parameters:
        if len(shape) == 2:
            small, large = sorted(shape)
            flops += 5 * 2 * (2 * small * small * large + small**3)
    return flops
