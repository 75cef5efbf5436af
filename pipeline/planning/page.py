"""Write the page and the JSON of a plan: memory by part, what to change where it does not fit, time, length and storage."""

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from pipeline.errors import UserError, counted, size_text
from pipeline.hardware import GIB
from pipeline.optim.build import optimizer_description
from pipeline.planning.length import SIGNAL_SECONDS
from pipeline.planning.memory import Memory, Subject, largest_micro_batch, plan_memory, trained_parameters
from pipeline.planning.time import Time
from pipeline.planning.traced_step import ACTIVATIONS

Rows = Iterable[tuple[str, str]]  # what it is, its value
_BAR = 30  # characters of the largest part
_TIMES = "\N{MULTIPLICATION SIGN}"
# benchmarks/plan_time.py prints the tables.
_GPU_ERROR = "median 7 %, at most 41 %, against published training steps; starting kernels and network are assumptions"
_CPU_ERROR = "at most 26 % against steps measured on one CPU"


def text(subject: Subject, memory: Memory, time: Time, passed_over: str | None = None) -> str:
    """The page. Args: passed_over: a sentence about an earlier run that does not measure this one."""
    peak = "its peak, in an evaluation" if memory.in_evaluation else "its peak"
    at_peak = f"Memory per {'GPU' if subject.gpu else 'process'} at {peak}"
    sections = {at_peak: _parts(memory), "Micro-batch": _sizes(subject)}
    if not memory.fits:
        sections["What would help, each by itself"] = _advice(subject, memory)
    side = subject.config.model.image_size
    largest = f"data.size_schedule is left out: memory and time are those of {side} px throughout, the most that they can be."
    remarks = [*memory.remarks, *[largest] * bool(subject.config.data.size_schedule), passed_over]
    notes = [f"note: {remark}" for remark in remarks if remark]
    pages = [_title(subject, memory)]
    for title, rows in {**sections, **time_sections(time)}.items():  # a headline and its rows, in two columns
        rows = list(rows)
        width = max(len(name) for name, _ in rows)
        pages.append("\n".join([title, *(f"  {name:<{width}}  {value}" for name, value in rows)]))
    return "\n\n".join([*pages, *(["\n".join(notes)] if notes else [])])


def figures(subject: Subject, memory: Memory, time: Time) -> dict[str, Any]:
    """The keys of ``--json``; hours are null where the number of images is not known."""
    return {
        "memory_gib": {name: round(size / GIB, 4) for name, size in {**memory.parts, "total": memory.total}.items()},
        "capacity_gib": round(memory.capacity / GIB, 4),
        "fits": memory.fits,
        "micro_batch": subject.config.train.micro_batch,
        "accumulation": subject.accumulation,
        "largest_micro_batch": largest_micro_batch(subject),
        "step_seconds": time.step_seconds,
        "images_per_second": time.images_per_second,
        "bound_by": "loader" if time.bound_by_loader else "compute",
        "loader": {"images_per_second": time.loader_rate, "cpu_cores": time.cpus, "cpu_cores_needed": time.cores},
        "hours": time.run.hours if time.run else None,
        "gpu_hours": time.run.gpu_hours if time.run else None,
    }


def _title(subject: Subject, memory: Memory) -> str:
    config, train, world = subject.config, subject.config.train, subject.world_size
    device = subject.gpu.name if subject.gpu else "CPU"
    model = f"{config.model.name}, {config.model.image_size} px, {subject.precision}, ZeRO stage {subject.stage}"
    machine = f"{counted(subject.nodes, 'node')} {_TIMES} {subject.gpus_per_node} {device} = {counted(world, 'process')}"
    factors = f"{train.micro_batch} {_TIMES} {world} {_TIMES} {subject.accumulation} (micro-batch, processes, accumulation)"
    verdict = f"{'fits' if memory.fits else 'DOES NOT FIT'}: {_gib(memory.total)} of {_gib(memory.capacity)}"
    settings = f"{model}, activation checkpointing {'on' if train.activation_checkpointing else 'off'}"
    return f"{settings}\n{machine}; global batch {train.global_batch_size} = {factors}\n{verdict}"


def _parts(memory: Memory) -> Rows:
    largest = max(memory.parts.values())
    for name, size in memory.parts.items():
        yield name, f"{_gib(size):>11}  {'█' * round(_BAR * size / largest)}"
    yield "total", f"{_gib(memory.total):>11}"
    yield ("left" if memory.fits else "missing"), f"{_gib(abs(memory.left)):>11}"


