"""Record metrics of a training step from any of its modules: they reach metrics.jsonl and TensorBoard with the step's row.

    from pipeline.metrics import record

    record("attention_entropy", entropy)              # the mean of all ranks
    record("teacher_time", seconds, reduce="slowest")

Outside of a step that is logged (an evaluation, a dry run) nothing is recorded.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

Reduction = Literal["mean", "max", "sum", "slowest"]
COSTLY = 0.1  # of a step: a rank that costs the others more is named


@dataclass
class Metric:
    """What this rank has recorded under a name in one step."""

    reduce: Reduction
    values: list[Any] = field(default_factory=list)


def tells_top5(classes: int) -> bool:
    """Whether a terminal shows top-5 accuracy: of fewer than ten classes, five are half of all or more."""
    return classes >= 10


def slow_rank(row: Mapping[str, Any]) -> str:
    """Name the rank that costs the others more than ``COSTLY`` in a row of metrics.jsonl, and its host; empty if none does."""
    cost, data, compute = (row.get(f"slowest_{name}") for name in ("cost", "data", "compute"))
    if not (isinstance(cost, float) and isinstance(data, float) and isinstance(compute, float) and cost > COSTLY):
        return ""
    who = f"rank {row.get('slowest_rank')} on {row.get('slowest_host')}"
    return f"{who} costs {cost:.0%} of the step (data {data:.0%}, compute {compute:.0%})"


_step: dict[str, Metric] | None = None  # being recorded


def record(name: str, value: Any, reduce: Reduction = "mean") -> None:
    """Record a metric of the current step.

    Args:
        name: its key in metrics.jsonl.
        value: a number, or a tensor () on any device, which is read when the log writes. Several values in a step, as of its
            micro-batches, are reduced like those of the ranks.
        reduce: "mean", "max" or "sum" of the ranks that recorded it in the step. "slowest": the values are seconds of work, and
            the row has the share of the time since the last rows that the slowest rank spent on it; of several ranks, also its
            number and host as NAME_rank and NAME_host.
    """
    if _step is not None:
        _step.setdefault(name, Metric(reduce)).values.append(value.detach() if hasattr(value, "detach") else value)


@contextmanager
def recording() -> Iterator[dict[str, Metric]]:
    """Collect what :func:`record` is told in the block, by name. Within another such block, that one does not hear of it."""
    global _step
    outer, _step = _step, {}
    try:
        yield _step
    finally:
        _step = outer
