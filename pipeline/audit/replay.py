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

from pipeline.audit.records import OF_TIME, Records, count_of, first_step, place_of, read_rows
from pipeline.checkpoint.folder import step_folder
from pipeline.checkpoint.manifest import MANIFEST, CheckpointManifest
from pipeline.checkpoint.parts import BUFFER, EMA, WEIGHT, SliceReader, read_headers
from pipeline.command_line import python_command
from pipeline.config import config_to_yaml, fitting_micro_batches
from pipeline.errors import UserError, counted, first_line
from pipeline.files import replace_text
from pipeline.runs import CONFIG
from pipeline.runs.files import RunFiles
from pipeline.runs.rows import is_number

# What decides how sums are rounded, of those that a start records.
_ROUNDING = ("device", "cpu", "cpu_threads", "packages", "world_size", "micro_batch_size", "zero_stage")
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
    failed: str = ""  # why it cannot be trained again, which tells nothing about the run

    def words(self) -> str:
        """What was compared, how closely it agrees."""
        parts = []
        for kind, count in self.compared.items():
            gap, name = self.largest[kind]
            parts.append(f"{count:,} {kind} " + (f"to {gap:.1e} ({name})" if gap else "bit for bit"))
        within = f"; within bounds, its {', '.join(self.unlike)} being other than the run's" if self.unlike else ""
        return f"not trained again: {self.failed}" if self.failed else (", ".join(parts) or "nothing") + within

    def note(self, kind: str, name: str, gap: float, bound: float, problem: str) -> None:
        """Count something that was compared, keep the largest difference, and note a problem if it is above ``bound``."""
        if not gap <= bound:  # NaN is a difference
            self.problems.append(f"{name} {problem} when it is trained again")
        self.compared[kind] = self.compared.get(kind, 0) + 1
        if gap > self.largest.get(kind, (-1.0, ""))[0]:
            self.largest[kind] = (gap, name)


def choose(records: Records, count: int, longest: int, steps: Sequence[int], processes: int | None) -> list[Window]:
    """Windows that can be trained again: those with ``steps``, or the run's last one and others at random. Raises UserError: one of
    ``steps`` is not in any."""
    known = [0, *(step for step in records.manifests if step not in records.damaged)]
    end = max(records.steps, default=0)

    def window(first: int) -> Window:
        """From a checkpoint to the next one, or to a start on other processes or another machine, or with other settings."""
        start = records.start_of(first + 1)
        moved = [first_step(each) - 1 for each in records.files.starts if not processes and _unlike(start, each, "settings")]
        last = min(step for step in (*known, *moved, end, first + longest) if step > first)
        return Window(first, last, processes or count_of(start, "world_size", 1), count_of(start, "zero_stage", 0))

    before = [first for first in known if first < end]
    holding = {step: max((at for at in before if at < step), default=0) for step in steps}
    for step, first in holding.items():
        if not 0 < step <= end or window(first).last < step:
            got = f"got {step}: after step {first}, those to {window(first).last} can be" if 0 < step <= end else f"got {step}"
            problem = f"--steps must be steps of the run, 1 to {end}, that can be trained again, {got}"
            raise UserError(problem, "set --processes or --longest")
    if steps:
        return [window(first) for first in sorted({*holding.values()})]
    others = random.sample(before[:-1], min(count - 1, len(before) - 1)) if count > 1 and before else []
    return [window(first) for first in sorted([*others, *before[-1:]])] if count else []


def train_again(records: Records, replay: Replay, folder: Path, within: bool) -> Path:
    """Train a window in an empty folder, and settle whether its numbers must be the run's; returns the new run's folder. Raises
    UserError: the training fails."""
    window, run = replay.window, folder / "run"
    config, before = records.config_of(window.first + 1)[0], records.start_of(window.first + 1)
    if window.first:
        copy = step_folder(run, window.first)
        copy.mkdir(parents=True)  # not with the mode of the run's own, which may be read-only
        for name in (MANIFEST, *(file.name for file in records.manifests[window.first].files)):
            _link(step_folder(records.files.path, window.first) / name, copy / name)
    micro = fitting_micro_batches(config.train, window.processes, config.augment.unit)
    given = {
        "output_dir": str(run),
        **{f"data.{key}": getattr(records.config.data, key) for key in ("path", "mix", "cache", "cache_gib")},
        "train.max_steps": window.last,
        "train.zero_stage": window.zero_stage,
        "train.micro_batch_size": max(size for size in micro if size <= config.train.micro_batch),
        "eval.analyses": False,
        "log.samples": False,
        "checkpoint.every_steps": None,
    }
    recipe = folder / CONFIG
    replace_text(recipe, config_to_yaml(config.with_values(given)))
    # As many cores as the run had: each rank takes its share of them for its threads.
    cores = sorted(os.sched_getaffinity(0))[: window.processes * count_of(before, "cpu_threads", 0) or None]
    environment = {name: value for name, value in os.environ.items() if name != "SLURM_CPUS_PER_TASK"}
    with open(folder / _LOG, "wb") as log:
        command = python_command(window.processes, "pipeline.train", "--config", str(recipe))
        limit = partial(os.sched_setaffinity, 0, cores)
        done = subprocess.run(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment, preexec_fn=limit)
    if done.returncode:
        *_, said = ["no output", *(folder / _LOG).read_text(errors="replace").splitlines()]
        raise UserError(f"the training ended with exit code {done.returncode}: {said}")
    start = RunFiles(run).starts[-1]
    replay.unlike = _unlike(before, start) if before else ["start"]
    replay.exact = not replay.unlike and ("cpu" in start or config.train.deterministic) and not within
    return run


