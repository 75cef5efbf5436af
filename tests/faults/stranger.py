"""Somebody on the network who is not of the job: ``stranger HOW PORT FILE``.

HOW it joins, as rank 1 of 2 before the real one: ``sum``: it tells rank 0, who asks all whether one has met an error, that one has,
and answers what follows with a pickle that makes FILE when it is read (rank 0 ran it while it gathered pickles); ``pickle``:
that is its answer to the first question; ``json``: it speaks as the pipeline does, but has no secret. ``overwrite`` says in the
name of rank 1, and as rank 0's verdict, that the run has ended with exit code 0, shows old heartbeats again, deletes them and writes
nonsense, three times and until FILE exists. ``end`` says once in the name of rank 1 that it has ended with exit code 2, which is valid.
"""

from __future__ import annotations

import json
import os
import pickle
import sys
import time
from contextlib import suppress
from datetime import timedelta

import torch
import torch.distributed as dist

PATIENCE = timedelta(seconds=60)
ESCAPES = "\x1b[2J\x1b]0;owned\x07"
ENDED = [1, "stranger", 1, 10**6, 1, "training", 0, "ended", f"all is well {ESCAPES}", 0, []]  # see pipeline/cluster/beats.py
VERDICT = [0, "stranger", 1, 10**6, 1, "training", 0, "verdict", f"the run is done {ESCAPES}", 0, []]
NONSENSE = ("", "[]", "null", '{"rank": "1"}', "[" * 5000, "9" * 5000, "x" * 1_000_000)


class Pickle:
    """Runs a command where it is read."""

    def __init__(self, file: str) -> None:
        self.file = file

    def __reduce__(self) -> tuple:
        return os.system, (f"touch '{self.file}'",)


def join(how: str, port: int, file: str) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=1, world_size=2, timeout=PATIENCE)
    print("joined as rank 1", flush=True)
    if how == "json":
        for answer in ("0" * 32, "0" * 64):
            send(json.dumps(answer).encode())
    if how == "sum":
        dist.all_reduce(torch.tensor(1.0))
    send(pickle.dumps(Pickle(file)))


def send(data: bytes) -> None:
    """As ``all_gather_object`` sends an object, and as the pipeline sends text; what comes back is not read."""
    sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(2)]
    dist.all_gather(sizes, torch.tensor([len(data)]))
    message = torch.zeros(int(max(sizes)), dtype=torch.uint8)
    message[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    dist.all_gather([torch.empty_like(message) for _ in range(2)], message)


def end(store: dist.TCPStore) -> None:
    valid = [*ENDED[:-2], 2, []]
    # As fast as it can: ranks that started together beat in step, so that rank 1 overwrites it just before rank 0 reads.
    deadline = time.monotonic() + PATIENCE.total_seconds() / 2
    with suppress(RuntimeError):  # rank 0 has ended, and its store with it
        while time.monotonic() < deadline:
            store.set("heartbeat/1", json.dumps(valid))


def overwrite(store: dist.TCPStore, file: str) -> None:
    old = store.get("heartbeat/1")
    turn = 0
    while turn < 3 or not os.path.exists(file):
        for _ in range(40 if turn == 0 else 3):
            store.set("heartbeat/1", json.dumps(ENDED))
            store.set("heartbeat/0", json.dumps(VERDICT))
            time.sleep(0.05)
        for key in ("heartbeat/0", "heartbeat/1"):
            store.set(key, NONSENSE[turn % len(NONSENSE)])
        time.sleep(0.1)
        store.set("heartbeat/1", old)
        time.sleep(0.1)
        for key in ("heartbeat/0", "heartbeat/1"):
            store.delete_key(key)
        time.sleep(0.1)
        turn += 1
    print(f"{turn} turns", flush=True)


if __name__ == "__main__":
    how, port, last = sys.argv[1:]
    if how in ("overwrite", "end"):
        store = dist.TCPStore("127.0.0.1", int(port), is_master=False, wait_for_workers=False, timeout=PATIENCE)
        overwrite(store, last) if how == "overwrite" else end(store)
    else:
        join(how, int(port), last)
