"""The terminal is closed, or the launcher is killed: nothing is lost and no process stays."""

from __future__ import annotations

import os
import pty
import select
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from pipeline.checkpoint.folder import latest_step
from support.launching import PATIENCE, REPOSITORY, clean_environment
from support.runs import step_rows
from support.small_run import SMALL_MODEL

pytestmark = pytest.mark.multiprocess

# In place of a training: it prints all the time, and when a signal asks it to end it saves.
TOY = """
import sys, time
from pathlib import Path
from pipeline.cluster.environment import StopSignal
from pipeline.logs import console

folder = Path(sys.argv[1])
console.outlive_the_terminal()
with StopSignal() as stop:
    for step in range(30000):
        print(f"step {step}", flush=True)
        print(f"progress {step}", file=sys.stderr, flush=True)
        (folder / "step").write_text(str(step))
        time.sleep(0.005)
        if stop.received:
            break
    print("saving", flush=True)
    (folder / "saved").write_text(str(stop.received))
sys.exit(75)
"""


def processes_of(folder: Path) -> list[int]:
    """Those that have the folder's name on their command line."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):  # ended meanwhile
            if os.fsencode(folder) in path.read_bytes():
                found.append(int(path.parent.name))
    return found


def wait_until(happened: Callable[[], object], what: str, patience: float = PATIENCE) -> None:
    deadline = time.monotonic() + patience
    while not happened():
        assert time.monotonic() < deadline, f"still not: {what}"
        time.sleep(0.05)


@contextmanager
def terminal(command: str, folder: Path) -> Iterator[Callable[[], None]]:
    """A command typed into a shell in a terminal of its own; what is given closes it, as a window is closed."""
    pid, master = pty.fork()
    if pid == 0:
        os.chdir(REPOSITORY)
        os.execve("/bin/bash", ["bash", "--norc", "--noprofile", "-i"], clean_environment(PYTHONPATH=str(REPOSITORY)))
    closed = threading.Event()

    def read() -> None:  # a terminal that nobody reads from stops whoever writes
        with suppress(OSError):
            while not closed.is_set():
                if select.select([master], [], [], 0.05)[0] and not os.read(master, 65536):
                    break
        os.close(master)

    reader = threading.Thread(target=read)
    reader.start()
    os.write(master, f" stty cols 120; {command}\n".encode())  # without a width no progress bar is drawn
    try:
        yield closed.set
    finally:
        closed.set()
        for process in processes_of(folder):
            with suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        reader.join()


def toy(folder: Path) -> tuple[str, Callable[[], int]]:
    """The command that runs the toy, and how far it has come."""
    program = folder / "toy.py"
    program.write_text(TOY)
    step = folder / "step"
    return shlex.join([sys.executable, str(program), str(folder)]), lambda: int(step.read_text() or 0) if step.exists() else 0


@pytest.mark.parametrize("how", ["{}", "{} | tee {folder}/log"])
def test_closed_terminal(how: str, tmp_path: Path) -> None:
    """Guards against a print into a terminal, or a pipe to a program, that is gone: an error in the place of the save."""
    command, step = toy(tmp_path)
    with terminal(how.format(command, folder=tmp_path), tmp_path) as close:
        wait_until(lambda: step() > 10, "under way")
        close()
        wait_until(lambda: not processes_of(tmp_path), "at its end")
    assert (tmp_path / "saved").read_text() == str(int(signal.SIGHUP))


def test_nohup(tmp_path: Path) -> None:
    """Guards against a training that ends with its terminal although it was told not to."""
    command, step = toy(tmp_path)
    with terminal(f"nohup {command} >&2", tmp_path) as close:  # stdout too is the terminal: nohup would take a file
        wait_until(lambda: step() > 10, "under way")
        close()
        before = step()
        wait_until(lambda: step() > before + 100, "going on")
        (process,) = [pid for pid in processes_of(tmp_path)]
        os.kill(process, signal.SIGTERM)
        wait_until(lambda: not processes_of(tmp_path), "at its end")
    assert (tmp_path / "saved").read_text() == str(int(signal.SIGTERM))


def train(small_run: Path) -> list[str]:
    return ["launch/local.sh", "2", "--", "pipeline.train", "--config", str(small_run), *SMALL_MODEL]


def has_steps(run: Path) -> bool:
    return (run / "metrics.jsonl").exists() and (run / "metrics.jsonl").read_bytes().count(b"\n") >= 3


def assert_saved(run: Path) -> None:
    assert latest_step(run) == step_rows(run)[-1]["step"] >= 3
    assert [path.name for path in (run / "checkpoints").iterdir()] == [f"step-{latest_step(run):08d}"], "half a save, or two"


@pytest.mark.long
def test_training_in_a_closed_terminal(small_run: Path, tmp_path: Path) -> None:
    """Guards against a closed window that costs the steps since the last checkpoint, or leaves processes behind."""
    run = tmp_path / "run"
    with terminal(shlex.join(train(small_run)), tmp_path) as close:
        wait_until(lambda: has_steps(run), "training")
        close()
        wait_until(lambda: not processes_of(tmp_path), "at its end")
    assert_saved(run)


@pytest.mark.long
def test_killed_launcher(small_run: Path, tmp_path: Path) -> None:
    """Guards against ranks that train on unseen, holding memory and the run folder, after a ``kill -9`` of their launcher."""
    run = tmp_path / "run"
    launcher = subprocess.Popen(
        train(small_run), cwd=REPOSITORY, env=clean_environment(), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        wait_until(lambda: has_steps(run), "training")
    finally:
        launcher.kill()
        launcher.wait()
    wait_until(lambda: not processes_of(tmp_path), "at their end")
    assert_saved(run)


def test_alone_and_stuck() -> None:
    """Guards against a rank without a launcher that waits for ever in its save."""
    program = (
        "import os, signal, threading; from pipeline.cluster import environment; environment.ALONE_SECONDS = 1\n"
        "with environment.StopSignal():\n os.kill(os.getpid(), signal.SIGTERM)\n threading.Event().wait()"
    )
    command = [sys.executable, "-c", program]
    alone = subprocess.run(command, env={**clean_environment(), "PERVIT_LAUNCHER_PID": "1"}, cwd=REPOSITORY, timeout=PATIENCE)
    assert alone.returncode == -signal.SIGALRM
