"""What reading from a store took, over all ranks: rows of metrics.jsonl have the totals, rank 0 warns as failures add up."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch

from pipeline.distributed.world import World

_log = logging.getLogger(__name__)

# Name in metrics.jsonl -> what Store.take_counts calls it. Each failure was followed by another try, or by a bad sample.
_FAILURES = {
    "store_throttled": "throttled",
    "store_cut": "cut",
    "store_errors": "errors",
    "store_missing": "missing",
    "store_denied": "denied",
    "store_changed": "changed",
}
_WORDS = {
    "store_throttled": "throttled",
    "store_cut": "cut off",
    "store_errors": "without a proper answer",
    "store_missing": "for objects that are not there",
    "store_denied": "refused",
    "store_changed": "answered from an object that was replaced",
}


class CountedSet(Protocol):
    """A shard set."""

    folder: Any

    def take_counts(self) -> dict[str, int] | None: ...


class StoreReport:
    """Totals of this start.

    Args:
        world: all ranks, which read from the same store.
        place: the store, for messages.
        take: this rank's counts since the last call.
    """

    def __init__(self, world: World, place: str, take: Callable[[], dict[str, int]]) -> None:
        self._world, self._place, self._take = world, place, take
        self._totals = {name: 0 for name in ("requests", "bytes", *_FAILURES.values())}
        self._said_at = 0

    def row(self) -> dict[str, float]:
        """Totals for a row: requests, MiB, and failed requests by kind. Collective."""
        new = self._take()
        counts = torch.tensor(
            [float(new.get(name, 0)) for name in self._totals], dtype=torch.float64, device=self._world.device
        )
        for name, count in zip(self._totals, self._world.sum(counts).tolist()):
            self._totals[name] += int(count)
        row = {name: self._totals[kind] for name, kind in _FAILURES.items()}
        self._warn(row)
        return {"store_requests": self._totals["requests"], "store_mib": round(self._totals["bytes"] / 2**20, 3), **row}

    def _warn(self, row: dict[str, int]) -> None:
        failed = sum(row.values())
        if not self._world.is_main or failed < max(
            1, 10 * self._said_at
        ):  # at the first, and each time there are ten times as many
            return
        self._said_at = failed
        kinds = ", ".join(f"{count:,} {_WORDS[name]}" for name, count in row.items() if count)
        _log.warning(f"{self._place}: {failed:,} of {self._totals['requests'] + failed:,} requests failed so far: {kinds}")


def store_report(world: World, sets: Sequence[CountedSet]) -> StoreReport | None:
    """The report of a run's shard sets; None if they are not in a store."""

    def take() -> dict[str, int]:
        counts = Counter[str]()
        for each in sets:
            counts.update(each.take_counts() or {})
        return dict(counts)

    if all(each.take_counts() is None for each in sets):
        return None
    return StoreReport(world, str(sets[0].folder), take)
