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

from benchmarks.gpu.common import Values, synchronize

BUSY = "GPU busy, ms"  # per step
_STEPS = "the measured steps"
_CALLS = ("cuda_runtime", "cuda_driver")
_WORK = ("kernel", "gpu_memcpy", "gpu_memset")


def profiled(step: Callable[[], object], device: torch.device, steps: int) -> Values:
    """Figures per step over some steps; on a CPU operators instead of launches."""
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
        return figures(json.loads(path.read_text())["traceEvents"], steps, threading.get_native_id())


def figures(events: Iterable[dict[str, Any]], steps: int, thread: int) -> Values:
    """Per step, of the events of a Chrome trace (``ts`` and ``dur`` in microseconds).

    Args:
        events: of a trace in which the steps are one range, so that what the profiler itself asks of the GPU is not counted.
        steps: in that range.
        thread: the training loop's; other threads wait for the GPU without holding the loop up.
    """
    found = [event for event in events if event.get("ph") == "X"]
    (whole,) = [event for event in found if event["name"] == _STEPS and event.get("cat") == "user_annotation"]
    found = [event for event in found if event["ts"] >= whole["ts"]]
    called = [event for event in found if event["ts"] <= whole["ts"] + whole["dur"]]
    calls = [event for event in called if event.get("cat") in _CALLS]
    waits = [event for event in calls if "Synchronize" in event["name"]]
    work = sorted((event["ts"], event["ts"] + event["dur"]) for event in found if event.get("cat") in _WORK)
    if not work:
        return {"operators/step": sum(event.get("cat") == "cpu_op" for event in called) / steps}
    return {
        "launches/step": sum("Launch" in event["name"] for event in calls) / steps,
        "kernels and copies/step": len(work) / steps,
        "syncs/step": len(waits) / steps,
        "of these in the loop": sum(event["tid"] == thread for event in waits) / steps,
        BUSY: busy(work) / steps / 1e3,
    }


def idle(values: Values) -> Values:
    """The share of a step in which the GPU has nothing to do. The step's time is one without profiler, which slows the CPU down."""
    return {"GPU idle": f"{max(0.0, 1 - values[BUSY] / values['ms/step']):.1%}"} if BUSY in values else {}


def busy(work: list[tuple[float, float]]) -> float:
    """Length of the union of intervals that are sorted by their begin."""
    total, until = 0.0, float("-inf")
    for begin, end in work:
        total += max(0.0, end - max(begin, until))
        until = max(until, end)
    return total
