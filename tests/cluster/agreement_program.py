"""What each rank does for ``test_agreement.py``: ``agreement_program EVERY...``. Rank 0 prints what it has heard with each."""

from __future__ import annotations

import json
import sys

from pipeline.cluster.agreement import Agreement
from pipeline.cluster.rendezvous import disconnect, init_world
from pipeline.cluster.world import World

CALLS = 9


def main() -> None:
    world = init_world()
    found = [converse(world, Agreement(60, every=int(every))) for every in sys.argv[1:]]
    if world.is_main:
        print(json.dumps(found))
    disconnect()


def converse(world: World, agreement: Agreement) -> dict:
    """What all have heard: the same, or this fails."""
    heard = []
    for call in range(CALLS):
        signal = 15 if world.rank == world.size - 1 and call >= 2 else 0  # a signal is remembered
        agreed = agreement.exchange(signal, save_failed=(world.rank, call) == (1, 3), written=call + world.rank)
        heard.append([agreed.stop, agreed.save_failed, agreed.written])
    asked = [agreement.ask(world.rank == who) for who in (0, world.size - 2, -1)]
    for other, said in enumerate(world.gather([heard, asked])):
        assert said == [heard, asked], f"rank {other} heard {said}, rank {world.rank} {[heard, asked]}"
    return {"heard": heard, "asked": asked}


if __name__ == "__main__":
    main()
