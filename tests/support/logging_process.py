"""Processes of a run that only write its log: what they log, and what happens meanwhile, is code that a test passes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from support.launching import PATIENCE, REPOSITORY, clean_environment

# One process of two that logs steps as training does. The scenario is code that may use run_dir, log, world and steps().
PROCESS = """
import os, shutil, subprocess, sys, time
from datetime import timedelta
from pathlib import Path
import torch
import torch.distributed as dist
from pipeline.config import config_from_dict
from pipeline.cluster.world import World
from pipeline.command_line import run_command
from pipeline.logs.run_files import write_run_files
from pipeline.logs.run_log import RunLog
from pipeline.metrics import record, recording
from pipeline.stream.schedule import Schedule

folder, rank, size = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
torch.set_num_threads(1)
meeting = f"file://{folder}/meeting"
dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=size, timeout=timedelta(seconds=60))
world = World(rank, size, torch.device("cpu"), 1)
run_dir = Path(folder) / "run"
config = config_from_dict(
    {"output_dir": str(run_dir), "train": {"precision": "fp32", "global_batch_size": 2, "micro_batch_size": 1}, "log": {"every_steps": 5},
     "checkpoint": {"retry_seconds": float(sys.argv[5])}},
    "a test",
)

schedule = Schedule(images=20, global_batch_size=2, epochs=10, max_steps=None)

def take(log, step, data=lambda: None, bad_samples=None, replaced=0):
    with recording() as metrics:
        began = time.perf_counter()
        data()
        record("data_wait", time.perf_counter() - began, reduce="slowest")
        record("replaced", replaced, reduce="sum")
        record("loss", torch.tensor(1.0 + step + rank))
        for name, value in {"lr": 0.1, "grad_norm": 0.5, "skipped_steps": 0}.items():
            record(name, value, reduce="max")
    log.step(step, metrics, bad_samples)

def steps(log, first, last, **more):
    for step in range(first, last + 1):
        take(log, step, **more)

def main():
    run_dir.mkdir(exist_ok=True)
    scenario = sys.argv[4]
    exec(scenario, globals())
    print("went on", flush=True)
    dist.destroy_process_group()  # with gloo still at work the interpreter may abort at its end

run_command(main)
"""

START = "log = RunLog(config, world, 0, schedule, 1.0); steps(log, 1, 5)\n"
MOUNT = "subprocess.run(['mount', '-t', 'tmpfs', '-o', 'size=2m', 'none', run_dir], check=True)\n"


def run_processes(
    folder: Path, scenario: str, processes: int = 1, mounts: bool = False, retry_seconds: float = 0
) -> list[tuple[int, str, str]]:
    """(exit code, stdout, stderr) of each process."""
    command = [*(["unshare", "--mount"] if mounts else []), sys.executable, "-c", PROCESS, str(folder)]
    (folder / "meeting").unlink(missing_ok=True)
    started = [
        subprocess.Popen(
            [*command, str(rank), str(processes), scenario, str(retry_seconds)],
            env=clean_environment(PYTHONPATH=str(REPOSITORY)),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(processes)
    ]
    ended = []
    for process in started:
        out, err = process.communicate(timeout=PATIENCE)
        ended.append((process.returncode, out, err))
    return ended


def error_of(ended: tuple[int, str, str]) -> str:
    """The one line of a process that stopped with a sentence."""
    code, out, err = ended
    lines = [line for line in err.splitlines() if line.startswith("error: ")]
    assert code == 2 and len(lines) == 1 and "went on" not in out and "Traceback" not in err, f"{code}\n{out}\n{err}"
    return lines[0]
