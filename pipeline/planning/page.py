"""The page and the JSON of a plan."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from pipeline.planning import time_rows
from pipeline.planning.gpus import GIB
from pipeline.planning.memory import Memory, largest_micro_batch
from pipeline.planning.subject import Subject
from pipeline.planning.time import Time

Rows = Iterable[tuple[str, str]]  # what it is, its value


def text(subject: Subject, memory: Memory, time: Time, passed_over: str | None = None) -> str:
    """The page: a title, then sections."""
    rows = [(name, f"{size / GIB:8.2f} GiB") for name, size in memory.parts.items()]
    parts = [section("Memory per GPU", rows), *(section(*each) for each in time_rows.sections(time))]
    return "\n\n".join(parts + ([f"note: {passed_over}"] if passed_over else []))


def section(title: str, rows: Rows) -> str:
    """A headline and its rows, in two columns."""
    rows = list(rows)
    width = max((len(name) for name, _ in rows), default=0)
    return "\n".join([title, *(f"  {name:<{width}}  {value}" for name, value in rows)])


def figures(subject: Subject, memory: Memory, time: Time) -> dict[str, Any]:
    """The keys of ``--json``."""
    parts = {name: size / GIB for name, size in memory.parts.items()}
    return {
        "memory_gib": {**parts, "total": memory.total / GIB},
        "fits": memory.fits,
        "largest_micro_batch": largest_micro_batch(subject),
        **time_rows.figures(time),
    }
