"""Train some steps of a run again, from the checkpoint before them, and compare what comes out with what the run has written."""

import math
import os
import random
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor

from pipeline.audit.records import Records, read_rows
from pipeline.checkpoint.folder import step_folder
from pipeline.checkpoint.manifest import CheckpointManifest
from pipeline.checkpoint.parts import BUFFER, EMA, WEIGHT, SliceReader, read_headers
from pipeline.command_line import python_command
from pipeline.config import config_to_yaml, fitting_micro_batches
from pipeline.errors import UserError, counted, first_line
from pipeline.files import replace_text
from pipeline.runs import CONFIG
from pipeline.runs.files import RunFiles
from pipeline.runs.rows import Row, is_count, kind_of

# Columns that tell how fast a step was, or where, not what it computed.
_OF_TIME = tuple("time data_wait slowest_ images_per_second mfu memory_gib peak_memory_gib store_ upload_ seconds".split())
# What decides how sums are rounded, of those that a start records.
_ROUNDING = ("device", "cpu", "cpu_threads", "packages", "world_size", "micro_batch_size")
# On another world size or machine rounding differs, and the difference grows with every step. What is judged there, and by which relative
# difference: some times the largest that was measured in float32 (docs/audit.md).
_JUDGED_STEPS, _METRIC_BOUND, _BOUNDS = 5, 5e-3, {"loss": 1e-4, **dict.fromkeys(("epoch", "samples", "lr"), 0.0)}
_WEIGHT_STEPS, _WEIGHT_BOUND = 20, 1e-2  # of all weights together, relative to their norm
_LOG = "replay.log"


@dataclass(frozen=True)
class Window:
    """Steps to be trained again: those after ``first``, a checkpoint's or 0, to ``last``."""

    first: int
    last: int
    processes: int
    zero_stage: int

    def __str__(self) -> str:
        return f"steps {self.first + 1:,} to {self.last:,} on {counted(self.processes, 'process')}"


@dataclass
class Replay:
    """What a window gave."""

    window: Window
    exact: bool = False  # whether every number has to be the same
    unlike: list[str] = field(default_factory=list)  # keys of the run's start by which this one's rounding differs
    seconds: float = 0.0
    compared: dict[str, int] = field(default_factory=dict)  # kind -> how many were compared
    largest: dict[str, tuple[float, str]] = field(default_factory=dict)  # kind -> relative difference, of what
    problems: list[str] = field(default_factory=list)

    def words(self) -> str:
        """What was compared, how closely it agrees."""
        parts = []
        for kind, count in self.compared.items():
            gap, name = self.largest[kind]
            parts.append(f"{count:,} {kind} " + (f"to {gap:.1e} ({name})" if gap else "bit for bit"))
        within = f"; within bounds, its {', '.join(self.unlike)} being other than the run's" if self.unlike else ""
        return (", ".join(parts) or "nothing") + within

    def note(self, kind: str, name: str, gap: float, bound: float, problem: str) -> None:
        """Count something that was compared, keep the largest difference, and note a problem if it is above ``bound``."""
        if not gap <= (0.0 if self.exact else bound):  # NaN is a difference
            self.problems.append(f"{name} {problem} when it is trained again")
        self.compared[kind] = self.compared.get(kind, 0) + 1
        if gap > self.largest.get(kind, (-1.0, ""))[0]:
            self.largest[kind] = (gap, name)


