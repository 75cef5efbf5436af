"""Runs that are killed again and again at random, until they are done."""

from __future__ import annotations

import random
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from faults.history import Start
from pipeline.checkpoint.folder import latest_step
from pipeline.errors import RANK_LOST
from support.ranks import Job, is_saving, steps_taken, train, wait_for_steps

MOMENTS = ("start", "step", "save")
SHARES = (0.15, 0.4, 0.45)  # of the kills
SAVE_SECONDS = 0.1  # that a save of the small model takes on a busy machine, about


@dataclass
class Ordeal:
    """A run, and what was done to it."""

    config: Path
    run: Path
    options: tuple[str, ...]  # overrides
    draw: random.Random
    starts: list[Start] = field(default_factory=list)
    kills: Counter = field(default_factory=Counter)
    unfinished_saves: int = 0  # kills that left a save half done
    ended_by_launcher: int = 0  # kills after which another rank had to be ended

    def start(self, world_size: int, *overrides: str) -> Job:
        self.starts.append(Start(time.time(), latest_step(self.run) or 0, world_size))
        return train(world_size, self.config, self.run, *self.options, *overrides)

    def start_and_kill(self, world_size: int, moment: str, *overrides: str, most_steps: int = 12) -> bool:
        """Kill a random rank, or all, at a random time of one kind, after up to ``most_steps``.

        Returns:
            Whether it came to that; else the run was done before.
        """
        job, draw = self.start(world_size, *overrides), self.draw
        victims = [draw.randrange(world_size)] if draw.random() < 0.6 else list(range(world_size))
        if not self.wait_for(job, moment, most_steps, victims[0]):
            return False
        job.kill(*victims)
        self.kills[moment, "all" if len(victims) == world_size else "one"] += 1
        self.ended_by_launcher += not job.wait_after_kill()
        self.unfinished_saves += is_saving(self.run)
        others = {job.code(rank) for rank in range(world_size) if rank not in victims}
        assert moment == "start" or others <= {RANK_LOST, -9, 0}, job.outputs()
        return True

    def wait_for(self, job: Job, moment: str, most_steps: int, rank: int = 0) -> bool:
        """Until a random time of a kind: soon after the start, or after up to ``most_steps`` of ``rank``; False if the run was done before."""
        if moment == "start":  # a fast start is over before the time is: its first step ends the wait too
            end, before = time.monotonic() + self.draw.uniform(0, 3), steps_taken(self.run)
            job.until(lambda: time.monotonic() > end or steps_taken(self.run) > before)
        else:
            wait_for_steps(job, self.run, self.draw.randint(1, most_steps), rank)
            job.until(lambda: self.is_at(moment))
            time.sleep(self.draw.uniform(0, SAVE_SECONDS))
        assert job.runs or job.codes == [0] * job.world_size, job.outputs()
        return bool(job.runs)

    def is_at(self, moment: str) -> bool:
        """Whether it is the moment to kill, where a step was taken."""
        return moment != "save" or is_saving(self.run)

    def report(self) -> str:
        parts = ", ".join(f"{count} x {who} at a {moment}" for (moment, who), count in sorted(self.kills.items()))
        return (
            f"{self.kills.total()} kills -9 ({parts}); {self.unfinished_saves} left a save half done; "
            f"{self.ended_by_launcher} times the launcher had to end the others"
        )


def random_moment(draw: random.Random) -> str:
    """When to kill."""
    return draw.choices(MOMENTS, SHARES)[0]
