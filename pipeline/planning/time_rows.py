"""The sections of a page that tell a plan's time, length and storage."""

from __future__ import annotations

from pipeline.planning.schedule import SIGNAL_SECONDS
from pipeline.planning.time import Time

Section = tuple[str, list[tuple[str, str]]]  # title; what it is, its value
# benchmarks/plan_time.py prints the tables.
_GPU_ERROR = (
    "up to 30 % against published steps on two GPUs; starting kernels, engine and network are assumptions, not compared yet"
)
_CPU_ERROR = "up to 26 % against steps measured on one CPU"
_REPEATED_CACHE = "less where the page cache holds it"


def sections(time: Time) -> list[Section]:
    """Title and rows of each section."""
    return [("Time of an optimizer step", _step(time)), ("The whole run", _run(time)), ("Data and storage", _storage(time))]


def figures(time: Time) -> dict[str, float | None]:
    """The keys of ``--json``; hours are null where the number of images is not known."""
    return {
        "step_seconds": time.step_seconds,
        "images_per_second": time.images_per_second,
        "hours": time.hours,
        "gpu_hours": time.gpu_hours,
    }


def _step(time: Time) -> list[tuple[str, str]]:
    step = time.step_seconds
    rows = [
        (name, f"{duration(seconds):>9}  {seconds / step:4.0%}")
        for name, seconds in time.parts.items()
        if seconds > 0.0005 * step
    ]
    world, gpu = time.subject.world_size, time.subject.gpu
    each = f", {time.images_per_second / world:,.0f} per process" if world > 1 else ""
    rows.append(("together", f"{duration(step):>9}  {time.images_per_second:,.0f} images/s{each}"))
    if gpu:
        peak = gpu.bf16_flops if time.precision == "bf16" and gpu.bf16_flops else gpu.fp32_flops
        rows.append(
            (
                "model FLOPs",
                f"{time.flops / step / 1e12:.0f} TFLOP/s per GPU, {time.flops / step / peak:.0%} of its {time.precision} peak",
            )
        )
    if time.measured:
        measured = time.measured
        layout = f"{measured.steps:,} steps on {measured.world_size} process{'es' * (measured.world_size != 1)}"
        rows.append(("measured", f"{measured.source}, {layout}: {duration(measured.step_seconds)} a step, {_scaled(time)}"))
        if measured.data_wait > 0.02:
            rows.append(("", f"of which {measured.data_wait:.0%} waited for data"))
    rows.append(("rates", time.source))
    if not time.measured:
        rows.append(("error", _GPU_ERROR if gpu else _CPU_ERROR))
    return rows


def _scaled(time: Time) -> str:
    ratio = time.step_seconds / time.modelled_step
    return f"{ratio:.2f} times what the rates give; all parts are scaled by that"


def _run(time: Time) -> list[tuple[str, str]]:
    if time.length is None or time.images is None or time.hours is None:
        return [
            (
                "hours",
                f"not known: {time.subject.config.model.num_classes} classes are of no set that the plan knows; pass --data SHARDS",
            )
        ]
    length, images, world = time.length, time.images, time.subject.world_size
    rows = [
        ("images", f"{images.train:,} for training, {images.val:,} for validation ({images.source})"),
        (
            "steps",
            f"{length.steps:,} in {length.epochs:.4g} epochs; {length.evaluations:,} evaluation{'s' * (length.evaluations != 1)} of {duration(time.evaluation_seconds)}",
        ),
        ("hours", f"{time.hours:,.3g}, of which {duration(time.start_seconds)} for each start"),
    ]
    if time.jobs is not None and time.options.time_limit is not None:
        limit = f"{time.options.time_limit / 3600:.4g} h"
        rows.append(
            ("Slurm jobs", f"{time.jobs:,} at a time limit of {limit}, the last {SIGNAL_SECONDS} s of each for its checkpoint")
        )
    if time.subject.gpu:
        rows.append(("GPU hours", f"{time.gpu_hours:,.3g} on {world} GPU{'s' * (world != 1)}"))
        if time.cost is not None:
            rows.append(("cost", f"{time.cost:,.0f} at {time.options.price:g} per GPU hour"))
    return rows


def _storage(time: Time) -> list[tuple[str, str]]:
    rows, per_process = [], time.images_per_second / time.subject.world_size
    if time.loader:
        need = time.loader
        rows.append(
            (
                "loader",
                f"{need.cores(per_process):.1f} CPU cores per process to keep up ({1e3 * need.cpu_seconds:.1f} ms of CPU time per image, "
                f"measured here on {need.images:,} images)",
            )
        )
        if time.subject.gpu and time.subject.config.data.decode != "cpu":
            rows.append(("", "fewer where the GPU decodes (data.decode=gpu), which takes of its time"))
        rate = need.bytes * per_process * time.subject.gpus_per_node
        rows.append(("reading", f"{size(rate)}/s on each node, {size(need.bytes)} per image; {_REPEATED_CACHE}"))
    else:
        rows.append(("loader", "not measured: --data SHARDS measures it on the shards for a few seconds"))
    if time.subject.world_size > 1:
        sent = time.traffic
        rows.append(
            (
                "gradients",
                f"{size(sent.bytes)} sent by each process and step, {duration(sent.total)} of the links' time"
                + (f"; {size(time.options.network)}/s between nodes" if time.subject.nodes > 1 else ""),
            )
        )
    if time.checkpoints:
        saved = time.checkpoints
        best = " and one for each best accuracy" if time.subject.config.checkpoint.keep_best else ""
        rows.append(
            (
                "checkpoint",
                f"{size(saved.size)}, {size(saved.part)} from each process, which it holds up for {duration(saved.hold_up)}",
            )
        )
        rows.append(("checkpoints", f"{saved.kept} kept, {size(saved.kept * saved.size)}; {saved.regular:,} written{best}"))
    return rows


def duration(seconds: float) -> str:
    """In a readable unit, with three digits."""
    if seconds < 1:
        return f"{1e3 * seconds:.3g} ms"
    if seconds < 600:
        return f"{seconds:.3g} s"
    return f"{seconds / 60:.3g} min" if seconds < 7200 else f"{seconds / 3600:.3g} h"


def size(count: float) -> str:
    """Bytes in a readable unit."""
    for unit, factor in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= 0.9995 * factor:  # what is rounded to 1000 of the smaller unit, too
            return f"{count / factor:.3g} {unit}"
    return f"{count:.0f} B"
