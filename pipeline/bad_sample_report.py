"""Which samples could not be used, over all processes: each is named once, in the main process's log."""

from __future__ import annotations

import sys

from tqdm import tqdm

from pipeline.distributed import World


class BadSampleReport:
    """The bad samples that all processes have met.

    Args:
        world: all processes.
    """

    def __init__(self, world: World) -> None:
        self._world = world
        self._known: set[int] = set()

    def __len__(self) -> int:
        return len(self._known)

    def update(self, met: dict[int, str]) -> None:
        """Add what this process has met, as sample -> sentence; every process must call."""
        for part in self._world.gather(met):
            for sample, sentence in part.items():
                if sample not in self._known:
                    self._known.add(sample)
                    if self._world.is_main:
                        tqdm.write(f"warning: {sentence}", file=sys.stderr)
