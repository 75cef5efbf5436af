"""Stage ``faults``: one of two processes is killed, or stops. The other must name it and end with 76, with NCCL as with gloo."""

from __future__ import annotations

import os
import re
import secrets
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import torch

from benchmarks.gpu.common import REPOSITORY, Context, Rows, Values, has_key, has_module, reason
from pipeline.errors import RANK_LOST

_FAULTS = {"killed (SIGKILL)": signal.SIGKILL, "stopped (SIGSTOP)": signal.SIGSTOP}
_SILENCE = 8  # seconds without a sign after which a rank is lost
_STEPS = 3  # before the fault


def measure(context: Context) -> Rows:
    if not context.miniature and torch.cuda.device_count() < 2:
        yield "two processes", {"skipped": "needs two GPUs, NCCL refuses two processes on one"}
        return
    missing = [name for name in ("deepspeed", "nvidia.dali") if not has_module(name)]
    if missing:
        yield "two processes", {"failed": f"{missing[0]} is not there"}
        return
    for name, number in list(_FAULTS.items())[: 1 if context.miniature else None]:
        try:
            yield f"rank 1 is {name}", after(context, name.partition(" ")[0], number)
        except Exception as error:
            yield f"rank 1 is {name}", {"failed": reason(error)}


def after(context: Context, name: str, number: signal.Signals) -> Values:
    """How rank 0 ends after rank 1 has received a signal in the middle of training."""
    run = context.work / "faults" / name
    run.mkdir(parents=True, exist_ok=True)
    ranks = start(context, run)
    try:
        metrics = run / "run" / "metrics.jsonl"
        while not metrics.exists() or len(metrics.read_text().splitlines()) < _STEPS:
            ended = [each.returncode for each in ranks if each.poll() is not None]
            if ended:
                raise RuntimeError(f"a process ended with code {ended[0]} before the fault: {said(run)}")
            time.sleep(0.2)
        began = time.monotonic()
        ranks[1].send_signal(number)
        code = ranks[0].wait()
        seconds = time.monotonic() - began
    finally:
        for each in ranks:
            each.kill()
            each.wait()
    return {
        "rank 0 ends with": code,
        "as it should": code == RANK_LOST,
        "names rank 1": "rank 1" in said(run),
        "after, s": seconds,
        "says": said(run)[-160:],
    }


def start(context: Context, folder: Path) -> list[subprocess.Popen]:
    """Two processes of a training, without a launcher that would end the second one by itself."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    words = [
        f"data.path={context.shards}",
        f"output_dir={folder / 'run'}",
        f"model.num_classes={context.classes}",
        "model.image_size=64",
        "train.global_batch_size=16",
        "train.micro_batch_size=8",
        "train.epochs=100000",
        "optim.warmup_epochs=1",
        "log.every_steps=1",
        "checkpoint.every_steps=1000000",
        "eval.every_epochs=null",
        f"distributed.silence_timeout={_SILENCE}",
    ]
    words += ["train.compile=off"] * has_key("train.compile")
    common = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    common |= {"PERVIT_JOB_SECRET": secrets.token_hex(32), "TORCH_CPP_LOG_LEVEL": "ERROR", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "pipeline.train", "--config", "configs/pervit_t.yaml", *words]
    ranks = []
    for rank in range(2):
        with open(folder / f"rank{rank}.log", "wb") as log:
            environment = {**os.environ, **common, "RANK": str(rank), "LOCAL_RANK": str(rank)}
            ranks.append(subprocess.Popen(command, cwd=REPOSITORY, env=environment, stdout=log, stderr=subprocess.STDOUT))
    return ranks


def said(folder: Path) -> str:
    """The end of rank 0's output, without progress."""
    lines = (folder / "rank0.log").read_text(errors="replace").splitlines()
    return " ".join(" ".join(line for line in lines if not re.search(r" step \d+/\d+ ", line)).split())[-600:]