def choose(records: Records, count: int, longest: int, steps: Sequence[int], processes: int | None) -> list[Window]:
    """Windows that can be trained again: those with ``steps``, or the run's last one and others at random. Raises UserError: one of
    ``steps`` is not in any."""
    known = [0, *(step for step in records.manifests if step not in records.damaged)]
    keys = ("world_size", "zero_stage")
    starts = [row for row in records.files.events if row.get("event") == "start" and all(is_count(row.get(k)) for k in keys)]
    end = max(records.steps, default=0)

    def window(first: int) -> Window:
        """From a checkpoint to the next one, or to a start on another number of processes or ZeRO stage, or another machine."""
        size, stage = next(([row[key] for key in keys] for row in reversed(starts) if row["step"] <= first), (1, 0))
        moved = [row["step"] for row in starts if [row[key] for key in keys] != [size, stage] and not processes]
        if not processes and (before := _start_of(records, first)):
            moved += [_first_step(each) - 1 for each in records.files.starts if _unlike(before, each)]
        last = min(step for step in (*known, *moved, end, first + longest) if step > first)
        return Window(first, last, processes or size, stage)

    before = [first for first in known if first < end]
    for step in steps:
        first = max((at for at in before if at < step), default=0)
        if not 0 < step <= end or window(first).last < step:
            got = f"got {step}: after step {first}, those to {window(first).last} can be" if 0 < step <= end else f"got {step}"
            problem = f"--steps must be steps of the run, 1 to {end}, that can be trained again, {got}"
            raise UserError(problem, "set --processes or --longest")
    if steps:
        return [window(first) for first in sorted({max(at for at in before if at < step) for step in steps})]
    others = random.sample(before[:-1], min(count - 1, len(before) - 1)) if count > 1 and before else []
    return [window(first) for first in sorted([*others, *before[-1:]])] if count else []


def train_again(records: Records, replay: Replay, folder: Path, within: bool) -> Path:
    """Train a window in an empty folder, and settle whether its numbers must be the run's; returns the new run's folder. Raises
    UserError: the training fails."""
    window, run = replay.window, folder / "run"
    config = records.config_of(window.last)
    if window.first:
        copy = step_folder(run, window.first)
        copy.parent.mkdir(parents=True)
        shutil.copytree(step_folder(records.files.path, window.first), copy, copy_function=_link)
    micro = fitting_micro_batches(config.train, window.processes, config.augment.unit)
    given = {
        "output_dir": str(run),
        "data.path": records.config.data.path,
        "data.cache": records.config.data.cache,
        "train.max_steps": window.last,
        "train.zero_stage": window.zero_stage,
        "train.micro_batch_size": max(size for size in micro if size <= config.train.micro_batch),
        "eval.analyses": False,
        "log.samples": False,
        "checkpoint.every_steps": None,
    }
    recipe = folder / CONFIG
    replace_text(recipe, config_to_yaml(config.with_values(given)))
    before = _start_of(records, window.first)
    # As many cores as the run had: each rank takes its share of them for its threads.
    cores, threads = sorted(os.sched_getaffinity(0)), before.get("cpu_threads")
    if is_count(threads) and threads:
        cores = cores[: window.processes * threads]
    environment = {name: value for name, value in os.environ.items() if name != "SLURM_CPUS_PER_TASK"}
    with open(folder / _LOG, "wb") as log:
        command = python_command(window.processes, "pipeline.train", "--config", str(recipe))
        limit = partial(os.sched_setaffinity, 0, cores)
        done = subprocess.run(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment, preexec_fn=limit)
    if done.returncode:
        lines = (folder / _LOG).read_text(errors="replace").splitlines()
        raise UserError(
            f"{window} cannot be trained again (exit code {done.returncode}): {lines[-1] if lines else 'no output'}"
        )
    start = RunFiles(run).starts[-1]
    replay.unlike = _unlike(before, start) if before else ["start"]
    fixed = "cpu" in start or config.train.deterministic
    replay.exact = not replay.unlike and fixed and not within
    return run


def _start_of(records: Records, step: int) -> dict[str, Any]:
    """What environment.json has of the start that trained the step after ``step``; empty if it has none."""
    return next((each for each in reversed(records.files.starts) if _first_step(each) <= step + 1), {})


def _first_step(start: dict[str, Any]) -> int:
    return first if is_count(first := start.get("first_step")) else 1


def _unlike(start: dict[str, Any], other: dict[str, Any]) -> list[str]:
    """What two starts differ in that decides how sums are rounded; what the first one does not tell is taken to be equal."""
    return [key for key in _ROUNDING if start.get(key, other.get(key)) != other.get(key)]


