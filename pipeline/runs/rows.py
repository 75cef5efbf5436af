"""Read files of JSON lines (``metrics.jsonl``, ``events.jsonl``): whole, as columns, or only what is new; damaged lines are left out."""

import json
import math
import os
from array import array
from collections import defaultdict
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeGuard

from pipeline.metrics import slow_rank

if TYPE_CHECKING:
    import numpy as np

_END = 1 << 18  # bytes at the end of a file in which its last rows are looked for: some hundred steps
_MOST = 1 << 24  # likewise, where few of them are steps
_LARGEST_STEP = 2**53  # beyond it a float does not tell two steps apart

Row = dict[str, Any]


def parse_row(line: bytes) -> Row | None:
    """Parse a line; None if it is not a row, which has a step."""
    try:
        row = json.loads(line.decode())  # faster than to let it guess the encoding
    except (ValueError, RecursionError):
        return None
    return row if isinstance(row, dict) and is_count(row.get("step")) else None


def kind_of(row: Row) -> Literal["step", "evaluation", "analysis", "damaged"]:
    """What a row of ``metrics.jsonl`` is about; an evaluation without its result is damaged."""
    if isinstance(row.get("analysis"), dict):
        return "analysis"
    if "weights" in row:
        return "evaluation" if is_number(row.get("top1")) else "damaged"
    return "step"


def is_number(value: Any) -> TypeGuard[int | float]:
    """Whether a value of a file is a finite number."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and -1e300 < value < 1e300


def is_count(value: Any) -> TypeGuard[int]:
    """Whether a value of a file is a whole number from 0 on, such as a step."""
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < _LARGEST_STEP


def lines_left_out(count: int, name: str) -> str:
    """A sentence about the damaged lines of a file."""
    return f"{count:,} line{'s' * (count != 1)} of {name} cannot be read and are left out."


def last_rows(path: Path, end: int = _END) -> list[Row]:
    """The rows at the end of a file, some hundred of them, in its order; empty if it cannot be read. ``end``: bytes that are read; more,
    if that is less than two steps: evaluations of 100,000 classes have rows of 600 kB."""
    try:
        with open(path, "rb") as file:
            begin = max(0, file.seek(0, os.SEEK_END) - end)
            file.seek(begin)
            lines = file.read().split(b"\n")
    except OSError:
        return []
    rows = [row for line in lines[1 if begin else 0 :] if (row := parse_row(line)) is not None]
    few = sum(kind_of(row) == "step" for row in rows) < 2
    return last_rows(path, 8 * end) if few and 0 < begin and end < _MOST else rows


class Tail:
    """Read the lines that are added to a file, which need not exist yet."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file: tuple[int, int] | None = None  # device and inode
        self.rewind()

    def rewind(self) -> None:
        """Begin at the file's start again."""
        self._place = 0  # bytes of the lines that were read

    def was_replaced(self) -> bool:
        """Whether the file is another one than at the last look, or shorter than what was read of it. One that is gone is not."""
        try:
            now = os.stat(self.path)
        except OSError:
            return False
        return self._file is not None and ((now.st_dev, now.st_ino) != self._file or now.st_size < self._place)

    def lines(self) -> Iterator[bytes]:
        """Whole lines that were not read before; the next call goes on where this one was left. Raises OSError: the file cannot
        be read; not if it does not exist."""
        with suppress(FileNotFoundError), open(self.path, "rb") as file:
            there = os.fstat(file.fileno())
            self._file = (there.st_dev, there.st_ino)
            file.seek(self._place)
            for line in file:
                if not line.endswith(b"\n"):
                    return  # it is being written
                self._place += len(line)
                yield line[:-1]


@dataclass
class MetricRows:
    """What ``metrics.jsonl`` holds."""

    steps: "dict[str, np.ndarray]" = field(default_factory=dict)  # column -> (n,) float64, ascending by "step"; NaN: no number
    evaluations: list[Row] = field(default_factory=list)  # in the file's order
    analyses: list[Row] = field(default_factory=list)  # of ``eval.analyses``
    waited_for: dict[str, float] = field(default_factory=dict)  # host -> share of the steps' time that slow ranks there cost
    damaged: int = 0  # lines that are not rows
    repeated: int = 0  # steps that were there more than once; the last row of each counts
    half_a_line: bool = False  # the last line has no end: it is being written, or was when the run was killed or copied


def read_metrics(path: Path) -> MetricRows:
    """Read ``metrics.jsonl`` of any length; 500,000 steps take seconds and some 100 MB. An OSError if it cannot be read."""
    import numpy as np

    found, columns, count = MetricRows(), defaultdict[str, "array[float]"](lambda: array("d")), 0
    time, lost = 0.0, defaultdict[str, float](float)
    with open(path, "rb") as file:
        for line in file:
            row = parse_row(line)
            if row is None:
                found.half_a_line = not line.endswith(b"\n")
                found.damaged += not found.half_a_line
            elif (kind := kind_of(row)) == "step":
                for name, value in row.items():
                    column = columns[name]
                    if len(column) < count:  # rows before, which do not have it
                        column.extend([math.nan] * (count - len(column)))
                    # The first test alone is for speed: most values are such.
                    column.append(value if type(value) is float and -1e300 < value < 1e300 or is_number(value) else math.nan)
                count += 1
                if is_number(rate := row.get("images_per_second")) and rate > 0:  # a step takes as long as images do
                    time += 1 / rate
                    if slow_rank(row):
                        lost[str(row["slowest_host"])] += row["slowest_cost"] / rate
            elif kind == "damaged":
                found.damaged += 1
            else:
                (found.evaluations if kind == "evaluation" else found.analyses).append(row)
    for name, column in columns.items():
        column.extend([math.nan] * (count - len(column)))
        if not np.isnan(values := np.array(column)).all():
            found.steps[name] = values
    found.waited_for = {host: cost / time for host, cost in sorted(lost.items(), key=lambda item: -item[1])}
    step = found.steps.get("step", np.empty(0))
    if not (np.diff(step) > 0).all():  # sort by step, and keep the last row of each
        _, from_end = np.unique(step[::-1], return_index=True)
        kept = len(step) - 1 - from_end
        found.steps = {name: values[kept] for name, values in found.steps.items()}
        found.repeated = len(step) - len(kept)
    return found
