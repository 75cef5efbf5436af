"""A small program in place of the training: ``ring.py STEPS FAULT RANK FOLDER``, all ranks add a number up, step by step.

FAULT happens to RANK at step 5: "hangs" while reading data, "errs" with a UserError, "finishes-late" after the others;
"none" leaves it to the caller. Each rank writes its pid and its latest step into FOLDER.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import torch

from pipeline.config import DistributedConfig
from pipeline.distributed import disconnect, init_world
from pipeline.errors import UserError, run_command
from pipeline.heartbeat import Heartbeat


def main() -> None:
    steps, fault, victim, folder = int(sys.argv[1]), sys.argv[2], int(sys.argv[3]), Path(sys.argv[4])
    world = init_world()
    me = world.rank == victim
    config = DistributedConfig(silence_timeout=5, progress_timeout=5)
    with Heartbeat(world, config) as heartbeat:
        for step in range(1, steps + 1):
            heartbeat.at(step, "reading data")
            if step == 5 and me and fault == "hangs":
                time.sleep(600)
            if step == 5 and me and fault == "errs":
                raise UserError("the disk is full: free some space.")
            time.sleep(0.02)
            heartbeat.at(step, "training")
            assert world.sum(torch.ones(1)).item() == world.size
            note = folder / f"{world.rank}.new"
            note.write_text(f"{os.getpid()} {step}")
            note.rename(folder / str(world.rank))
        if me and fault == "finishes-late":
            time.sleep(2.5)
    disconnect()


if __name__ == "__main__":
    run_command(main)
