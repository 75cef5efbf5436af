"""Simulated ranks for ``benchmarks/scale_control.py``: the requests of thousands of heartbeats, against a real rank 0.

Rank 0 is the real one: it hosts the store, and its ``Heartbeat`` reads and judges. The others are connections, one each, from a
few processes, which send the requests of ``Heartbeat._follow`` once per beat. Then one of them falls silent.
"""

from __future__ import annotations

import multiprocessing
import os
import socket
import statistics
import struct
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from pipeline.config import DistributedConfig
from pipeline.distributed import rendezvous
from pipeline.distributed.signing import job_secret
from pipeline.distributed.world import World
from pipeline.faults import heartbeat
from pipeline.faults.lost_ranks import Sign, Status
from pipeline.faults.notices import _VERDICT, Notices, _key
from pipeline.faults.relay import Relay

PROCESSES = 8  # that the simulated ranks share
CONNECTING = 32  # connections that a process begins at once
WARM_UP = 4.0  # seconds until every sign has been read a few times
_SERVER = "pt_tcpstore_uv"  # PyTorch's name for the thread of its store
_TCP_INFO_BYTES = struct.Struct("=120xQQ")  # linux/tcp.h: tcpi_bytes_acked, tcpi_bytes_received


@dataclass
class Signs:
    """What was measured with ``size`` ranks, per second unless it says something else."""

    size: int
    connecting: float  # seconds until all were connected to the store
    beat: float  # seconds between two signs of a simulated rank: more than 1 shows that this machine was too slow for them
    requests: float
    rank_0_requests: float
    rank_0_beats: float
    received: float  # bytes by the store's process
    sent: float
    reading: float  # CPU seconds of rank 0's heartbeat thread, which holds the interpreter's lock
    serving: float  # CPU seconds of the store's thread
    files: int  # open in rank 0
    named: float  # seconds from the last sign of a lost rank until rank 0 named it, less silence_timeout
    informed: float  # seconds from there until the last rank had read it
    sentence: str


class Counted:
    """A store's client that counts its requests."""

    def __init__(self, store: Any) -> None:
        self._store, self.requests = store, 0

    def __getattr__(self, name: str) -> Any:
        self.requests += 1
        return getattr(self._store, name)


def simulate(size: int, seconds: float, silence: float) -> Signs:
    """Run rank 0 and ``size`` - 1 simulated ranks, then lose one of them.

    Args:
        size: the world size.
        seconds: that the load is measured.
        silence: ``distributed.silence_timeout``.
    """
    context = multiprocessing.get_context("fork")
    pipe, far = context.Pipe()
    first = context.Process(target=_rank_0, args=(size, silence, far), daemon=True)
    first.start()
    others, pipes = [], []
    try:
        assert pipe.recv() == "listening"
        began = time.monotonic()
        for number in range(PROCESSES):
            near, end = context.Pipe()
            others.append(context.Process(target=_others, args=(number, size, end), daemon=True))
            others[-1].start()
            pipes.append(near)
        assert [each.recv() for each in pipes] == ["connected"] * PROCESSES
        connecting = time.monotonic() - began
        pipe.send("begin")
        time.sleep(WARM_UP)
        before, requests = _ask(pipe, "load"), sum(_ask(each, "requests") for each in pipes)
        time.sleep(seconds)
        after, requests = _ask(pipe, "load"), sum(_ask(each, "requests") for each in pipes) - requests
        passed = after["at"] - before["at"]
        rate = {name: (after[name] - before[name]) / passed for name in before}
        for each in pipes:
            each.send(("lose", victim(size)))
        silent_from = max(each.recv() for each in pipes)
        patience = silence + 60
        assert pipe.poll(patience), f"no verdict after {patience:g} s"
        sentence, named_at = pipe.recv()
        seen, beats = [], []
        for each in pipes:
            assert each.poll(patience), "some ranks have not read the verdict"
            last, beat = each.recv()
            seen.append(last)
            beats.append(beat)
        return Signs(
            size, connecting, statistics.mean(beats), requests / passed + rate["requests"], rate["requests"], rate["beats"], rate["received"],
            rate["sent"], rate["reading"], rate["serving"], after["files"], named_at - silent_from - silence,
            max(seen) - named_at, sentence,
        )  # fmt: skip
    finally:
        for process in [first, *others]:
            process.kill()
            process.join()


def victim(size: int) -> int:
    """The rank that falls silent."""
    return size // 2 + 1


def _ask(pipe: Connection, what: str) -> Any:
    pipe.send((what, 0))
    return pipe.recv()


def _rank_0(size: int, silence: float, pipe: Connection) -> None:
    """Process: a real rank 0 that trains nothing."""
    store = rendezvous._host_store(size, timedelta(seconds=60))
    clients: list[Counted] = []
    client = heartbeat.store_client
    heartbeat.store_client = lambda timeout: clients.append(Counted(client(timeout))) or clients[-1]  # type: ignore[assignment,func-returns-value]
    pipe.send("listening")
    pipe.recv()  # as after `init_world`: all have come
    world = World(0, size, torch.device("cpu"), 1)
    beating = heartbeat.Heartbeat(world, DistributedConfig(silence_timeout=silence, progress_timeout=3600))
    beating.on_loss = lambda sentence, step: pipe.send((sentence, named_at[0]))
    announce, named_at, observe, beats = beating._announce, [0.0], beating._observe, [0]

    def count(*given: Any) -> None:
        beats[0] += 1
        observe(*given)

    beating._observe = count  # type: ignore[method-assign]

    def note(verdict: Any) -> None:
        named_at[0] = named_at[0] or time.monotonic()
        announce(verdict)

    beating._announce = note  # type: ignore[method-assign]
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # the sentence is printed with the table
    step = 0
    while store:
        beating.at(step := step + 1, "training")
        if pipe.poll(0.1):
            pipe.recv()
            pipe.send({**_load(clients), "beats": beats[0]})


