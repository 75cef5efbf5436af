"""A small program instead of the training: ``ring STEPS FAULT RANK FOLDER``, all ranks add up a number, step by step.

FAULT happens to RANK at step 30: "hang" while reading data, "hold the lock" of the interpreter for ever, "err" with a
UserError, "leave late" after the others' end; "none" leaves it to the caller. Each rank writes its pid and step into FOLDER.
"""

from __future__ import annotations

import ctypes
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

os.environ.update(CUDA_VISIBLE_DEVICES="", DS_ACCELERATOR="cpu")  # before the imports that look for a GPU

import deepspeed  # noqa: E402, F401  here, so that processes forked from one that imported this module have it ready
import torch  # noqa: E402

from pipeline.cluster.beats import Beat, Board  # noqa: E402
from pipeline.cluster.heartbeat import Heartbeat  # noqa: E402
from pipeline.cluster.meeting import store_client  # noqa: E402
from pipeline.cluster.rendezvous import disconnect, init_world  # noqa: E402
from pipeline.cluster.world import World
from pipeline.command_line import run_command  # noqa: E402
from pipeline.config import DistributedConfig  # noqa: E402
from pipeline.errors import UserError  # noqa: E402

LIMITS = DistributedConfig(silence_timeout=5, progress_timeout=5)
FAULT_STEP = 30


def go_round(steps: int, fault: str, victim: int, folder: Path) -> None:
    """What each rank does."""
    world = init_world()
    fault = fault if world.rank == victim else "none"
    with Heartbeat(world, LIMITS, folder) as heartbeat:
        for step in range(1, steps + 1):
            heartbeat.at(step, "reading data")
            if step == FAULT_STEP and fault == "hang":
                time.sleep(600)
            if step == FAULT_STEP and fault == "hold the lock":
                ctypes.PyDLL(None).sleep(600)
            if step == FAULT_STEP and fault == "err":
                raise UserError("the disk is full: free some space.")
            time.sleep(0.05)
            heartbeat.at(step, "training")
            assert world.sum(torch.ones(1)).item() == world.size
            if step == FAULT_STEP - 1:
                hear_each_other(world, heartbeat, step)
            note = folder / f"{world.rank}.new"
            note.write_text(f"{os.getpid()} {step}")
            note.rename(folder / f"{world.rank}.at")
        if fault == "leave late":
            time.sleep(2.5)
    disconnect()


def hear_each_other(world: World, heartbeat: Heartbeat, step: int) -> None:
    """Wait until every rank has sent a heartbeat from one of the steps, and read the others': a fault before that has no step to name."""
    board = Board(store_client(60))

    def wait_for(condition: Callable[[Beat], bool]) -> list[int]:
        while not all(map(condition, beats := board.read(range(world.size)))):
            heartbeat.at(step, "training")
            time.sleep(0.05)
        return [beat.number for beat in beats]

    numbers = wait_for(lambda beat: beat.step > 0)
    wait_for(lambda beat: beat.number >= numbers[beat.rank] + 2)  # the beat between has sent and read after all had a step


def forked_rank(environment: dict[str, str], steps: int, fault: str, victim: int, folder: Path) -> None:
    """A rank in a process made by ``multiprocessing``, with its stderr in a file."""
    os.environ.update(environment)
    os.dup2(os.open(folder / f"{environment['RANK']}.stderr", os.O_WRONLY | os.O_CREAT), 2)
    run_command(lambda: go_round(steps, fault, victim, folder))


if __name__ == "__main__":
    run_command(lambda: go_round(int(sys.argv[1]), sys.argv[2], int(sys.argv[3]), Path(sys.argv[4])))
