"""What a step asks of the GPU, from a trace of PyTorch's profiler: launches, synchronisations, time without work."""

from __future__ import annotations

import json
import tempfile
import threading
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from benchmarks.gpu.common import Values, reason, synchronize

_STEPS = "the measured steps"
_CALLS = ("cuda_runtime", "cuda_driver")
_WORK = ("kernel", "gpu_memcpy", "gpu_memset")
_LARGEST = 15  # kernels that are named
_NAME = 120  # characters of a kernel's name


def profiled(step: Callable[[], object], device: torch.device, steps: int) -> Values:
    """:func:`figures` over some steps; where the profiler fails, or sees nothing of the GPU, a note instead."""
    try:
        return figures(trace(step, device, steps), steps, threading.get_native_id(), device.type == "cuda")
    except Exception as error:  # of CUPTI or its absence
        return {"profiler": reason(error)}


def trace(step: Callable[[], object], device: torch.device, steps: int) -> list[dict[str, Any]]:
    """Events of a Chrome trace in which the steps are one range."""
    activities = [ProfilerActivity.CPU]
    if device.type == "cuda":
        activities.append(ProfilerActivity.CUDA)
        with profile(activities=activities):
            step()  # the profiler's own start on the GPU falls into this one
            synchronize(device)
    with profile(activities=activities) as profiler:
        with record_function(_STEPS):
            for _ in range(steps):
                step()
        synchronize(device)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        return json.loads(path.read_text())["traceEvents"]


def figures(events: Iterable[dict[str, Any]], steps: int, thread: int, on_gpu: bool = True) -> Values:
    """Per step, of the events of a trace (``ts`` and ``dur`` in microseconds); on a CPU the number of operators.

    Args:
        events: of a trace in which the steps are one range, so that what the profiler itself asks of the GPU is not counted.
        steps: in that range.
        thread: the training loop's; other threads wait for the GPU without holding the loop up.
    """
    found = [event for event in events if event.get("ph") == "X"]
    (whole,) = [event for event in found if event["name"] == _STEPS and event.get("cat") == "user_annotation"]
    found = [event for event in found if event["ts"] >= whole["ts"]]
    called = [event for event in found if event["ts"] <= whole["ts"] + whole["dur"]]
    if not on_gpu:
        return {"operators": sum(event.get("cat") == "cpu_op" for event in called) / steps}
    calls = [event for event in called if event.get("cat") in _CALLS]
    waits = [event for event in calls if "Synchronize" in event["name"]]
    work = sorted((event["ts"], event["ts"] + event["dur"]) for event in found if event.get("cat") in _WORK)
    if not work:
        return {"profiler": "it saw nothing of the GPU: CUPTI is missing, or another profiler has it"}
    return {
        "gpu_busy_ms": busy(work) / steps / 1e3,
        "launches": sum("Launch" in event["name"] for event in calls) / steps,
        "kernels_and_copies": len(work) / steps,
        "synchronisations": len(waits) / steps,
        "synchronisations_in_loop": sum(event["tid"] == thread for event in waits) / steps,
        "kernels": largest(found, steps),
    }


def largest(events: Iterable[dict[str, Any]], steps: int) -> list[Values]:
    """The kernels that take most of a step."""
    taken: dict[str, list[float]] = {}
    for event in events:
        if event.get("cat") in _WORK:
            taken.setdefault(event["name"], []).append(event["dur"])
    ordered = sorted(taken.items(), key=lambda kernel: -sum(kernel[1]))[:_LARGEST]
    return [
        {"kernel": name[:_NAME], "ms": sum(durations) / steps / 1e3, "calls": len(durations) / steps}
        for name, durations in ordered
    ]


def busy(work: list[tuple[float, float]]) -> float:
    """Length of the union of intervals that are sorted by their begin."""
    total, until = 0.0, float("-inf")
    for begin, end in work:
        total += max(0.0, end - max(begin, until))
        until = max(until, end)
    return total
