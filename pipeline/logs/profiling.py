"""Record some steps with PyTorch's profiler, a trace and the memory of each rank (``log.profile_steps``).

::

    RUN/profile/steps-200-210/rank-00000.pt.trace.json.gz   operators and kernels: TensorBoard's profiler, Perfetto, chrome://tracing
    RUN/profile/steps-200-210/rank-00000.memory.json.gz     memory in use over time, as a curve: Perfetto, chrome://tracing
    RUN/profile/steps-200-210/rank-00000.memory.pickle      on a GPU: every allocation with its origin, for pytorch.org/memory_viz

The profiler only watches: a run's weights are the same with it and without. Its steps take longer. A profile that cannot be written is
a warning, no end of a run.
"""

import gzip
import json
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from operator import methodcaller
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from pipeline.cluster.world import World
from pipeline.errors import first_line
from pipeline.files import disk_reason, replace_file
from pipeline.logs import console

PROFILE = "profile"  # folder in that of the run
_log = logging.getLogger(__name__)
_ALLOCATIONS = 1_000_000  # that a GPU's snapshot keeps, the latest: some 100 steps of the models here, 300 MB


class StepProfiler:
    """Records the steps of ``log.profile_steps`` that this start takes, on each rank its own. ``window``: first and last step
    to record (``log.profile_steps``); None: none. ``done``: steps before this start."""

    def __init__(self, run_folder: Path, window: tuple[int, int] | None, world: World, done: int, last_step: int) -> None:
        self._world, self._folder, self._window = world, run_folder / PROFILE, window
        self._first, self._last = window or (0, -1)
        self._done, self._end = done, last_step
        self._recording: profile | None = None
        self._begun = self._reached = 0

    def remark(self) -> str | None:
        """A sentence, if this start will not take all of the steps; None otherwise."""
        if not self._window:
            return None
        given = f"log.profile_steps is [{self._first}, {self._last}]"
        if self._first > self._end:
            return f"{given}, but the last step of this run is {self._end}: nothing will be profiled"
        if self._last <= self._done:
            return f"{given}, but this start resumes from step {self._done}: nothing will be profiled"
        begin, end = max(self._first, self._done + 1), min(self._last, self._end)
        if (begin, end) == (self._first, self._last):
            return None
        return f"{given}, of which this start takes the steps {begin} to {end}: these will be profiled"

    @contextmanager
    def step(self, step: int) -> Iterator[None]:
        """The block is a step, by the number that it has once it is taken. Records it if it is one of the window's."""
        if not self._first <= step <= self._last:
            yield
            return
        if self._recording is None:
            self._begin(step)
        with torch.profiler.record_function(f"ProfilerStep#{step}"):  # the name by which TensorBoard finds steps
            yield
        self._reached = step

    def ends_with(self, step: int) -> bool:
        """Whether a step that is done was the last to be recorded: :meth:`close` has something to write."""
        return self._recording is not None and step >= self._last

    def close(self) -> None:
        """Write what is recorded so far."""
        recording, self._recording = self._recording, None
        if recording is None:
            return
        recording.stop()
        folder = self._folder / f"steps-{self._begun}-{self._reached}"
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._write(recording, folder / f"rank-{self._world.rank:05d}")
        except (OSError, RuntimeError, ValueError) as error:  # of the disk; of the profiler; of what it has written
            reason = disk_reason(folder, error) if isinstance(error, OSError) else first_line(error)
            _log.warning(f"the profile {folder} cannot be written ({reason}): the run continues without it")
            return
        finally:
            self._forget_allocations()
        if self._world.is_main:
            viewers = f"tensorboard --logdir {self._folder}, or https://ui.perfetto.dev"
            console.say(f"profile of steps {self._begun} to {self._reached}: {folder}; {viewers}")

    def abandon(self) -> None:
        """After an error: end the recording and write nothing."""
        recording, self._recording = self._recording, None
        if recording is not None:
            with suppress(Exception):  # it would hide the error that matters
                recording.stop()
                self._forget_allocations()

    def _begin(self, step: int) -> None:
        os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # above its messages of each start and stop
        self._begun = step
        activities = [ProfilerActivity.CPU]
        if self._world.device.type == "cuda":
            activities.append(ProfilerActivity.CUDA)
            torch.cuda.memory._record_memory_history(stacks="python", max_entries=_ALLOCATIONS)
        self._recording = profile(activities=activities, record_shapes=True, profile_memory=True)
        self._recording.start()
        console.say_once(self._world, f"profiling the steps {step} to {min(self._last, self._end)}, which take longer")

    def _forget_allocations(self) -> None:
        if self._world.device.type == "cuda":
            torch.cuda.memory._record_memory_history(enabled=None)

    def _write(self, recording: profile, stem: Path) -> None:
        """Write this rank's files, each complete or not at all."""
        plain = stem.with_name(f".{stem.name}.trace.json")  # PyTorch writes it in pieces
        try:
            recording.export_chrome_trace(str(plain))
            trace = plain.read_bytes()
        finally:
            plain.unlink(missing_ok=True)
        curve = json.dumps({"traceEvents": memory_curve(json.loads(trace)["traceEvents"])}).encode()
        for kind, content in {"pt.trace": trace, "memory": curve}.items():
            packed = gzip.compress(content, compresslevel=5, mtime=0)
            replace_file(stem.with_name(f"{stem.name}.{kind}.json.gz"), methodcaller("write", packed))
        if self._world.device.type == "cuda":
            replace_file(stem.with_name(f"{stem.name}.memory.pickle"), lambda file: torch.cuda.memory._dump_snapshot(file.name))


def memory_curve(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Those of ``traceEvents`` that are allocations, as counters, which viewers draw as a curve of MiB for each device."""
    curve = []
    for event in events:
        if event.get("name") == "[memory]":
            said = event["args"]
            device = "CPU" if said["Device Type"] == 0 else f"GPU {said['Device Id']}"  # c10::DeviceType
            mib = round(said["Total Allocated"] / 2**20, 3)
            curve.append({"ph": "C", "name": f"memory of {device}", "pid": 0, "ts": event["ts"], "args": {"MiB": mib}})
    return sorted(curve, key=lambda each: each["ts"])
