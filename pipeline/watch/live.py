"""Keep what a run folder tells up to date: each look reads what was added since the last one, and survives what a resume rewrites."""

from __future__ import annotations

import math
from pathlib import Path

from pipeline.runs import METRICS
from pipeline.runs.files import RunFiles
from pipeline.runs.rows import Row, Tail, is_number, kind_of, parse_row

_POINTS = 2048  # of a curve that are kept


class Curve:
    """Values by step, of which at most a few thousand are kept: neighbours are averaged."""

    def __init__(self) -> None:
        self.values: list[float] = []
        self._rows, self._sum, self._count = 1, 0.0, 0  # rows per value; sum and number of those of the next one

    def add(self, value: object) -> None:
        """Add the next value; one that is not a finite number is left out."""
        if not is_number(value) or not math.isfinite(value):
            return
        self._sum, self._count = self._sum + value, self._count + 1
        if self._count == self._rows:
            self.values.append(self._sum / self._rows)
            self._sum, self._count = 0.0, 0
        if len(self.values) == _POINTS:
            self.values = [(a + b) / 2 for a, b in zip(self.values[::2], self.values[1::2])]
            self._rows *= 2


class LiveRun(RunFiles):
    """A run folder with the curves of its metrics.

    Attributes:
        row: the newest row of a step; empty before there is one.
        evaluations: weights (``model``, ``ema``) -> the newest row.
        best: the evaluation with the best top-1; None before there is one.
        loss: a curve. top1: weights -> a curve.
    """

    def __init__(self, path: Path) -> None:
        self._metrics = Tail(path / METRICS)
        self._forget()
        super().__init__(path)

    def look(self) -> None:
        """Read what is new."""
        super().look()
        if self._metrics.was_replaced():
            self._metrics.rewind()
            self._forget()
        try:
            for line in self._metrics.lines():
                if (row := parse_row(line)) is not None:
                    self._note(row)
        except OSError as error:
            self.problems.append(f"{METRICS} cannot be read ({error.strerror}).")

    def _forget(self) -> None:
        self.row: Row = {}
        self.evaluations: dict[str, Row] = {}
        self.best: Row | None = None
        self.loss = Curve()
        self.top1: dict[str, Curve] = {}

    def _note(self, row: Row) -> None:
        kind = kind_of(row)
        if kind == "evaluation":
            weights = str(row["weights"])
            self.evaluations[weights] = row
            self.top1.setdefault(weights, Curve()).add(row["top1"])
            if self.best is None or row["top1"] > self.best["top1"]:
                self.best = row
        elif kind == "step":
            self.row = row
            self.loss.add(row.get("loss"))