def _sizes(subject: Subject) -> Rows:
    on = subject.config.train.activation_checkpointing
    for checkpointing in (on, not on) if _recomputes(subject) else (on,):
        other = subject.changed({"train.activation_checkpointing": checkpointing})
        planned, largest = plan_memory(other), largest_micro_batch(other)
        steps = subject.config.train.global_batch_size // (max(1, largest) * subject.world_size)
        fitting = f"largest micro-batch {largest}, accumulation {steps}" if largest else "no micro-batch fits"
        activations = f"activations {_gib(planned.parts.get(ACTIVATIONS, 0)):>11}"
        yield f"checkpointing {'on' if checkpointing else 'off'}", f"{activations}, total {_gib(planned.total):>11}; {fitting}"


def _recomputes(subject: Subject) -> bool:
    """Whether the model has activation checkpointing, which some of others' code lack."""
    try:
        trained_parameters(subject.changed({"train.activation_checkpointing": True}).config)
    except UserError:
        return False
    return True


@dataclass(frozen=True)
class Change:
    """A change of the config by itself."""

    overrides: str  # as the command line takes them
    cost: str  # what it costs, in a few words
    memory: Memory  # with it
    saving: int  # bytes, against the plan without it


def changes(subject: Subject, memory: Memory) -> list[Change]:
    """Changes that save memory, the largest saving first."""
    found = [
        Change(f"{key}={str(value).lower()}", cost, after, memory.total - after.total)
        for key, value, cost in _candidates(subject, memory)
        if (after := plan_memory(subject.changed({key: value}))).total < memory.total
    ]
    return sorted(found, key=lambda change: -change.saving)


def _together(subject: Subject, memory: Memory) -> tuple[str, int]:
    """Where no change alone is enough: all that leave the result as it is, and the largest micro-batch size with them; 0: none fits."""
    overrides = []
    for key, value, _ in _candidates(subject, memory, sizes=False):
        changed = subject.changed({key: value})
        if key != "train.precision" and plan_memory(changed).total < memory.total:
            overrides.append(f"{key}={str(value).lower()}")
            subject = changed
    return " ".join(overrides), largest_micro_batch(subject)


