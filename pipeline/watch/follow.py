"""What a run folder tells, kept up to date: each look reads what was added since the last one, and survives what a resume rewrites."""

from __future__ import annotations

import json
import math
import os
import time
from collections import deque
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import yaml

from pipeline.checkpoint.folder import FOLDER, SAVING, saved_steps

_BLOCK = 1 << 20  # bytes read at once
_POINTS = 2048  # of a curve that are kept
_PACE_ROWS = 500  # latest steps from which the time that is left is extrapolated
_QUIET = 120.0  # seconds without a row, or five times as long as rows usually take, after which a run seems to hang


class Tail:
    """The lines that are added to a file.

    Args:
        path: it need not exist yet.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file: tuple[int, int] | None = None  # device and inode
        self._place, self._begun = 0, b""

    def restarted(self) -> bool:
        """Whether the file is another one, or was cut, since the last call: then :meth:`lines` begins at its start again."""
        try:
            now = os.stat(self.path)
        except OSError:
            now = None
        file = (now.st_dev, now.st_ino) if now else None
        if file == self._file and (now is None or now.st_size >= self._place):
            return False
        was_read = self._place > 0
        self._file, self._place, self._begun = file, 0, b""
        return was_read

    def lines(self) -> Iterator[bytes]:
        """Whole lines that were not read before.

        Raises:
            OSError: the file cannot be read; not if it does not exist.
        """
        try:
            file = open(self.path, "rb")
        except FileNotFoundError:
            return
        with file:
            file.seek(self._place)
            while block := file.read(_BLOCK):
                self._place += len(block)
                *whole, self._begun = (self._begun + block).split(b"\n")
                yield from whole


class Curve:
    """Values by step, of which at most a few thousand are kept: neighbours are averaged."""

    def __init__(self) -> None:
        self.values: list[float] = []
        self._each, self._open = 1, [0.0, 0]  # rows per value; sum and number of those of the next one

    def add(self, value: object) -> None:
        if not isinstance(value, (int, float)) or not math.isfinite(value):
            return
        self._open = [self._open[0] + value, self._open[1] + 1]
        if self._open[1] == self._each:
            self.values.append(self._open[0] / self._each)
            self._open = [0.0, 0]
        if len(self.values) == _POINTS:
            self.values = [(a + b) / 2 for a, b in zip(self.values[::2], self.values[1::2])]
            self._each *= 2


class Run:
    """A run folder. :meth:`look` brings it up to date.

    Args:
        path: the run's ``output_dir``, which need not exist yet.

    Attributes:
        config: ``config.yaml``, section -> key -> value.
        starts: of ``environment.json``.
        row: the newest row of a step; empty before there is one.
        evaluations: weights (``model``, ``ema``) -> the newest row.
        best: the evaluation with the best top-1; None before there is one.
        loss: a curve. top1: weights -> a curve.
        holder: what ``.lock`` says of the process that trains; empty if the folder was released.
        end: why the last start ended, as ``events.jsonl`` tells; empty if it does not.
        checkpoints: steps; ``saving``: whether one is being written.
        problems: files that cannot be read, a sentence each.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._metrics, self._events = Tail(path / "metrics.jsonl"), Tail(path / "events.jsonl")
        self._read: dict[str, tuple[tuple[int, int, int], Any]] = {}  # small files: their state when they were read, content
        self.problems: list[str] = []
        self._forget_rows()
        self._forget_events()

    def _forget_rows(self) -> None:
        self.row: dict[str, Any] = {}
        self.evaluations: dict[str, dict[str, Any]] = {}
        self.best: dict[str, Any] | None = None
        self.loss = Curve()
        self.top1: dict[str, Curve] = {}
        self._pace: deque[tuple[int, float]] = deque(maxlen=_PACE_ROWS)

    def _forget_events(self) -> None:
        self._last_step: int | None = None
        self.end = ""

    def look(self) -> None:
        """Read what is new."""
        self.problems = []
        self.config = self._small("config.yaml", yaml.safe_load, dict)
        self.starts = [start for start in self._small("environment.json", json.loads, list) if isinstance(start, dict)]
        self.holder = self._small(".lock", lambda text: json.loads(text or "{}"), dict)
        for tail, forget, note in (
            (self._metrics, self._forget_rows, self._note_row),
            (self._events, self._forget_events, self._note_event),
        ):
            if tail.restarted():
                forget()
            try:
                for line in tail.lines():
                    with suppress(ValueError, KeyError, TypeError, RecursionError):  # a damaged row takes no other with it
                        note(json.loads(line))
            except OSError as error:
                self.problems.append(f"{tail.path.name} cannot be read ({error.strerror})")
        self.checkpoints, self.saving = [], False
        with suppress(OSError):
            self.checkpoints = saved_steps(self.path)
            self.saving = any(name.startswith(SAVING) for name in os.listdir(self.path / FOLDER))

    def _note_row(self, row: dict[str, Any]) -> None:
        if "top1" in row:
            weights, top1 = str(row["weights"]), float(row["top1"])
            self.evaluations[weights] = row
            self.top1.setdefault(weights, Curve()).add(top1)
            if self.best is None or top1 > self.best["top1"]:
                self.best = row
        elif "lr" in row:  # a step; a row of eval.analyses is neither
            self._pace.append((int(row["step"]), float(row["time"])))
            self.row = row
            self.loss.add(row.get("loss"))

    def _note_event(self, event: dict[str, Any]) -> None:
        if event["event"] == "start":
            self._last_step, self.end = event.get("last_step"), ""
        elif event["event"] == "end":
            self.end = str(event["reason"])

    def value(self, key: str) -> Any:
        """A value of the config by its dotted key; None where there is none."""
        section, _, name = key.rpartition(".")
        values = self.config.get(section) if section else self.config
        return values.get(name) if isinstance(values, dict) else None

    @property
    def step(self) -> int:
        """The last step that the folder knows of."""
        evaluated = [int(row["step"]) for row in self.evaluations.values()]
        return max([0, int(self.row.get("step", 0)), *evaluated, *self.checkpoints])

    @property
    def last_step(self) -> int | None:
        """The end of the schedule; None while nothing tells it."""
        if isinstance(self._last_step, int):
            return self._last_step
        most, epoch, epochs = self.value("train.max_steps"), self.row.get("epoch"), self.value("train.epochs")
        if not epoch or not isinstance(epochs, (int, float)) or self.value("train.scale_epochs"):
            return most
        per_epoch = self.row["step"] / epoch
        whole = math.ceil((epochs + (self.value("optim.cooldown_epochs") or 0)) * per_epoch - 1e-6)
        return min(whole, most) if isinstance(most, int) else whole

    @property
    def finished(self) -> bool:
        """Whether the schedule's last step was taken and the folder was released."""
        return not self.holder and self.last_step is not None and self.step >= self.last_step

    @property
    def seconds_per_step(self) -> float | None:
        """By the latest rows of this start, evaluations and checkpoints included."""
        first = self.starts[-1].get("first_step", 1) if self.starts else 1
        rows = [each for each in self._pace if each[0] >= first]
        return (rows[-1][1] - rows[0][1]) / (rows[-1][0] - rows[0][0]) if len(rows) > 1 and rows[-1][0] > rows[0][0] else None

    @property
    def seconds_left(self) -> float | None:
        """At the pace so far; None if that cannot be told, or the run does not go on."""
        if not self.holder or self.last_step is None or self.seconds_per_step is None:
            return None
        return max(0, self.last_step - self.step) * self.seconds_per_step

    def silence(self, now: float | None = None) -> float | None:
        """Seconds since the last row, evaluation or start of saving; None before there is one."""
        times = [float(row["time"]) for row in (self.row, *self.evaluations.values()) if row.get("time")]
        for path in (self.path / FOLDER, self.path / "environment.json"):  # a save makes and renames folders
            with suppress(OSError):
                times.append(path.stat().st_mtime)
        return max(0.0, (time.time() if now is None else now) - max(times)) if times else None

    def seems_to_hang(self, now: float | None = None) -> bool:
        """Whether a run that nobody has ended gives no sign of life for longer than usual."""
        silence, flushed = self.silence(now), self.value("log.every_steps") or 1
        usual = (self.seconds_per_step or 0) * flushed
        return bool(self.holder) and silence is not None and silence > max(_QUIET, 5 * usual)

    def _small(self, name: str, parse: Any, kind: type) -> Any:
        """A small file's content; empty if it is missing or damaged. Read again only when it has changed."""
        path = self.path / name
        try:
            now = os.stat(path)
            state = (now.st_ino, now.st_size, now.st_mtime_ns)
            if name not in self._read or self._read[name][0] != state:
                self._read[name] = (state, parse(path.read_text(errors="replace")))
            content = self._read[name][1]
            if not isinstance(content, kind):
                raise ValueError("it has another form")
            return content
        except FileNotFoundError:
            return kind()
        except (OSError, ValueError, yaml.YAMLError, RecursionError) as error:
            reason = error.strerror if isinstance(error, OSError) else str(error).partition("\n")[0]
            self.problems.append(f"{name} cannot be read ({reason})")
            return kind()