def _unlike(start: dict[str, Any], other: dict[str, Any], *more: str) -> list[str]:
    """What two starts differ in that decides how sums are rounded, and ``more``; what the first one does not tell is taken to be equal."""
    return [key for key in (*_ROUNDING, *more) if start.get(key, other.get(key)) != other.get(key)]


def compare(records: Records, run: Path, replay: Replay) -> None:
    """Compare the rows, samples and, if the run kept it, the checkpoint of a window."""
    first, last = replay.window.first, replay.window.last
    start, both = records.start_of(first + 1), (records.rows, read_rows(run)[0])
    moved = [each for each in records.files.starts if first_step(each) == last + 1 and _unlike(start, each)]
    compared = ([row for row in rows if first < row["step"] <= last and "analysis" not in row] for rows in both)
    of_run, of_replay = ({place_of(row): row for row in rows} for rows in compared)
    # When starts elsewhere began that may have made up for the evaluation of the last step: environment.json has whole seconds, within
    # which the start before may have written one.
    begun = [row.get("time") for row in records.files.events if row.get("event") == "start" and row.get("step") == last]
    later = min(filter(is_number, begun), default=math.inf) if moved else math.inf
    for step, kind in sorted(of_run.keys() | of_replay.keys()):
        was, row, of = of_run.get((step, kind)), of_replay.get((step, kind)), f"step {step}" + f" ({kind})" * (kind != "step")
        if was is None or row is None:
            if was or step < last or kind == "step":  # the evaluation at the end of the window is extra
                replay.problems.append(f"metrics.jsonl has {'a' if was else 'no'} row of {of}, unlike when it is trained again")
            continue
        judged, time = kind == "step" and step - first <= _JUDGED_STEPS, was.get("time")
        made_up = kind != "step" and step == last and is_number(time) and later < time
        for key in sorted(key for key in was.keys() | row.keys() if not key.startswith(OF_TIME)):
            bound = 0.0 if replay.exact and not made_up else _BOUNDS.get(key, _METRIC_BOUND) if judged else math.inf
            values = was.get(key, "missing"), row.get(key, "missing")
            replay.note("metrics", f"{key} of {of}", _difference(*values), bound, f"is {values[0]} in the run, but {values[1]}")
    if last in records.manifests and last not in records.damaged:
        try:
            _compare_tensors(step_folder(records.files.path, last), step_folder(run, last), replay)
        except (KeyError, RuntimeError) as error:  # a tensor that is missing, or of another shape
            replay.problems.append(f"the checkpoint of step {last} is of another model or optimizer ({first_line(error)})")


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
        bound = 0.0 if replay.exact else _WEIGHT_BOUND if name in (WEIGHT, EMA) and steps <= _WEIGHT_STEPS else math.inf
        replay.note("tensors", name, relative, bound, f"in {of_run.name} differs by {relative:.1e} of its norm")


def _tensors(*folders: Path) -> Iterator[tuple[str, str, Tensor, Tensor]]:
    readers = [SliceReader(folder, read_headers(folder, CheckpointManifest.read(folder).files)) for folder in folders]
    for quantity in sorted(readers[0].quantities | readers[1].quantities):
        slices = [reader.slices(quantity) for reader in readers]
        for name in sorted(slices[0].keys() | slices[1].keys()):
            if quantity == BUFFER:
                was, now = (reader.read_buffer(name) for reader in readers)
            else:  # of both as many numbers as one of them has
                count = max(sum(length for _, length in each.get(name, [])) for each in slices)
                was, now = (reader.read(quantity, name, 0, count) for reader in readers)
            yield quantity, name, was, now


def _difference(was: Any, now: Any) -> float:
    """Relative to the larger one; 0: the same."""
    if isinstance(was, float | int) and isinstance(now, float | int):
        return abs(was - now) / max(abs(was), abs(now)) if was != now else 0.0
    if isinstance(was, list) and isinstance(now, list) and len(was) == len(now):
        return max(map(_difference, was, now), default=0.0)
    return 0.0 if was == now else float("inf")


def _link(source: Path, target: Path) -> None:
    """A file once more, without a second copy where the file system can."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)
