"""Which samples could not be used, over all processes: each is named once, in the main process's log."""

from __future__ import annotations

import logging
from collections.abc import Mapping

from pipeline.distributed.world import World

_log = logging.getLogger(__name__)


class BadSampleReport:
    """The bad samples that all processes have met.

    Args:
        world: all processes.
        known: sample -> sentence, of an earlier start's :meth:`state`: these count, and are not named again.
    """

    def __init__(self, world: World, known: Mapping[int, str] | None = None) -> None:
        self._world = world
        self._known = dict(known or {})

    def __len__(self) -> int:
        return len(self._known)

    def update(self, met: dict[int, str]) -> None:
        """Add what this process has met, as sample -> sentence; every process must call."""
        for part in self._world.gather(list(met.items())):  # JSON has no numbers as keys
            for sample, sentence in part:
                if sample not in self._known:
                    self._known[sample] = sentence
                    if self._world.is_main:
                        _log.warning(sentence)

    def state(self) -> dict[int, str]:
        """Sample -> sentence of all so far, the same in every process; what a checkpoint keeps."""
        return dict(self._known)
