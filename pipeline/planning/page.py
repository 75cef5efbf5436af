"""The page and the JSON of a plan."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from pipeline.hardware import GIB
from pipeline.planning import time_rows
from pipeline.planning.advice import changes, together
from pipeline.planning.memory import Memory, changed, largest_micro_batch, plan_memory
from pipeline.planning.subject import Subject
from pipeline.planning.time import Time
from pipeline.planning.traced_step import ACTIVATIONS

Rows = Iterable[tuple[str, str]]  # what it is, its value
_BAR = 30  # characters of the largest part
_TIMES = "\N{MULTIPLICATION SIGN}"


def text(subject: Subject, memory: Memory, time: Time, passed_over: str | None = None) -> str:
    """The page: what is planned, the memory by part, micro-batches, what to change where it does not fit; time, length, storage.

    Args:
        passed_over: a sentence about an earlier run that is no measure of this one.
    """
    title = (
        f"Memory per {'GPU' if subject.gpu else 'process'} at its peak{', in an evaluation' if memory.in_evaluation else ''}"
    )
    parts = [_title(subject, memory), section(title, _parts(memory)), section("Micro-batch", _sizes(subject, memory))]
    if not memory.fits:
        parts.append(section("What would help, each by itself", _advice(subject, memory)))
    parts += [section(*each) for each in time_rows.sections(time)]
    notes = [f"note: {remark}" for remark in (*memory.remarks, *([passed_over] if passed_over else []))]
    return "\n\n".join([*parts, *(["\n".join(notes)] if notes else [])])


def section(title: str, rows: Rows) -> str:
    """A headline and its rows, in two columns."""
    rows = list(rows)
    width = max((len(name) for name, _ in rows), default=0)
    return "\n".join([title, *(f"  {name:<{width}}  {value}" for name, value in rows)])


def figures(subject: Subject, memory: Memory, time: Time) -> dict[str, Any]:
    """The keys of ``--json``."""
    parts = {name: round(size / GIB, 4) for name, size in memory.parts.items()}
    return {
        "memory_gib": {**parts, "total": round(memory.total / GIB, 4)},
        "capacity_gib": round(memory.capacity / GIB, 4),
        "fits": memory.fits,
        "micro_batch": memory.micro_batch,
        "accumulation": memory.accumulation,
        "largest_micro_batch": largest_micro_batch(subject),
        **time_rows.figures(time),
    }


def _title(subject: Subject, memory: Memory) -> str:
    config, world = subject.config, subject.world_size
    device = subject.gpu.name if subject.gpu else "CPU"
    nodes = "1 node" if subject.nodes == 1 else f"{subject.nodes} nodes"
    verdict = "fits" if memory.fits else "DOES NOT FIT"
    return (
        f"{config.model.name}, {config.model.image_size} px, {memory.precision}, ZeRO stage {memory.stage}, activation checkpointing "
        f"{'on' if config.train.activation_checkpointing else 'off'}\n"
        f"{nodes} {_TIMES} {subject.gpus_per_node} {device} = {world} process{'' if world == 1 else 'es'}; global batch "
        f"{config.train.global_batch_size} = {memory.micro_batch} {_TIMES} {world} {_TIMES} {memory.accumulation} (micro-batch, processes, accumulation)\n"
        f"{verdict}: {_gib(memory.total)} of {_gib(memory.capacity)}"
    )


def _parts(memory: Memory) -> Rows:
    largest = max(memory.parts.values())
    for name, size in memory.parts.items():
        yield name, f"{_gib(size):>11}  {'█' * round(_BAR * size / largest)}"
    yield "total", f"{_gib(memory.total):>11}"
    yield ("left" if memory.fits else "missing"), f"{_gib(abs(memory.left)):>11}"


def _sizes(subject: Subject, memory: Memory) -> Rows:
    on = subject.config.train.activation_checkpointing
    for checkpointing in (on, not on):
        other = changed(subject, "train", activation_checkpointing=checkpointing)
        planned, largest = plan_memory(other), largest_micro_batch(other)
        yield (
            f"checkpointing {'on' if checkpointing else 'off'}",
            f"activations {_gib(planned.parts.get(ACTIVATIONS, 0)):>11}, total {_gib(planned.total):>11}; {_largest(other, largest)}",
        )


def _largest(subject: Subject, size: int) -> str:
    if not size:
        return "no micro-batch fits"
    steps = subject.config.train.global_batch_size // (size * subject.world_size)
    return f"largest micro-batch {size}, accumulation {steps}"


def _advice(subject: Subject, memory: Memory) -> Rows:
    found = changes(subject, memory)
    for change in found:
        verdict = "fits" if change.memory.fits else f"{_gib(change.memory.total)}, still too much"
        yield change.overrides, f"saves {_gib(change.saving):>11}: {verdict} ({change.cost})"
    if not any(change.memory.fits for change in found):
        overrides, largest = together(subject, memory)
        if largest and overrides:
            yield "together", f"{overrides} train.micro_batch_size={largest} fits"
        else:
            yield "nothing in the config alone", "take GPUs with more memory, a smaller model or smaller images"


def _gib(size: int) -> str:
    return f"{size / GIB:.2f} GiB" if size >= GIB / 100 or not size else f"{size / 2**20:.2f} MiB"
