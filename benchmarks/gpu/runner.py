"""Runs a stage as a process of its own, with a time limit, and hands on its rows as they come."""

from __future__ import annotations

import os
import selectors
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil

from benchmarks.gpu.common import REPOSITORY
from benchmarks.gpu.stages import Stage

_TAIL = 300  # characters of a log in a row


def run_stage(stage: Stage, work: Path, miniature: bool, seconds: float) -> Iterator[str]:
    """Rows of a stage as lines of JSON. A stage that ends early, or not within ``seconds``, raises.

    Raises:
        TimeoutError: it was killed at its limit; the rows before are given.
        ChildProcessError: it ended without a word, as after a signal.
    """
    reading, writing = os.pipe()
    command = [sys.executable, "-m", "benchmarks.gpu.worker", stage.name, str(work), str(writing)]
    log = work / f"{stage.name}.log"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, [str(REPOSITORY), os.environ.get("PYTHONPATH")]))}
    if miniature:
        environment.update(CUDA_VISIBLE_DEVICES="", OMP_WAIT_POLICY="PASSIVE")  # spinning threads slow a busy machine tenfold
    environment.update(stage.variables, **(stage.in_miniature if miniature else {}))
    with open(log, "wb") as output:
        process = subprocess.Popen(
            command + ["--miniature"] * miniature,
            cwd=REPOSITORY,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            pass_fds=[writing],
            start_new_session=True,
        )
    os.close(writing)
    try:
        yield from _lines(reading, process, time.monotonic() + seconds)
        if process.wait() != 0:
            raise ChildProcessError(f"it ended with code {process.returncode}: {tail(log)}")
    except (TimeoutError, subprocess.TimeoutExpired):
        raise TimeoutError(f"cut at its limit of {seconds:.0f} s") from None
    finally:
        end(process)
        os.close(reading)


def _lines(pipe: int, process: subprocess.Popen, deadline: float) -> Iterator[str]:
    """Whole lines until the process has ended; its own children may hold the pipe open beyond that."""
    pending = b""
    with selectors.DefaultSelector() as selector:
        selector.register(pipe, selectors.EVENT_READ)
        while True:
            ended = process.poll() is not None
            if time.monotonic() > deadline:
                raise TimeoutError
            if not selector.select(0 if ended else 0.2):
                if ended:
                    return
                continue
            received = os.read(pipe, 1 << 16)
            if not received:
                process.wait(max(0.1, deadline - time.monotonic()))
                return
            *lines, pending = (pending + received).split(b"\n")
            yield from (line.decode() for line in lines)


def end(process: subprocess.Popen) -> None:
    """Kill a process and all that it has started, whatever process groups those are in."""
    try:
        everything = [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]
    except psutil.NoSuchProcess:
        everything = []
    for each in everything:
        try:
            each.kill()
        except psutil.NoSuchProcess:
            continue
    process.wait()


def tail(log: Path) -> str:
    """The end of a stage's output in one line."""
    return " ".join(log.read_text(errors="replace").split())[-_TAIL:] if log.exists() else ""
