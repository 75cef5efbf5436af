"""Say how a run stands: waiting, running, stopped, killed, hung or finished. Everything that shows or starts runs asks here.

A run is finished when its newest intact checkpoint is of the last step and that step's evaluation is done: then, and only then, the same
command has nothing to train. A row of ``metrics.jsonl`` does not make it so, since the run may be killed before it saves.
"""

import os
import socket
import time
from contextlib import suppress
from dataclasses import dataclass
from typing import Literal

from pydantic import ValidationError

from pipeline.checkpoint.folder import FETCHED
from pipeline.config import DataConfig
from pipeline.runs import CHECKPOINTS, ENVIRONMENT, LOCK, METRICS
from pipeline.runs.files import Holder, RunFiles
from pipeline.runs.rows import Row, is_count, is_number, kind_of, last_rows

_QUIET = 120.0  # seconds without activity, or five times as long as usual, after which a run hangs
_STARTING = 1800.0  # seconds until the first row of a start, which compiles; the default of distributed.progress_timeout

StateName = Literal["waiting", "running", "hung", "stopped", "killed", "finished"]


@dataclass(frozen=True)
class State:
    """How a run stands.

    ``waiting``: there is no step yet. ``running``: a process trains. ``hung``: it does, but has written nothing for far longer
    than usual. ``finished``: nothing is left to train. ``stopped``: it ended in order, by a signal or with an error, and the
    same command goes on. ``killed``: it ended without a word.
    """

    name: StateName
    step: int = 0  # the last one that the folder knows of; 0 before the first
    last_step: int | None = None  # the end of the schedule, as the run has recorded it; None before it has
    saved: int | None = None  # step of the newest intact checkpoint, from which the same command resumes; None: there is none
    reason: str = ""  # why the last start ended, in words; empty where nothing tells it
    holder: Holder | None = None  # who trains, or ended without releasing the folder
    silence: float | None = None  # seconds since the last activity; None before there is any
    seconds_per_step: float | None = None  # by this start's latest rows, evaluations and saves included; None before two
    seconds_left: float | None = None  # by that pace and the sizes of the images; None if unknown, or it does not go on

    @property
    def alive(self) -> bool:
        """Whether a process has the folder."""
        return self.name in ("running", "hung") or self.name == "waiting" and self.holder is not None

    @property
    def finished(self) -> bool:
        return self.name == "finished"

    def __str__(self) -> str:
        """In a few words, such as "stopped at step 40 of 100"."""
        if self.name == "waiting":
            return "starting" if self.holder else "not begun"
        if self.finished:
            return f"finished at step {self.step:,}"
        words = f"{self.name} at step {self.step:,}" + (f" of {self.last_step:,}" if self.last_step is not None else "")
        lost = self.name == "killed" and self.step > (self.saved or 0)
        return words + (f", saved at step {self.saved:,}" if lost and self.saved else ", with no checkpoint" if lost else "")


def is_complete(step: int, evaluation_due: bool, last_step: int) -> bool:
    """Whether a run has nothing left to train, whose newest intact checkpoint is of this step."""
    return step >= last_step and not evaluation_due


def state_of(files: RunFiles, now: float | None = None) -> State:
    """How a run stands ``now`` (Unix time; None: by the clock), by its files, as they were looked at last, and the end of its metrics."""
    now = time.time() if now is None else now
    rows, saved = last_rows(files.path / METRICS), files.newest_intact
    steps = [row["step"] for row in rows[-1:]] + [found.step for found in files.checkpoints]
    last_step, silence, pace = _last_step(files), _silence(files, rows, now), _pace(files, rows)
    ended = files.events[-1] if files.events and files.events[-1].get("event") == "end" else None
    name: StateName
    if _is_held(files.holder, ended is not None, late := silence is not None and silence > _patience(files, rows, pace)):
        name = "waiting" if not steps else "hung" if late else "running"
    elif _is_complete(files, last_step, ended):
        name = "finished"
    elif files.events or files.holder is not None:
        name = "stopped" if ended else "killed"
    else:
        name = "stopped" if steps else "waiting"
    step = max(steps, default=0)
    return State(
        name=name,
        step=step,
        last_step=last_step,
        saved=saved.state.step if saved else None,
        reason=str(ended.get("reason", "")) if ended else "",
        holder=files.holder,
        silence=silence,
        seconds_per_step=pace,
        seconds_left=_seconds_left(files, rows, pace, step, last_step) if pace and last_step and name == "running" else None,
    )


