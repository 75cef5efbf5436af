"""Runs a case as processes of its own, with a time limit, and hands on its rows as they come."""

from __future__ import annotations

import json
import os
import secrets
import selectors
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path

import psutil

from benchmarks.gpu.cases import Case
from benchmarks.gpu.common import REPOSITORY, Context, Values

_TAIL = 1500  # characters of a log in a row
_ENDING = 20.0  # seconds in which the other ranks end after the first, and killed processes leave the GPU
_JOB = ("SLURM_", "RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_")  # how variables begin that are a job's


def run_case(case: Case, context: Context, world_size: int, seconds: float) -> Iterator[Values]:
    """Rows of a case, with all fields; if it crashed, or was not done within ``seconds``, the last one says so.

    Args:
        context: of the whole check.
        world_size: number of processes; the first one's rows are taken.
    """
    context = replace(context, stage=case.stage, options=case.options)
    base = {"stage": case.stage, "case": case.name, **case.options, "world_size": world_size}
    logs = [context.work / "logs" / f"{case.stage}-{case.name.replace('/', '-')}-{rank}.log" for rank in range(world_size)]
    logs[0].parent.mkdir(parents=True, exist_ok=True)
    ranks: list[subprocess.Popen] = []
    reading, writing = os.pipe()
    try:
        job = _job(world_size)
        for rank, log in enumerate(logs):
            place = job and {**job, "RANK": str(rank), "LOCAL_RANK": str(rank)}
            ranks.append(_start(case, context, place, writing if rank == 0 else None, log))
        os.close(writing)
        for line in _lines(reading, ranks, time.monotonic() + seconds):
            row = {**base, **json.loads(line)}
            yield row | {"log": tail(logs[0])} if "failed" in row else row
        crashed = [rank for rank, process in enumerate(ranks) if process.poll()]
        if crashed:
            which = f"rank {crashed[0]}" if world_size > 1 else "its process"
            how = _ending(ranks[crashed[0]].returncode)
            yield {**base, "failed": f"{which} ended with {how}", "log": tail(logs[crashed[0]])}
    except TimeoutError:
        yield {**base, "failed": f"cut at its limit of {seconds:.0f} s", "log": tail(logs[0])}
    finally:
        end(ranks)
        os.close(reading)


def _job(world_size: int) -> dict[str, str]:
    """Variables by which several processes find each other."""
    if world_size == 1:
        return {}
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    size = str(world_size)
    secret = {"PERVIT_JOB_SECRET": secrets.token_hex(32)}
    return {"WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, **secret}


def _start(case: Case, context: Context, place: dict[str, str], pipe: int | None, log: Path) -> subprocess.Popen:
    told = json.dumps({**asdict(context), "work": str(context.work)})
    environment = {key: value for key, value in os.environ.items() if not key.startswith(_JOB)}
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, [str(REPOSITORY), os.environ.get("PYTHONPATH")]))
    if not case.is_test:  # one case's kernels are found by the next
        cache = context.work / "cache"
        environment.update(
            XDG_CACHE_HOME=str(cache), TORCHINDUCTOR_CACHE_DIR=str(cache), TRITON_CACHE_DIR=str(cache / "triton")
        )
    environment.update(case.variables, **(case.on_cpu if context.miniature and not context.gpus else {}))
    with open(log, "wb") as output:
        return subprocess.Popen(
            [sys.executable, "-m", "benchmarks.gpu.worker", case.module, told, *([] if pipe is None else [str(pipe)])],
            cwd=REPOSITORY,
            env={**environment, **place},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            pass_fds=[] if pipe is None else [pipe],
            start_new_session=True,
        )


def _lines(pipe: int, ranks: Sequence[subprocess.Popen], deadline: float) -> Iterator[str]:
    """Whole lines until the first process has ended, or any has crashed; their own children may hold the pipe open beyond that.

    Raises:
        TimeoutError: the deadline has passed.
    """
    pending = b""
    with selectors.DefaultSelector() as selector:
        selector.register(pipe, selectors.EVENT_READ)
        while True:
            ended = ranks[0].poll() is not None or any(process.poll() for process in ranks)
            if time.monotonic() > deadline:
                raise TimeoutError
            if selector.select(0 if ended else 0.2):
                received = os.read(pipe, 1 << 16)
                *lines, pending = (pending + received).split(b"\n")
                yield from (line.decode() for line in lines)
                ended = not received
            if ended:
                break
    if not any(process.poll() for process in ranks):
        _wait(ranks, min(_ENDING, deadline - time.monotonic()))


def _wait(processes: Sequence[subprocess.Popen], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    for process in processes:
        with suppress(subprocess.TimeoutExpired):
            process.wait(max(0.1, deadline - time.monotonic()))


def end(processes: Sequence[subprocess.Popen]) -> None:
    """Kill processes and all that they have started, whatever process groups those are in."""
    for process in processes:
        everything = []
        with suppress(psutil.NoSuchProcess):
            everything = [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]
        for each in everything:
            with suppress(psutil.NoSuchProcess):
                each.kill()
    _wait(processes, _ENDING)  # not for ever: a driver may keep a process from ending


def _ending(code: int) -> str:
    """An exit code, or the name of the signal."""
    try:
        return signal.Signals(-code).name
    except ValueError:
        return f"code {code}"


def tail(log: Path) -> str:
    """The end of a process's output."""
    return log.read_text(errors="replace").strip()[-_TAIL:] if log.exists() else ""
