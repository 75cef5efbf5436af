"""Time and memory of one call, for :mod:`benchmarks.step`."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch


@dataclass(frozen=True)
class Taken:
    """One call: seconds on the clock and of all of the process's threads."""

    wall: float
    cpu: float


Step = Callable[[], Taken | None]
"""A training step; one that runs in another process returns what it took there."""


@runtime_checkable
class HasPeak(Protocol):
    """A step that measures its memory itself."""

    def peak_bytes(self) -> int: ...


def timed(call: Step, device: torch.device) -> Taken:
    """One call, with what it started on a GPU."""
    synchronize(device)
    wall, cpu = time.perf_counter(), time.process_time()
    elsewhere = call()
    synchronize(device)
    if elsewhere is not None:
        return elsewhere
    return Taken(time.perf_counter() - wall, time.process_time() - cpu)


def peak_bytes(step: Step, device: torch.device) -> int:
    """How much more memory tensors take within a step than before it, in its second call."""
    if isinstance(step, HasPeak):
        return step.peak_bytes()
    step()
    gc.collect()
    if device.type == "cuda":
        synchronize(device)
        before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        step()
        synchronize(device)
        return torch.cuda.max_memory_allocated(device) - before
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as recorded:
        step()
    assert recorded.profiler is not None
    events = (event for event in recorded.profiler.kineto_results.events() if event.name() == "[memory]")
    held = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        held += event.nbytes()
        peak = max(peak, held)
    return peak


def synchronize(device: torch.device) -> None:
    """Wait for a GPU."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
