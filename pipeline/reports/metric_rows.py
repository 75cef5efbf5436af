"""``metrics.jsonl`` as columns, tolerant of damage. A run of 500,000 steps takes seconds and some 100 MB."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeGuard

import numpy as np

_CHUNK = 20_000  # rows that are kept as dictionaries at a time
_LARGEST_STEP = 2**53  # beyond it a float does not tell two steps apart


@dataclass
class MetricRows:
    """What ``metrics.jsonl`` holds.

    Attributes:
        steps: column -> (n,) float64 of the training steps, ascending by ``step``; NaN where a row has no number.
        evaluations: rows with ``weights`` and ``top1``, in the file's order.
        analyses: rows with ``analysis`` (``eval.analyses``).
        damaged: lines that are no row.
        repeated: steps that were there more than once; the last row of each counts.
        half_a_line: whether the last line has no end: it is being written, or was when the run was killed or copied.
    """

    steps: dict[str, np.ndarray] = field(default_factory=dict)
    evaluations: list[dict[str, Any]] = field(default_factory=list)
    analyses: list[dict[str, Any]] = field(default_factory=list)
    damaged: int = 0
    repeated: int = 0
    half_a_line: bool = False


def read_metrics(path: Path) -> MetricRows:
    """Read a file of any length.

    Raises:
        OSError: it cannot be read.
    """
    found, chunk, chunks = MetricRows(), [], []
    with open(path, "rb") as file:
        for line in file:
            row = _row(line)
            if row is None:
                if line.endswith(b"\n"):
                    found.damaged += 1
                else:
                    found.half_a_line = True
            elif isinstance(row.get("analysis"), dict):
                found.analyses.append(row)
            elif "weights" in row:
                if is_number(row.get("top1")):
                    found.evaluations.append(row)
                else:
                    found.damaged += 1
            else:
                chunk.append(row)
                if len(chunk) == _CHUNK:
                    chunks.append(_columns(chunk))
                    chunk = []
    chunks.append(_columns(chunk))
    found.steps = _joined(chunks)
    found.repeated = _keep_last_of_each_step(found.steps)
    return found


def is_number(value: Any) -> TypeGuard[int | float]:
    """Whether a value of a file is a finite number."""
    return isinstance(value, int | float) and not isinstance(value, bool) and -1e300 < value < 1e300


def _row(line: bytes) -> dict[str, Any] | None:
    """A line as a row, None if it is none: a row has a step."""
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(row, dict):
        return None
    step = row.get("step")
    return row if isinstance(step, int) and not isinstance(step, bool) and 0 <= step < _LARGEST_STEP else None


def _columns(rows: list[dict[str, Any]]) -> dict[str, np.ndarray]:
    names = dict.fromkeys(name for row in rows for name in row)
    columns = {name: _numbers(row.get(name) for row in rows) for name in names}
    return {name: column for name, column in columns.items() if name == "step" or not np.isnan(column).all()}


def _numbers(values: Iterable[Any]) -> np.ndarray:
    return np.array([value if is_number(value) else np.nan for value in values], dtype=np.float64)


def _joined(chunks: list[dict[str, np.ndarray]]) -> dict[str, np.ndarray]:
    names = dict.fromkeys(name for chunk in chunks for name in chunk)
    missing = [np.full(len(chunk.get("step", ())), np.nan) for chunk in chunks]
    return {name: np.concatenate([chunk.get(name, gap) for chunk, gap in zip(chunks, missing)]) for name in names}


def _keep_last_of_each_step(columns: dict[str, np.ndarray]) -> int:
    """Sort the columns by step, in place; returns how many rows were of a step that a later row is of too."""
    if "step" not in columns:
        return 0
    step = columns["step"]
    if (np.diff(step) > 0).all():
        return 0
    _, from_end = np.unique(step[::-1], return_index=True)
    kept = len(step) - 1 - from_end
    for name in columns:
        columns[name] = columns[name][kept]
    return len(step) - len(kept)
