"""Reduce over all ranks what each has recorded: metrics of steps, bad samples, requests to a store."""

import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pipeline.cluster.environment import node_name
from pipeline.cluster.world import World
from pipeline.metrics import Metric, Reduction
from pipeline.shards.mixed_set import MixedSet
from pipeline.shards.shard_set import ShardSet

_log = logging.getLogger(__name__)
# The values of one rank in one step -> its value.
_COMBINE: dict[Reduction, Callable[[list[float]], Any]] = {"mean": np.mean, "max": np.max, "sum": np.sum, "slowest": np.sum}
# What Store.take_counts calls a failure, in metrics.jsonl with "store_" -> in a warning. Another try followed, or a bad sample.
_FAILURES = {
    "throttled": "throttled",
    "cut": "cut off",
    "errors": "without a proper answer",
    "missing": "for objects that are not there",
    "denied": "refused",
    "changed": "answered from an object that was replaced",
}


class MetricReduction:
    """Reduces what each rank has recorded, with one all-gather for all steps since the last time. Construction is collective."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._hosts = world.gather(node_name())
        self._columns: dict[str, Reduction] = {}  # of all metrics that any rank has recorded, in the same order on all ranks

    def rows(self, steps: Sequence[Mapping[str, Metric]], seconds: float, waited: float) -> list[dict[str, Any]]:
        """Reduce the metrics, by name, of steps that took this rank some seconds, in ``waited`` of which it waited for others
        (:mod:`pipeline.cluster.waits`). Collective. Returns for each step its metrics by name, but those of no rank."""
        # Learn the names that any rank has recorded for the first time.
        new = [[name, metric.reduce] for step in steps for name, metric in step.items() if name not in self._columns]
        if self._world.sum(torch.tensor(float(len(new)), device=self._world.device)):  # rare: gathering objects is slow
            for part in self._world.gather(new):
                self._columns.update(part)
        own = torch.zeros(2, len(steps), len(self._columns) + 1, dtype=torch.float64)  # values; 1 where there is one
        own[0, 0, -1] = min(waited / seconds, 1.0)
        for number, recorded in enumerate(_fetched(steps, self._world.device)):
            for column, (name, reduction) in enumerate(self._columns.items()):
                if name in recorded:
                    value = float(_COMBINE[reduction](recorded[name]))
                    own[0, number, column] = value / seconds if reduction == "slowest" else value
                    own[1, number, column] = 1
        values, known = self._world.stack(own.to(self._world.device)).cpu().unbind(1)  # (ranks, steps, columns) each
        rows: list[dict[str, Any]] = [{} for _ in steps]
        data = torch.zeros(len(values), dtype=values.dtype)  # (ranks,)
        for column, (name, reduction) in enumerate(self._columns.items()):
            if reduction == "slowest":
                # (ranks,); a step may be settled while the next one is under way, whose wait then falls into this time and not its own.
                shares = values[:, :, column].sum(1).clamp(max=1.0)
                data = shares if name == "data_wait" else data
                rank = int(shares.argmax())
                where = {f"{name}_rank": rank, f"{name}_host": self._hosts[rank]} if self._world.size > 1 else {}
                for row in rows:
                    row |= {name: float(shares[rank]), **where}
                continue
            counts = known[:, :, column].sum(0)  # (steps,)
            reduced = _reduce(values[:, :, column], known[:, :, column] > 0, reduction).tolist()
            for row, step, count, value in zip(rows, steps, counts.tolist(), reduced, strict=True):
                if count:
                    own_values = step[name].values if name in step and reduction in ("max", "sum") else [value]
                    row[name] = int(value) if all(type(own) is int for own in own_values) else value
        slowest = self._slowest(values[:, 0, -1].numpy(), data.numpy())
        return [slowest | row for row in rows]

    def _slowest(self, waits: np.ndarray, data: np.ndarray) -> dict[str, Any]:
        """Find whom the others wait for, and the share of time that it costs: its own work less the median of the others'; nothing
        where that is not known. ``waits``, ``data``: (ranks,), shares of the time that ranks waited for others, for data."""
        if self._world.size == 1 or not waits.any():
            return {}
        rank = int(waits.argmin())
        cost = max(0.0, float(np.median(np.delete(waits, rank)) - waits[rank]))
        of_data = float(min(data[rank], 1 - waits[rank]))
        shares = {"cost": cost, "data": of_data, "compute": float(1 - waits[rank] - of_data), "waiting": float(waits[rank])}
        where = {"slowest_rank": rank, "slowest_host": self._hosts[rank]}
        return where | {f"slowest_{name}": share for name, share in shares.items()}


def _fetched(steps: Sequence[Mapping[str, Metric]], device: torch.device) -> list[dict[str, list[float]]]:
    """The values of each step as numbers, with one synchronization with the device."""
    tensors = [value for step in steps for metric in step.values() for value in metric.values if isinstance(value, Tensor)]
    moved = [value.to(device, torch.float64, non_blocking=True).reshape(()) for value in tensors]
    numbers = iter(torch.stack(moved).tolist() if moved else [])

    def fetch(metric: Metric) -> list[float]:
        return [next(numbers) if isinstance(value, Tensor) else float(value) for value in metric.values]

    return [{name: fetch(metric) for name, metric in step.items()} for step in steps]


def _reduce(values: Tensor, known: Tensor, reduction: Reduction) -> Tensor:
    """(ranks, steps) -> (steps,), over those ranks that are known."""
    if reduction == "max":
        return values.where(known, -torch.inf).amax(0)
    total = values.where(known, 0.0).sum(0)
    return total if reduction == "sum" else total / known.sum(0)


def report_bad_samples(world: World, met: Mapping[int, str], known: dict[int, str]) -> None:
    """Add those that any rank has met, as sample -> message, to those that are known, and warn of the new ones. Collective."""
    for part in world.gather(list(met.items())):  # JSON keys are strings
        for sample, sentence in part:
            if sample not in known:
                known[sample] = sentence
                if world.is_main:
                    _log.warning(sentence)


class StoreReport:
    """Requests of this start to the store that has the data, over all ranks, which read from the same. ``sets``: the run's."""

    def __init__(self, world: World, sets: Sequence[ShardSet | MixedSet]) -> None:
        self._world, self._sets = world, sets
        self._in_store = any(shard_set.take_counts() is not None for shard_set in sets)
        self._totals = {name: 0 for name in ("requests", "bytes", *_FAILURES)}
        self._said_at = 0

    def row(self) -> dict[str, float]:
        """Totals for a row: requests, MiB, and failed requests by kind; empty if the data is not in a store. Collective."""
        if not self._in_store:
            return {}
        new = Counter[str]()
        for shard_set in self._sets:
            new.update(shard_set.take_counts() or {})
        counts = torch.tensor([float(new[name]) for name in self._totals], dtype=torch.float64, device=self._world.device)
        for name, count in zip(self._totals, self._world.sum(counts).tolist()):
            self._totals[name] += int(count)
        failures, requests = {kind: self._totals[kind] for kind in _FAILURES}, self._totals["requests"]
        failed = sum(failures.values())
        if self._world.is_main and failed >= max(1, 10 * self._said_at):  # the first, and each time there are ten times as many
            self._said_at = failed
            kinds = ", ".join(f"{count:,} {_FAILURES[kind]}" for kind, count in failures.items() if count)
            _log.warning(f"{self._sets[0].folder}: {failed:,} of {requests + failed:,} requests failed so far: {kinds}")
        mib = round(self._totals["bytes"] / 2**20, 3)
        return {"store_requests": requests, "store_mib": mib, **{f"store_{k}": n for k, n in failures.items()}}
