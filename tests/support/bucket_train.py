"""``pipeline.train`` with a lock in the store that is soon stale, so that a test need not wait for a dead owner's."""

from __future__ import annotations

from pipeline import train
from pipeline.stores import lock


def main() -> int:
    lock.BEAT, lock.STALE = 0.5, 3.0
    return train.main()
