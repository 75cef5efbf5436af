"""Reduce the metrics of some steps over all ranks."""

from __future__ import annotations

import socket
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pipeline.cluster.world import World
from pipeline.metrics import Metric, Reduction

# The values of one rank in one step -> its value.
_COMBINE: dict[Reduction, Callable[[list[float]], Any]] = {"mean": np.mean, "max": np.max, "sum": np.sum, "slowest": np.sum}


class MetricReduction:
    """Reduces what each rank has recorded, with one all-gather for all metrics of all steps since the last time.

    Construction is collective.
    """

    def __init__(self, world: World) -> None:
        self._world = world
        self._hosts = world.gather(socket.gethostname())
        self._columns: dict[str, Reduction] = {}  # of all metrics that any rank has recorded, in the same order on all ranks

    def rows(self, steps: Sequence[Mapping[str, Metric]], seconds: float) -> list[dict[str, Any]]:
        """Reduce the metrics of some steps. Collective.

        Args:
            steps: the metrics of each, by name.
            seconds: that these steps took on this rank.

        Returns:
            For each step its metrics by name, without those that no rank has recorded in it.
        """
        self._agree_on_columns(steps)
        own = torch.zeros(2, len(steps), len(self._columns), dtype=torch.float64)  # values; 1 where there is one
        for number, recorded in enumerate(_fetched(steps, self._world.device)):
            for column, (name, reduction) in enumerate(self._columns.items()):
                if name in recorded:
                    value = float(_COMBINE[reduction](recorded[name]))
                    own[0, number, column] = value / seconds if reduction == "slowest" else value
                    own[1, number, column] = 1
        values, known = self._world.stack(own.to(self._world.device)).cpu().unbind(1)  # (ranks, steps, columns) each
        rows: list[dict[str, Any]] = [{} for _ in steps]
        for column, (name, reduction) in enumerate(self._columns.items()):
            if reduction == "slowest":
                share = self._slowest(name, values[:, :, column].sum(1))
                for row in rows:
                    row |= share
                continue
            counts = known[:, :, column].sum(0)  # (steps,)
            reduced = _reduce(values[:, :, column], known[:, :, column] > 0, reduction).tolist()
            for row, step, count, value in zip(rows, steps, counts.tolist(), reduced, strict=True):
                if count:
                    row[name] = int(value) if name in step and _is_whole(step[name]) else value
        return rows

    def _agree_on_columns(self, steps: Sequence[Mapping[str, Metric]]) -> None:
        """Learn the names that any rank has recorded for the first time."""
        new = [[name, metric.reduce] for step in steps for name, metric in step.items() if name not in self._columns]
        if self._world.sum(torch.tensor(float(len(new)), device=self._world.device)):  # rare: gathering objects is slow
            for part in self._world.gather(new):
                self._columns.update(part)

    def _slowest(self, name: str, shares: Tensor) -> dict[str, Any]:
        rank = int(shares.argmax())
        where = {f"{name}_rank": rank, f"{name}_host": self._hosts[rank]} if self._world.size > 1 else {}
        return {name: float(shares[rank]), **where}


def _fetched(steps: Sequence[Mapping[str, Metric]], device: torch.device) -> list[dict[str, list[float]]]:
    """The values of each step as numbers, with one synchronization with the device."""
    tensors = [value for step in steps for metric in step.values() for value in metric.values if isinstance(value, Tensor)]
    moved = [value.to(device, torch.float64, non_blocking=True).reshape(()) for value in tensors]
    numbers = iter(torch.stack(moved).tolist() if moved else [])
    return [
        {
            name: [next(numbers) if isinstance(value, Tensor) else float(value) for value in metric.values]
            for name, metric in step.items()
        }
        for step in steps
    ]


def _reduce(values: Tensor, known: Tensor, reduction: Reduction) -> Tensor:
    """(ranks, steps) -> (steps,), over those ranks that are known."""
    if reduction == "max":
        return values.where(known, -torch.inf).amax(0)
    total = values.where(known, 0.0).sum(0)
    return total if reduction == "sum" else total / known.sum(0)


def _is_whole(metric: Metric) -> bool:
    return metric.reduce in ("max", "sum") and all(type(value) is int for value in metric.values)