def _candidates(subject: Subject, memory: Memory, sizes: bool = True) -> Iterator[tuple[str, Any, str]]:
    """Key and value of changes, and what they cost."""
    train = subject.config.train
    if not train.activation_checkpointing and _recomputes(subject):
        yield "train.activation_checkpointing", True, "about a quarter more time, the same result"
    if subject.world_size > 1 and optimizer_description(subject.config.optim).takes_slices:
        for stage in range(subject.stage + 1, 4):
            yield "train.zero_stage", stage, "more traffic, the same result" if stage == 3 else "the same result"
    if subject.precision == "fp32" and (subject.gpu is None or subject.gpu.bf16_flops):
        yield "train.precision", "bf16", "a begun run keeps its precision"
    if memory.in_evaluation and (smaller := min(train.micro_batch, subject.config.eval.batch_size // 2)):
        yield "eval.batch_size", smaller, "the same result"
    if sizes and (largest := largest_micro_batch(subject)) and largest < train.micro_batch:
        accumulation = subject.accumulation * train.micro_batch // largest
        cost = f"{accumulation} micro-batches per step; BatchNorm sees fewer images at a time"
        yield "train.micro_batch_size", largest, cost


def _advice(subject: Subject, memory: Memory) -> Rows:
    found = changes(subject, memory)
    for change in found:
        verdict = "fits" if change.memory.fits else f"{_gib(change.memory.total)}, still too much"
        yield change.overrides, f"saves {_gib(change.saving):>11}: {verdict} ({change.cost})"
    if not any(change.memory.fits for change in found):
        overrides, largest = _together(subject, memory)
        if largest and overrides:
            yield "together", f"{overrides} train.micro_batch_size={largest} fits"
        else:
            yield "nothing in the config alone", "take GPUs with more memory, a smaller model or smaller images"


def time_sections(time: Time) -> dict[str, Rows]:
    """Title and rows of each section about time, length and storage."""
    return {"Time of an optimizer step": _step(time), "The whole run": _run(time), "Data and storage": _storage(time)}


def _step(time: Time) -> Rows:
    step, world, gpu, measured = time.step_seconds, time.subject.world_size, time.subject.gpu, time.measured
    for name, seconds in time.parts.items():
        if seconds > 0.0005 * step:
            yield name, f"{duration(seconds):>9}  {seconds / step:4.0%}"
    per_process = f", {time.images_per_second / world:,.0f} per process" if world > 1 else ""
    yield "together", f"{duration(step):>9}  {time.images_per_second:,.0f} images/s{per_process}"
    yield "bound by", _bound(time)
    if gpu:
        precision, rate = time.subject.precision, time.step.flops / step
        peak = gpu.bf16_flops if precision == "bf16" and gpu.bf16_flops else gpu.fp32_flops
        yield "model FLOPs", f"{rate / 1e12:.0f} TFLOP/s per GPU, {rate / peak:.0%} of its {precision} peak"
    if measured:
        layout = measured.case or f"{measured.steps:,} steps on {counted(measured.world_size, 'process')}"
        scaled = f"{time.ratio:.2f} times what the rates give; all parts are scaled by that"
        yield "measured", f"{measured.source}, {layout}: {duration(measured.step_seconds)} a step, {scaled}"
        if measured.data_wait > 0.02:
            yield "", f"of which {measured.data_wait:.0%} waited for data"
    yield "rates", time.rates.source
    if not measured:
        yield "error", _GPU_ERROR if gpu else _CPU_ERROR


def _bound(time: Time) -> str:
    """What a step waits for: computing, or images from the CPU."""
    if time.cores is None:
        return "compute, if the loader keeps up, which is not known: --data SHARDS measures it"
    needed, subject = math.ceil(time.cores), time.subject
    if time.loader_rate is None:
        on_gpu = subject.gpu and subject.config.data.decode == "gpu"
        decoded = "fewer as the GPU decodes" if on_gpu else "--cpus N says if they are there"
        return f"compute, if the loader keeps up, which needs {needed:,} CPU cores per node: {decoded}"
    rate = f"{time.cpus:,} CPU cores per node load {time.loader_rate:,.0f} images/s"
    if time.bound_by_loader:
        return f"the loader: {rate}; training could take {time.compute_rate:,.0f}, which needs {needed:,} cores"
    return f"compute: {rate}, and {needed:,} are enough"


def _run(time: Time) -> Rows:
    run, classes = time.run, time.subject.config.model.num_classes
    if run is None:
        yield "hours", f"not known: {classes} classes are of no set that the plan knows; pass --data SHARDS"
        return
    length, images = run.length, run.images
    yield "images", f"{images.train:,} for training, {images.val:,} for validation ({images.source})"
    evaluations = f"{counted(length.evaluations, 'evaluation')} of {duration(run.evaluation_seconds)}"
    yield "steps", f"{length.steps:,} in {length.epochs:.4g} epochs; {evaluations}"
    short = f" ({duration(3600 * run.hours)})" if run.hours < 1 else ""
    yield "hours", f"{run.hours:,.3g}{short}, of which {duration(time.start_seconds)} for each start"
    if run.jobs is not None and time.time_limit is not None:
        last = f"the last {SIGNAL_SECONDS} s of each for its checkpoint"
        yield "Slurm jobs", f"{run.jobs:,} at a time limit of {time.time_limit / 3600:.4g} h, {last}"
    if time.subject.gpu:
        yield "GPU hours", f"{run.gpu_hours:,.3g} on {counted(time.subject.world_size, 'GPU')}"
        if run.cost is not None:
            yield "cost", f"{run.cost:,.0f} at {time.price:g} per GPU hour"


def _storage(time: Time) -> Rows:
    subject, need = time.subject, time.loader
    if need:
        yield "loader", f"{1e3 * need.cpu_seconds:.1f} ms of CPU time per image, {need.source}; and a core for each process"
        if subject.gpu and subject.config.data.decode != "cpu":
            yield "", "fewer where the GPU decodes (data.decode=gpu), which takes some of its time"
        rate = size_text(need.bytes * time.images_per_second / subject.nodes)
        yield "reading", f"{rate}/s on each node, {size_text(need.bytes)} per image; less where the page cache holds it"
    else:
        yield "loader", "not measured: --data SHARDS measures it on the shards for a few seconds"
    if subject.world_size > 1:
        between = f"; {size_text(time.network)}/s between nodes" if subject.nodes > 1 else ""
        sent = f"{size_text(time.step.traffic.bytes)} sent by each process and step"
        yield "gradients", f"{sent}, {duration(time.step.traffic.total)} of the links' time{between}"
    if time.run:
        saved = time.run.checkpoints
        yield "checkpoint", f"{size_text(saved.size)}, {size_text(saved.part)} from each process"
        best = " and one for each best accuracy" if subject.config.checkpoint.keep_best else ""
        yield "checkpoints", f"{saved.kept} kept, {size_text(saved.kept * saved.size)}; {time.run.length.saves:,} written{best}"


def duration(seconds: float) -> str:
    """In a readable unit, with three digits."""
    if seconds < 1:
        return f"{1e3 * seconds:.3g} ms"
    if seconds < 600:
        return f"{seconds:.3g} s"
    return f"{seconds / 60:.3g} min" if seconds < 7200 else f"{seconds / 3600:.3g} h"


def _gib(size: int) -> str:
    return f"{size / GIB:.2f} GiB" if size >= GIB / 100 or not size else f"{size / 2**20:.2f} MiB"