def _load(clients: list[Counted]) -> dict[str, float]:
    """What this process, rank 0, has used so far."""
    seconds = dict.fromkeys(("reading", "serving"), 0.0)
    beating = {thread.native_id for thread in threading.enumerate() if thread.name == "heartbeat"}
    for task in Path("/proc/self/task").iterdir():
        used = int((task / "schedstat").read_text().split()[0]) / 1e9  # nanoseconds on a CPU
        if int(task.name) in beating:
            seconds["reading"] += used
        elif (task / "comm").read_text().strip() == _SERVER[:15]:
            seconds["serving"] += used
    sent, received = map(sum, zip(*traffic(), strict=True))
    files = len(os.listdir("/proc/self/fd"))
    requests = sum(client.requests for client in clients)
    return {**seconds, "sent": sent, "received": received, "files": files, "requests": requests, "at": time.monotonic()}


def traffic() -> Iterator[tuple[int, int]]:
    """Bytes sent and received on each connection to the store that this process hosts."""
    own = int(os.environ["MASTER_PORT"])
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError), socket.socket(fileno=os.dup(int(name))) as connection:
            inet = connection.family in (socket.AF_INET, socket.AF_INET6) and connection.type == socket.SOCK_STREAM
            if inet and connection.getsockname()[1] == own:
                info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO_BYTES.size)
                if len(info) == _TCP_INFO_BYTES.size:
                    yield _TCP_INFO_BYTES.unpack(info)


def _others(number: int, size: int, pipe: Connection) -> None:
    """Process: its share of the simulated ranks."""
    part = Part([rank for rank in range(1, size) if rank * PROCESSES // size == number], size)
    part.connect()
    pipe.send("connected")
    threading.Thread(target=part.beat, daemon=True).start()
    while not part.done:
        if pipe.poll(0.05):
            what, value = pipe.recv()
            if what == "requests":
                pipe.send(part.requests)
            else:
                part.lost = value
                time.sleep(3 * heartbeat.BEAT)  # until its turn has come and gone
                pipe.send(part.silent_from)
    pipe.send((part.seen_at, statistics.mean(part.turns)))


class Part:
    """Simulated ranks of one process.

    Attributes:
        lost: a rank that is to fall silent.
        silent_from: when it, if it is one of these, sent its last sign.
        seen_at: when the last of these had read the verdict.
        turns: seconds between two signs of each.
        done: whether all have read the verdict.
    """

    def __init__(self, ranks: list[int], size: int) -> None:
        self._ranks, self._size, self.lost = ranks, size, -1
        self._clients: list[tuple[int, Counted, Notices, Relay]] = []
        self.turns: list[float] = []
        self.silent_from = self.seen_at = 0.0
        self.done = False

    def connect(self) -> None:
        # Many at once: PyTorch asks the name server for every address that it connects to, and waits for the answer.
        with ThreadPoolExecutor(CONNECTING) as pool:
            stores = [Counted(store) for store in pool.map(lambda _: rendezvous.store_client(120), self._ranks)]
        for rank, store in zip(self._ranks, stores, strict=True):
            notices = Notices(store, job_secret(), rank)  # type: ignore[arg-type]
            self._clients.append((rank, store, notices, Relay(notices, rank, self._size)))

    @property
    def requests(self) -> int:
        return sum(client.requests for _, client, *_ in self._clients)

    def beat(self) -> None:
        """Thread: the signs of all ranks once per beat, spread over it, until all have read the verdict."""
        informed: set[int] = set()
        beat, began, last_sign = 0, time.monotonic(), 0.0
        while len(informed) < len(self._clients) - (self.lost in self._ranks):
            beat += 1
            for place, (rank, store, notices, relay) in enumerate(self._clients):
                if rank == self.lost:
                    self.silent_from = last_sign
                elif rank not in informed and _turn(rank, beat, store, notices, relay):
                    informed.add(rank)
                    self.seen_at = time.monotonic()
                if rank == victim(self._size) != self.lost:
                    last_sign = time.monotonic()
                time.sleep(max(0.0, began + heartbeat.BEAT * (place + 1) / len(self._clients) - time.monotonic()))
            self.turns.append(time.monotonic() - began)
            began = time.monotonic()
        self.done = True


def _turn(rank: int, beat: int, store: Counted, notices: Notices, relay: Relay) -> bool:
    """The requests of a beat of ``Heartbeat._follow``.

    Returns:
        Whether there is a verdict.
    """

    def sign(status: Status) -> Sign:
        return Sign(rank, "node0001.cluster", 10_000 + rank, beat, beat, "training", 3, status)

    notices.write_sign(sign(Status.RUNNING))
    relay.pass_on(beat)
    keys = [_VERDICT, _key(0)]
    if not store.check(keys):
        return False
    verdict, _ = store.multi_get(keys)
    if verdict:
        beat += 1
        notices.write_sign(sign(Status.INFORMED))
        notices.wait_until_written()
    return bool(verdict)
