"""The measure of memory that plans are compared with."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from benchmarks.plan_memory import peak_of

MAIN, GLOO = 1, 2


def profiler_of(*reports: tuple[int, int, int]) -> Any:
    """Of allocations and releases: address, bytes (below zero: released), thread; one in each nanosecond."""
    events = [
        SimpleNamespace(
            tag=SimpleNamespace(name="Allocation"),
            start_time_ns=at,
            extra_fields=SimpleNamespace(ptr=address, alloc_size=size),
            start_tid=thread,
            children=[],
        )
        for at, (address, size, thread) in enumerate(reports)
    ]
    nested = SimpleNamespace(tag=SimpleNamespace(name="TorchOp"), children=events)
    results = SimpleNamespace(experimental_event_tree=lambda: [nested])
    return SimpleNamespace(profiler=SimpleNamespace(kineto_results=results))


def test_the_peak_is_the_largest_sum_of_its_time() -> None:
    """Guards against a peak of the start, and against releases of what was there before."""
    reports = (
        (0, 900, MAIN),
        (0, -900, MAIN),
        (5000, -70, MAIN),
        (0, 100, MAIN),
        (200, 50, GLOO),
        (0, -100, MAIN),
        (300, 60, MAIN),
    )
    assert peak_of(profiler_of(*reports), began=2, ended=7) == 150
    assert peak_of(profiler_of(*reports), began=0, ended=7) == 900
    assert peak_of(profiler_of(*reports), began=6, ended=7) == 110


def test_a_release_that_nobody_saw_counts_as_one() -> None:
    """Guards against buffers that Gloo's threads have freed and that count for ever."""
    bucket, kept = (1000, 100, MAIN), (0, 10, MAIN)
    again = (1050, 20, MAIN)  # within the bucket, so that it is gone
    assert peak_of(profiler_of(bucket, kept, (2000, 100, MAIN), again), began=0, ended=4) == 130
    seen_late = profiler_of(bucket, (5000, 1, GLOO), kept, again)
    assert peak_of(seen_late, began=0, ended=4) == 101, "until its own thread goes on"
    assert peak_of(profiler_of(bucket, (1100, 7, MAIN), (900, 100, MAIN)), began=0, ended=3) == 207, "neighbours do not overlap"
