"""Measure what heartbeats cost rank 0 of a large job, and how soon it names a lost rank.

    python -m benchmarks.scale_control [--ranks 64 256 1024] [--seconds 10] [--silence 5]

Rank 0 is a real one: it hosts the store, and its ``Heartbeat`` reads and judges. The others are connections, one each, from a few
processes, which send the requests of a heartbeat once per second. Then one of them falls silent. Everything is on 127.0.0.1.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import resource
import secrets
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path

# The name server is none of what is measured, but PyTorch waits 5 seconds for a lost answer, and says so.
os.environ.update(OMP_NUM_THREADS="1", TORCH_CPP_LOG_LEVEL="ERROR", RES_OPTIONS="timeout:1 attempts:1")

import torch  # noqa: E402

from pipeline.cluster import (
    heartbeat,  # noqa: E402
    meeting,  # noqa: E402
)
from pipeline.cluster.beats import Beat, Board, Status  # noqa: E402
from pipeline.cluster.environment import SECRET  # noqa: E402
from pipeline.cluster.world import World  # noqa: E402
from pipeline.command_line import run_command  # noqa: E402
from pipeline.config import DistributedConfig  # noqa: E402
from pipeline.errors import UserError  # noqa: E402

PROCESSES = 8  # that the simulated ranks share
CONNECTING = 32  # connections that a process begins at once: PyTorch asks the name server for each
WARM_UP = 4.0  # seconds until every heartbeat has been read a few times
PATIENCE = 60.0  # seconds beyond silence_timeout
_SERVER = "pt_tcpstore_uv"  # PyTorch's name for the thread of its store


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[64, 256, 1024], metavar="N", help="default: 64 256 1024")
    parser.add_argument("--seconds", type=float, default=10, help="that the load is measured (default: 10)")
    parser.add_argument("--silence", type=float, default=5, help="distributed.silence_timeout (default: 5)")
    args = parser.parse_args()
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    for size in args.ranks:
        if not 8 <= size <= 4096:
            raise UserError(f"--ranks must be from 8 to 4096, got {size}", "choose another number")
        if limit != resource.RLIM_INFINITY and limit < 2 * size + 256:
            raise UserError(
                f"the limit of open files (ulimit -Hn) must be at least {2 * size + 256}, got {limit}", "choose fewer --ranks"
            )
    print(
        "| ranks | rank 0's Python per second | the store's thread | a beat of a simulated rank | named after silence_timeout and |\n|---|---|---|---|---|"
    )
    for size in args.ranks:
        print(measure(size, args.seconds, args.silence), flush=True)


def measure(size: int, seconds: float, silence: float) -> str:
    """Run rank 0 and ``size`` - 1 simulated ranks, then lose one of them; a row of the table, and the sentence that named it."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    os.environ.update({"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), SECRET: secrets.token_hex(32)})
    context = multiprocessing.get_context("fork")
    (pipe, end), others = context.Pipe(), []
    processes = [context.Process(target=_rank_0, args=(size, silence, end), daemon=True)]
    try:
        processes[0].start()
        assert pipe.recv() == "listening"
        for number in range(PROCESSES):
            near, far = context.Pipe()
            ranks = [rank for rank in range(1, size) if rank % PROCESSES == number]
            processes.append(context.Process(target=_others, args=(ranks, far), daemon=True))
            processes[-1].start()
            others.append(near)
        assert [other.recv() for other in others] == ["connected"] * PROCESSES
        pipe.send("begin")
        time.sleep(WARM_UP)
        before = _ask(pipe)
        time.sleep(seconds)
        reading, serving, passed = (now - then for now, then in zip(_ask(pipe), before, strict=True))
        others[0].send("lose the first")  # rank 8
        silent_from = others[0].recv()
        assert pipe.poll(silence + PATIENCE), "no verdict"
        sentence, named_at = pipe.recv()
        assert all(other.poll(PATIENCE) for other in others), "some ranks have not read the verdict"
        turn = max(other.recv() for other in others)
        return (
            f"| {size:,} | {1000 * reading / passed:.1f} ms | {serving / passed:.1%} of a core | {turn:.2f} s | {named_at - silent_from - silence:.1f} s |\n"
            f"\nerror: {sentence}\n"
        )
    finally:
        for process in processes:
            process.kill()
            process.join()


def _ask(pipe: Connection) -> tuple[float, float, float]:
    pipe.send("load")
    return pipe.recv()


def _rank_0(size: int, silence: float, pipe: Connection) -> None:
    """Process: a real rank 0 that trains nothing."""
    store = meeting._host_store(size, timedelta(seconds=60))
    pipe.send("listening")
    pipe.recv()
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # the sentence is printed with the table
    world = World(0, size, torch.device("cpu"), 1)
    beating = heartbeat.Heartbeat(world, DistributedConfig(silence_timeout=silence, progress_timeout=3600))
    announce, named_at = beating._announce, []

    def note(verdict: heartbeat.Verdict) -> None:
        named_at.append(time.monotonic())
        announce(verdict)

    beating._announce = note  # type: ignore[method-assign]
    beating.on_loss = lambda sentence, step: pipe.send((sentence, named_at[0]))
    step = 0
    while store:
        beating.at(step := step + 1, "training")
        if pipe.poll(0.1):
            pipe.recv()
            pipe.send(_load())


def _load() -> tuple[float, float, float]:
    """CPU seconds of this process's heartbeat thread, which holds the interpreter's lock, and of the store's; and the time."""
    beating = {thread.native_id for thread in threading.enumerate() if thread.name == "heartbeat"}
    reading = serving = 0.0
    for task in Path("/proc/self/task").iterdir():
        used = int((task / "schedstat").read_text().split()[0]) / 1e9  # nanoseconds on a CPU
        if int(task.name) in beating:
            reading += used
        elif (task / "comm").read_text().strip() == _SERVER[:15]:
            serving += used
    return reading, serving, time.monotonic()


def _others(ranks: list[int], pipe: Connection) -> None:
    """Process: its share of the simulated ranks, until all have read the verdict; tells the longest beat in seconds."""
    with ThreadPoolExecutor(CONNECTING) as pool:
        boards = dict(zip(ranks, map(Board, pool.map(lambda _: meeting.store_client(120), ranks)), strict=True))
    pipe.send("connected")
    number, longest, last = 0, 0.0, time.monotonic()
    while boards:
        number, began = number + 1, time.monotonic()
        for place, (rank, board) in enumerate([*boards.items()]):
            board.write(Beat(rank, "node0001.cluster", 10_000 + rank, number, number, "training", 3))
            last = time.monotonic() if rank == ranks[0] else last
            if board.read([0])[0].status is Status.VERDICT:
                board.write(Beat(rank, number=number + 1, status=Status.INFORMED))
                del boards[rank]
            time.sleep(max(0.0, began + heartbeat.BEAT * (place + 1) / len(ranks) - time.monotonic()))
        longest = max(longest, time.monotonic() - began)
        if pipe.poll() and pipe.recv():
            del boards[ranks[0]]
            pipe.send(last)
    pipe.send(longest)


if __name__ == "__main__":
    run_command(main)
