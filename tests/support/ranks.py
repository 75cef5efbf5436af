"""Jobs of several ranks, as real processes that can be signalled and killed one by one."""

from __future__ import annotations

import atexit
import functools
import json
import os
import random
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from support.launching import PATIENCE, REPOSITORY, clean_environment
from support.small_run import SMALL_MODEL

POLL_SECONDS = 0.002
LAUNCHERS_PATIENCE = 30.0  # seconds after which ranks that outlive a killed one are ended, as launch/local.sh and srun do


class Job:
    """One start of a program in ``world_size`` processes.

    Attributes:
        pids: by rank.
        port: where they meet.
        world_size: how many there are.
        started: by the clock of the day, as in the log of samples.
    """

    def __init__(
        self,
        world_size: int,
        *arguments: object,
        module: str = "pipeline.train",
        missing: int = 0,
        stdin: str = "",
        folder: Path = REPOSITORY,
        enter: list[dict] | None = None,
        **environment: str | list[str] | None,
    ) -> None:
        """``missing`` more ranks are of the job, but somebody else starts them, or nobody.

        Args:
            folder: where the processes run.
            enter: for each rank the namespaces and cgroups in which it runs: ``support/zygote.py``.
            environment: variables more than usual, or others; a list has a value for each rank; None: not that one.
        """
        self.world_size, self.started = world_size, time.time()
        self._folder = Path(tempfile.mkdtemp(dir=logs().name))
        common = {
            **meeting_point(world_size + missing),
            "SLURM_CPUS_PER_TASK": 1,  # threads of a rank: more would wait for each other on a busy machine
        }
        self.pids, self.port = [], common["MASTER_PORT"]
        (self._folder / "stdin").write_text(stdin)
        for rank in range(world_size):
            request = {
                "module": module,
                "arguments": [str(argument) for argument in arguments],
                "environment": {
                    name: str(value[rank] if isinstance(value, list) else value)
                    for name, value in {**common, "RANK": rank, "LOCAL_RANK": rank, **environment}.items()
                    if value is not None
                },
                "folder": str(folder),
                "input": str(self._folder / "stdin"),
                "output": str(self._folder / str(rank)),
                "enter": enter[rank] if enter else {},
            }
            self.pids.append(_zygote().start(request))

    def code(self, rank: int) -> int | None:
        """A rank's exit code, minus a signal's number if that ended it; None while it runs."""
        note = self._folder / f"{rank}.code"
        return int(note.read_text()) if note.exists() else None

    @property
    def codes(self) -> list[int | None]:
        return [self.code(rank) for rank in range(self.world_size)]

    @property
    def runs(self) -> bool:
        """Whether any rank has not ended."""
        return None in self.codes

    def stdout(self, rank: int = 0) -> str:
        return (self._folder / f"{rank}.out").read_text()

    def stderr(self, rank: int = 0) -> str:
        return (self._folder / f"{rank}.err").read_text()

    def signal(self, number: signal.Signals, *ranks: int) -> None:
        """Send a signal to some ranks; to all if none is named."""
        for rank in ranks or range(self.world_size):
            if self.code(rank) is None:
                os.kill(self.pids[rank], number)

    def kill(self, *ranks: int) -> None:
        """``kill -9``."""
        self.signal(signal.SIGKILL, *ranks)

    def wait(self, patience: float = PATIENCE) -> list[int]:
        """Until all have ended.

        Returns:
            The exit codes, by rank.
        """
        deadline = time.monotonic() + patience
        while self.runs:
            if time.monotonic() > deadline:
                self.kill()
                raise AssertionError(f"after {patience:g} s: exit codes {self.codes}\n{self.outputs()}")
            time.sleep(5 * POLL_SECONDS)
        return self.codes

    def wait_after_kill(self) -> bool:
        """Until all have ended; like a launcher, end those that do not.

        Returns:
            Whether they ended by themselves.
        """
        deadline = time.monotonic() + LAUNCHERS_PATIENCE
        while self.runs and time.monotonic() < deadline:
            time.sleep(5 * POLL_SECONDS)
        by_themselves = not self.runs
        self.kill()
        self.wait()
        return by_themselves

    def succeed(self) -> Job:
        """Wait for a normal end of all."""
        assert self.wait() == [0] * self.world_size, self.outputs()
        return self

    def outputs(self) -> str:
        """What all have printed, for a failed test."""
        return "\n".join(
            f"--- rank {rank}\n{self.stdout(rank)[-1500:]}\n{self.stderr(rank)[-3000:]}" for rank in range(self.world_size)
        )

    def until(self, condition: Callable[[], object]) -> bool:
        """Wait until something is the case, or the job has ended before.

        Returns:
            Whether it is.
        """
        deadline = time.monotonic() + PATIENCE
        while not condition():
            if not self.runs:
                return bool(condition())
            assert time.monotonic() < deadline, self.outputs()
            time.sleep(POLL_SECONDS)
        return True