def _is_held(holder: Holder | None, ended: bool, late: bool) -> bool:
    """Whether a process has the folder. Where the file system shows no locks of other nodes, the last activity tells."""
    if holder is None or holder.alive:
        return holder is not None
    return holder.host not in (None, socket.gethostname()) and not ended and not late


def _is_complete(files: RunFiles, last_step: int | None, ended: Row | None) -> bool:
    if (saved := files.newest_intact) is not None:
        return last_step is not None and is_complete(saved.state.step, saved.state.evaluation_due, last_step)
    # A copy without the checkpoints: such an end was written after the last of them.
    return ended is not None and ended.get("whole") is True and not (files.path / CHECKPOINTS).exists()


def _last_step(files: RunFiles) -> int | None:
    """The end of the schedule: as the newest start has recorded it, else the newest checkpoint."""
    recorded = [row["last_step"] for row in files.events if is_count(row.get("last_step"))]
    newest = files.newest_manifest
    return recorded[-1] if recorded else newest.state.last_step if newest else None


def _pace(files: RunFiles, rows: list[Row]) -> float | None:
    first = files.newest_start["step"] + 1 if files.newest_start else 1
    taken = [row for row in rows if kind_of(row) == "step" and row["step"] >= first and is_number(row.get("time"))]
    back = [place for place, (row, later) in enumerate(zip(taken, taken[1:]), 1) if later["time"] < row["time"]]
    taken = taken[back[-1] :] if back else taken  # since the clock was set back
    if len(taken) < 2 or taken[-1]["step"] == taken[0]["step"]:
        return None
    return (taken[-1]["time"] - taken[0]["time"]) / (taken[-1]["step"] - taken[0]["step"])


def _seconds_left(files: RunFiles, rows: list[Row], pace: float, step: int, last_step: int) -> float:
    """At a pace, the seconds of a step of the newest row's images; by ``data.size_schedule`` later ones may take longer."""
    newest = next((row for row in reversed(rows) if row["step"] and is_number(row.get("epoch")) and row["epoch"] > 0), None)
    data, side = DataConfig(), int(files.number("model.image_size") or 0) or 1
    with suppress(ValidationError):  # a config that was damaged
        data = DataConfig.model_validate({"size_schedule": files.value("data.size_schedule") or []})
    per_step = newest["epoch"] / newest["step"] if newest else 1.0
    epochs = ((step - 1) * per_step, step * per_step, max(step, last_step) * per_step)
    return data.seconds_left(pace, epochs, side)


def _silence(files: RunFiles, rows: list[Row], now: float) -> float | None:
    """Seconds since the last row, evaluation, or start of saving; None before there is one."""
    times = [row["time"] for row in (*rows[-1:], *files.events[-1:]) if is_number(row.get("time"))]
    copied = (files.path / FETCHED).exists()  # when it was says nothing
    for name in () if copied else (CHECKPOINTS, ENVIRONMENT, LOCK):  # a save makes and renames folders
        with suppress(OSError):
            times.append(os.stat(files.path / name).st_mtime)
    return max(0.0, now - max(times)) if times else None


def _patience(files: RunFiles, rows: list[Row], pace: float | None) -> float:
    """Seconds of silence that are usual for a run."""
    begun = files.newest_start.get("time", 0)
    if not rows or not is_number(rows[-1].get("time")) or rows[-1]["time"] < begun:
        return max(_STARTING, files.number("distributed.progress_timeout") or 0)
    usual = max((pace or 0) * (files.number("log.every_steps") or 1), *files.seconds_of("evaluation"), 0)
    return max(_QUIET, 5 * usual)
