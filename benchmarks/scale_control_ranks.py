"""Real processes for ``benchmarks/scale_control.py``: start, agreement, a checkpoint, and the loss of one of them.

Each is forked from a process that has imported everything, and trains a toy model with the heartbeat, the agreement and the saver
of a run. Then one is killed.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import re
import secrets
import signal
import statistics
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

os.environ.update(CUDA_VISIBLE_DEVICES="", DS_ACCELERATOR="cpu")  # before the imports that look for a GPU

# Here, so that processes forked from one that has imported this module have it ready; DeepSpeed imports the last three late.
import deepspeed  # noqa: E402, F401
import deepspeed.runtime.zero.muon.muon_optimizer  # noqa: E402, F401
import functorch.compile  # noqa: E402, F401
import setuptools  # noqa: E402, F401
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402

import benchmarks.checkpoint  # noqa: E402
from benchmarks.scale_control_signs import traffic  # noqa: E402
from pipeline.config import DistributedConfig, load_config  # noqa: E402
from pipeline.distributed import agreement as agreements  # noqa: E402
from pipeline.distributed.world import init_world  # noqa: E402
from pipeline.faults.heartbeat import Heartbeat  # noqa: E402

EXCHANGES, STEPS = 30, 2
TOY = (  # 0.2 million parameters, 2 MB per checkpoint
    "model.switches={widths: [16, 16, 16, 16]}", "model.image_size=32", "train.micro_batch_size=1", "train.zero_stage=2",
    "train.ema_decay=null", "checkpoint.keep_last=1", "augment.mixup=0", "augment.cutmix=0", "log.every_steps=1",
)  # fmt: skip
_CONFIG = Path(__file__).parent.parent / "configs" / "pervit_t.yaml"
_PATIENCE = 400.0  # seconds for all ranks to come as far as the loss of one


@dataclass
class Ranks:
    """What was measured with ``size`` processes: medians over them, the slowest where it says so."""

    size: int
    start: dict[str, float]  # part of the start -> seconds of the slowest rank
    files: tuple[int, int]  # open in rank 0, in the others
    keys: int  # of the store
    sent: int  # bytes by the store's process during the start
    exchange: float  # seconds of an exchange that is waited for
    exchange_cpu: float  # CPU seconds of a process for it
    flat_exchange: float  # the same two as one group, however many ranks
    flat_exchange_cpu: float
    stall: float  # seconds of training that a save takes, of the slowest
    published: float  # seconds until the checkpoint has its name, of the slowest
    checkpoint_files: int
    manifest: int  # bytes
    checkpoint_bytes: int
    named: float  # seconds from SIGKILL until the last process has ended
    sentences: int  # different ones that the others have printed; one is right
    sentence: str


def measure(size: int, silence: float) -> Ranks:
    """Run ``size`` processes and kill one of them.

    Args:
        size: the world size.
        silence: ``distributed.silence_timeout``.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["benchmarks.scale_control_ranks"])
    with tempfile.TemporaryDirectory(prefix="scale-control-") as name:
        folder = Path(name)
        environment = {"WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}
        environment["PERVIT_JOB_SECRET"] = secrets.token_hex(32)
        processes = []
        for rank in range(size):
            own = {key: str(value) for key, value in {**environment, "RANK": rank, "LOCAL_RANK": rank}.items()}
            processes.append(context.Process(target=_rank, args=(own, folder, silence), daemon=True))
            processes[-1].start()
        try:
            return _watch(folder, size, processes)
        finally:
            for process in processes:
                process.kill()
                process.join()


def free_port() -> int:
    """One that nobody listens at now."""
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _watch(folder: Path, size: int, processes: list) -> Ranks:
    deadline = time.monotonic() + _PATIENCE
    while len(list(folder.glob("*.json"))) < size:
        assert time.monotonic() < deadline, "not all processes came to their first steps"
        ended = [rank for rank, process in enumerate(processes) if not process.is_alive()]
        assert not ended, f"rank {ended[0]} has ended: {_stderr(folder, ended[0])}"
        time.sleep(0.05)
    time.sleep(3)  # a few beats from this place
    victim = size // 2 + 1
    processes[victim].kill()
    killed = time.monotonic()
    for process in processes:
        process.join(max(0.0, killed + _PATIENCE - time.monotonic()))
    named = time.monotonic() - killed
    # Each prints its own process's errors too: the sentence is the line that begins as the heartbeat's does.
    lines = [re.search("^error: .*$", _stderr(folder, rank), re.MULTILINE) for rank in range(size) if rank != victim]
    # The seconds of silence are each reader's own where rank 0 is judged; here rank 0 has judged.
    sentences = {line[0] if line else "nothing" for line in lines}
    rows = [json.loads((folder / f"{rank}.json").read_text()) for rank in range(size)]
    (saved,) = folder.glob("checkpoints/step-*")
    sizes = {path.name: path.stat().st_size for path in saved.iterdir()}

    def median(name: str) -> float:
        return statistics.median(row[name] for row in rows)

    return Ranks(
        size, {part: max(row["start"][part] for row in rows) for part in rows[0]["start"]},
        (rows[0]["files"], max(row["files"] for row in rows[1:])), rows[0]["keys"], rows[0]["sent"],
        median("exchange"), median("exchange_cpu"), median("flat_exchange"), median("flat_exchange_cpu"),
        max(row["stall"] for row in rows), max(row["published"] for row in rows), len(sizes), sizes["checkpoint.json"],
        sum(sizes.values()), named, len(sentences), min(sentences),
    )  # fmt: skip


def _stderr(folder: Path, rank: int) -> str:
    return (folder / f"{rank}.stderr").read_text()


def _rank(environment: dict[str, str], folder: Path, silence: float) -> None:
    """Process: a rank from its start to its end."""
    os.environ.update(environment)
    rank, size = int(environment["RANK"]), int(environment["WORLD_SIZE"])
    os.dup2(os.open(folder / f"{rank}.stderr", os.O_WRONLY | os.O_CREAT), 2)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parts = [("", time.monotonic())]
    world = init_world(600)
    parts.append(("rendezvous", time.monotonic()))
    with Heartbeat(world, DistributedConfig(silence_timeout=silence, progress_timeout=600)) as heartbeat:
        heartbeat.at(0, "starting")
        agreement = agreements.Agreement(600)
        parts.append(("agreement", time.monotonic()))
        config = load_config(_CONFIG, [*TOY, f"train.global_batch_size={size}"])
        benchmarks.checkpoint.Agreement = lambda: agreement  # type: ignore[assignment,misc]
        training = benchmarks.checkpoint.Training(config, world, folder)
        parts.append(("engine and saver", time.monotonic()))
        files, keys = len(os.listdir("/proc/self/fd")), dist.distributed_c10d._get_default_store().num_keys()
        sent = sum(own for own, _ in traffic())
        start = {name: at - parts[number][1] for number, (name, at) in enumerate(parts[1:])}
        measured = _exchanges(training.agreement)
        flat = _exchanges(agreements.Agreement(600, flat=size)) if hasattr(agreements, "FLAT") else measured
        for step in range(1, STEPS + 1):
            heartbeat.at(step, "training")
            training.step()
        world.barrier()
        began = time.monotonic()
        training.save()
        stall = time.monotonic() - began
        training.saver.finish()
        published = time.monotonic() - began
        world.barrier()
        row = {
            "start": start, "files": files, "keys": keys, "sent": sent, "stall": stall, "published": published, "exchange": measured[0],
            "exchange_cpu": measured[1], "flat_exchange": flat[0], "flat_exchange_cpu": flat[1],
        }  # fmt: skip
        note = folder / f"{rank}.new"
        note.write_text(json.dumps(row))
        note.rename(folder / f"{rank}.json")
        step = STEPS
        while True:
            step += 1
            heartbeat.at(step, "training")
            assert world.sum(torch.ones(1)).item() == world.size
            time.sleep(0.2)


def _exchanges(agreement: agreements.Agreement) -> tuple[float, float]:
    """Seconds, and CPU seconds of this process, of an exchange whose result is waited for."""
    agreement.exchange()
    agreement.exchange()
    began, cpu = time.monotonic(), time.process_time()
    for _ in range(EXCHANGES):
        agreement.exchange()
    return (time.monotonic() - began) / EXCHANGES, (time.process_time() - cpu) / EXCHANGES