def run_forked(
    module: str,
    *arguments: object,
    processes: int = 1,
    check: bool = True,
    stdin: str = "",
    folder: Path = REPOSITORY,
    **environment: str | list[str],
) -> subprocess.CompletedProcess:
    """As ``launching.run_module``, without the launcher and without importing everything in each process: five seconds less.

    Returns:
        The highest exit code, what rank 0 has printed, and the errors of all.
    """
    job = Job(processes, *arguments, module=module, stdin=stdin, folder=folder, **environment)
    code = max(job.wait(), key=abs)
    errors = "".join(job.stderr(rank) for rank in range(processes))
    if check and code != 0:
        pytest.fail(f"{module} exited with {code}:\n{job.stdout()[-2000:]}\n{errors[-4000:]}")
    return subprocess.CompletedProcess([module, *map(str, arguments)], code, job.stdout(), errors)


def train(world_size: int, config: Path, run: Path, *overrides: object) -> Job:
    """Start the training; the run keeps its log of samples."""
    return Job(world_size, "--config", config, f"output_dir={run}", "log.samples=true", *SMALL_MODEL, *overrides)


def steps_taken(run: Path, rank: int = 0) -> int:
    """How many steps a rank has taken in all starts together."""
    path = run / "samples" / f"rank-{rank:05d}.jsonl"
    return path.read_bytes().count(b"\n") if path.exists() else 0


def wait_for_steps(job: Job, run: Path, count: int, rank: int = 0) -> bool:
    """Until a rank has taken ``count`` more steps; False if the job has ended before."""
    goal = steps_taken(run, rank) + count
    return job.until(lambda: steps_taken(run, rank) >= goal)


def is_saving(run: Path) -> bool:
    """Whether a checkpoint is on its way."""
    return any((run / "checkpoints").glob(".saving-*"))


def meeting_point(world_size: int) -> dict[str, object]:
    """What a launcher tells all ranks of a job: variables of the environment."""
    return {
        "WORLD_SIZE": world_size,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": free_port(),
        "PERVIT_JOB_SECRET": secrets.token_hex(32),
    }


def free_port() -> int:
    """One that no other start of this session was given either; each asks the system for another one."""
    while True:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        if port not in _ports:
            _ports.add(port)
            return port


def seed_from_environment() -> int:
    """PERVIT_SOAK_SEED, to kill at the same moments again; else a new one. It is printed."""
    seed = int(os.environ.get("PERVIT_SOAK_SEED") or random.SystemRandom().randrange(10**6))
    print(f"\nPERVIT_SOAK_SEED={seed}")
    return seed


class _Zygote:
    """The process from which all ranks are forked."""

    def __init__(self) -> None:
        environment = clean_environment(
            PYTHONPATH=f"{REPOSITORY}:{REPOSITORY / 'tests'}",
            OMP_NUM_THREADS="1",
            TORCH_CPP_LOG_LEVEL="ERROR",
            DS_ACCELERATOR="cpu",
        )
        self._process = subprocess.Popen(
            [sys.executable, "-m", "support.zygote"],
            cwd=REPOSITORY,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        atexit.register(self._process.stdin.close)
        assert self._answer() == "ready"

    def start(self, request: dict) -> int:
        self._process.stdin.write(json.dumps(request))
        self._process.stdin.flush()
        return int(self._answer())

    def _answer(self) -> str:
        """The next line; libraries print some of their own while they are imported."""
        for line in self._process.stdout:
            if line.strip() == "ready" or line.strip().isdigit():
                return line.strip()
        raise AssertionError("the process that starts the ranks has ended")


@functools.cache
def logs() -> tempfile.TemporaryDirectory:
    """What the ranks print; removed at the end of the session."""
    return tempfile.TemporaryDirectory(prefix="ranks-")


_ports: set[int] = set()


@functools.cache
def _zygote() -> _Zygote:
    return _Zygote()
