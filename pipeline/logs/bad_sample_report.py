"""Samples that could not be used, over all ranks: rank 0 logs a warning for each, once."""

from __future__ import annotations

import logging
from collections.abc import Mapping

from pipeline.distributed.world import World

_log = logging.getLogger(__name__)


class BadSampleReport:
    """The bad samples that any rank has met.

    Args:
        world: all ranks.
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