def compare(records: Records, run: Path, replay: Replay) -> None:
    """Compare the rows, samples and, if the run kept it, the checkpoint of a window."""
    first, last = replay.window.first, replay.window.last
    of_run, of_replay = _by_place(records.rows), _by_place(read_rows(run))
    for (step, kind), row in of_replay.items():
        if first < step <= last:
            if (was := of_run.get((step, kind))) is None:
                if kind == "step":  # an evaluation at the end of the window is extra
                    replay.problems.append(f"metrics.jsonl has no row of step {step}")
                continue
            for key in sorted(was.keys() & row.keys()):
                if not key.startswith(_OF_TIME):
                    judged = kind == "step" and step - first <= _JUDGED_STEPS
                    bound = _BOUNDS.get(key, _METRIC_BOUND) if judged else math.inf
                    name = f"{key} of step {step}" + f" ({kind})" * (kind != "step")
                    problem = f"is {was[key]} in the run, but {row[key]}"
                    replay.note("metrics", name, _difference(was[key], row[key]), bound, problem)
    if last in records.manifests and last not in records.damaged:
        try:
            _compare_tensors(step_folder(records.files.path, last), step_folder(run, last), replay)
        except (KeyError, RuntimeError) as error:  # a tensor that is missing, or of another shape
            replay.problems.append(f"the checkpoint of step {last} is of another model or optimizer ({first_line(error)})")


def _by_place(rows: list[Row]) -> dict[tuple[int, str], Row]:
    return {(row["step"], row.get("weights", "") if kind_of(row) == "evaluation" else kind_of(row)): row for row in rows}


def _compare_tensors(of_run: Path, of_replay: Path, replay: Replay) -> None:
    """Compare weights, averages, optimizer state and buffers of two checkpoints of one step: by tensor where they must be the same, else
    all tensors of a kind together, since AdamW makes steps of full size of a gradient that is nothing but rounding, as of a bias
    before a norm."""
    squares: dict[str, list[float]] = {}  # name -> sums of squares: of the differences, of the run's numbers
    for quantity, name, was, now in _tensors(of_run, of_replay):
        sums = squares.setdefault(f"{quantity} of {name}" if replay.exact else quantity, [0.0, 0.0])
        sums[0] += 0.0 if was.equal(now) else float((was.double() - now.double()).square().sum())
        sums[1] += float(was.double().square().sum())
    steps = replay.window.last - replay.window.first
    for name, (gap, size) in squares.items():
        relative = math.sqrt(gap / max(size, 1e-300))
        bound = _WEIGHT_BOUND if name in (WEIGHT, EMA) and steps <= _WEIGHT_STEPS else math.inf
        replay.note("tensors", name, relative, bound, f"in {of_run.name} differs by {relative:.1e} of its norm")


def _tensors(*folders: Path) -> Iterator[tuple[str, str, Tensor, Tensor]]:
    readers = [SliceReader(folder, read_headers(folder, CheckpointManifest.read(folder).files)) for folder in folders]
    for quantity in sorted(readers[0].quantities | readers[1].quantities):
        for name, slices in readers[0].slices(quantity).items():
            if quantity == BUFFER:
                was, now = (reader.read_buffer(name) for reader in readers)
            else:
                count = sum(length for _, length in slices)
                was, now = (reader.read(quantity, name, 0, count) for reader in readers)
            yield quantity, name, was, now


def _difference(was: Any, now: Any) -> float:
    """Relative to the larger one; 0: the same."""
    if isinstance(was, float | int) and isinstance(now, float | int):
        return abs(was - now) / max(abs(was), abs(now)) if was != now else 0.0
    if isinstance(was, list) and isinstance(now, list) and len(was) == len(now):
        return max(map(_difference, was, now), default=0.0)
    return 0.0 if was == now else float("inf")


def _link(source: str, target: str) -> None:
    """A file once more, without a second copy where the file system can."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)
