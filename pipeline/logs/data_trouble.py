"""Report over all ranks what went wrong with the data: samples that cannot be used, requests to a store that failed."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence

import torch

from pipeline.cluster.world import World
from pipeline.shards.mixed_set import MixedSet
from pipeline.shards.shard_set import ShardSet

_log = logging.getLogger(__name__)

# What Store.take_counts calls a failure, in metrics.jsonl with "store_" -> in a warning. Each was followed by another try, or by
# a bad sample.
_FAILURES = {
    "throttled": "throttled",
    "cut": "cut off",
    "errors": "without a proper answer",
    "missing": "for objects that are not there",
    "denied": "refused",
    "changed": "answered from an object that was replaced",
}


class BadSampleReport:
    """The bad samples that any rank has met.

    Args:
        known: sample -> message, from an earlier start's :meth:`state`: these count, but are not reported again.
    """

    def __init__(self, world: World, known: Mapping[int, str] | None = None) -> None:
        self._world = world
        self._known = dict(known or {})

    def __len__(self) -> int:
        return len(self._known)

    def update(self, met: dict[int, str]) -> None:
        """Add this rank's bad samples, as sample -> message. Collective."""
        for part in self._world.gather(list(met.items())):  # JSON keys are strings
            for sample, sentence in part:
                if sample not in self._known:
                    self._known[sample] = sentence
                    if self._world.is_main:
                        _log.warning(sentence)

    def state(self) -> dict[int, str]:
        """Sample -> message for all so far, the same on every rank; saved in checkpoints."""
        return dict(self._known)


class StoreReport:
    """Totals of this start.

    Args:
        world: all ranks, which read from the same store.
        place: the store, for messages.
        take: this rank's counts since the last call.
    """

    def __init__(self, world: World, place: str, take: Callable[[], dict[str, int]]) -> None:
        self._world, self._place, self._take = world, place, take
        self._totals = {name: 0 for name in ("requests", "bytes", *_FAILURES)}
        self._said_at = 0

    def row(self) -> dict[str, float]:
        """Totals for a row: requests, MiB, and failed requests by kind. Collective."""
        new = self._take()
        counts = torch.tensor(
            [float(new.get(name, 0)) for name in self._totals], dtype=torch.float64, device=self._world.device
        )
        for name, count in zip(self._totals, self._world.sum(counts).tolist()):
            self._totals[name] += int(count)
        self._warn()
        failed = {f"store_{kind}": self._totals[kind] for kind in _FAILURES}
        return {"store_requests": self._totals["requests"], "store_mib": round(self._totals["bytes"] / 2**20, 3), **failed}

    def _warn(self) -> None:
        """Warn at the first failed request, and each time there are ten times as many."""
        failed = sum(self._totals[kind] for kind in _FAILURES)
        if not self._world.is_main or failed < max(1, 10 * self._said_at):
            return
        self._said_at = failed
        kinds = ", ".join(f"{self._totals[kind]:,} {words}" for kind, words in _FAILURES.items() if self._totals[kind])
        _log.warning(f"{self._place}: {failed:,} of {self._totals['requests'] + failed:,} requests failed so far: {kinds}")


def store_report(world: World, sets: Sequence[ShardSet | MixedSet]) -> StoreReport | None:
    """The report of a run's shard sets; None if they are not in a store."""

    def take() -> dict[str, int]:
        counts = Counter[str]()
        for shard_set in sets:
            counts.update(shard_set.take_counts() or {})
        return dict(counts)

    if all(shard_set.take_counts() is None for shard_set in sets):
        return None
    return StoreReport(world, str(sets[0].folder), take)
