"""A Slurm cluster on this machine for tests, started by ``launch/local_cluster.sh``, and the jobs on it."""

from __future__ import annotations

import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from support.launching import PATIENCE, REPOSITORY, clean_environment

SCRIPT = REPOSITORY / "launch" / "local_cluster.sh"
ON_CPUS = ("--gpus-per-node=0", "--cpus-per-task=1", "--time=10")
ENDED = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL")


def free_ports() -> Iterator[int]:
    """Below 20000, where the jobs' own ports begin; a cluster uses the port and 100 to 116 above it, one beside it others."""
    first = random.randrange(10000, 16000, 200) + 50 * (os.environ.get("PYTEST_XDIST_WORKER") == "gw1")
    return iter(range(first, 20000, 200))


class Cluster:
    """A Slurm cluster with a directory and ports of its own, so that it disturbs no other."""

    def __init__(self, port: int) -> None:
        # Not pytest's tmp_path: munge's socket must have a path of at most 107 characters.
        self.folder = Path(tempfile.mkdtemp(prefix="pervit-slurm-"))
        own = {
            "PERVIT_CLUSTER_DIR": str(self.folder),
            "PERVIT_CLUSTER_PORT": str(port),
            "SLURM_CONF": f"{self.folder}/etc/slurm.conf",
        }
        self.environment = clean_environment(**own)
        if sys.prefix != sys.base_prefix:
            self.environment["PERVIT_VENV"] = sys.prefix  # the jobs run what the tests run

    def script(self, *arguments: object) -> subprocess.CompletedProcess:
        return subprocess.run(
            [str(SCRIPT), *map(str, arguments)], env=self.environment, capture_output=True, text=True, timeout=PATIENCE
        )

    def up(self, nodes: int = 2) -> None:
        if shutil.which("sbatch") is None:
            pytest.skip("needs Slurm: apt-get install slurm-wlm munge")
        result = self.script("up", nodes)
        if result.returncode == 2:  # what this machine lacks, in one sentence
            pytest.skip(result.stderr.strip())
        assert result.returncode == 0, result.stderr + _tails(self.folder / "log")

    def down(self) -> None:
        result = self.script("down")
        assert result.returncode == 0, result.stderr
        shutil.rmtree(self.folder)

    def run(self, *command: object, cwd: Path = REPOSITORY, may_fail: bool = False, **variables: str) -> str:
        """Run one of Slurm's commands; returns what it printed."""
        result = subprocess.run(
            list(map(str, command)),
            cwd=cwd,
            env={**self.environment, **variables},
            capture_output=True,
            text=True,
            timeout=PATIENCE,
        )
        assert may_fail or result.returncode == 0, result.stderr
        return result.stdout

    def submit(self, folder: Path, *arguments: object, cwd: Path = REPOSITORY, **variables: str) -> Submitted:
        """``sbatch arguments``; the job's log goes to ``folder``."""
        log = folder / "job.out"
        number = self.run("sbatch", "--parsable", f"--output={log}", *arguments, cwd=cwd, **variables).strip()
        return Submitted(self, number, log)

    def job(self, folder: Path, *arguments: object, timeout: float = PATIENCE, cwd: Path = REPOSITORY, **variables: str) -> Job:
        """``sbatch arguments``, and wait for the end of the job."""
        return self.submit(folder, *arguments, cwd=cwd, **variables).end(timeout)

    def crash(self, node: str) -> None:
        """A power failure: everything on the node is killed, and nothing else."""
        daemon = (self.folder / "run" / f"slurmd-{node}.pid").read_text().strip()
        names = _host_names(Path("/proc") / daemon)
        if names == _host_names(Path("/proc/self")):
            pytest.skip("needs nodes with host names of their own: run as root")
        for pid in _processes(lambda process: _host_names(process) == names):
            _kill(pid)

    @contextmanager
    def controller_away(self) -> Iterator[None]:
        """slurmctld is stopped, as for maintenance; at the end it is there again."""
        pid = int((self.folder / "run" / "slurmctld.pid").read_text())
        os.kill(pid, signal.SIGTERM)
        while Path("/proc", str(pid)).exists():
            time.sleep(0.1)
        try:
            yield
        finally:
            self.run("slurmctld", PATH=f"{os.environ['PATH']}:/usr/sbin:/sbin")


@contextmanager
def running_cluster(port: int, nodes: int = 2) -> Iterator[Cluster]:
    started = Cluster(port)
    try:
        started.up(nodes)
        yield started
    finally:
        started.down()


@dataclass(frozen=True)
class Job:
    """How a job ended."""

    state: str
    exit_code: int
    log: str


@dataclass(frozen=True)
class Submitted:
    """A job that may still wait, run and be requeued."""

    cluster: Cluster
    number: str
    log_path: Path

    @property
    def log(self) -> str:
        return self.log_path.read_text() if self.log_path.exists() else ""

    def shown(self, name: str) -> str:
        """A field of ``scontrol show job``."""
        text = self.cluster.run("scontrol", "show", "job", "--oneliner", self.number)
        return re.search(rf"\b{name}=(\S+)", text)[1]

    def wait(self, what: str, happened: Callable[[], bool], timeout: float = PATIENCE) -> None:
        deadline = time.monotonic() + timeout
        while not happened():
            if time.monotonic() > deadline:
                state = self.shown("JobState")
                self.cluster.run("scancel", self.number)
                pytest.fail(f"after {timeout} s, the job being {state}, still not {what}:\n{self.log[-4000:]}")
            self._start_if_requeued()
            time.sleep(0.2)

    def end(self, timeout: float = PATIENCE) -> Job:
        self.wait("at its end", lambda: self.shown("JobState") in ENDED, timeout)
        return Job(self.shown("JobState"), int(self.shown("ExitCode").split(":")[0]), self.log)

    def signal(self, name: str) -> None:
        """To the tasks, at once."""
        self.cluster.run("scancel", f"--signal={name}", self.number)

    def cancel(self) -> None:
        self.cluster.run("scancel", self.number)

    def task(self, rank: int) -> list[int]:
        """The processes of one rank's python."""
        mine = (f"SLURM_JOB_ID={self.number}", f"SLURM_PROCID={rank}")
        return _processes(lambda process: _is_task(process, mine))

    def kill_task(self, rank: int) -> None:
        """``kill -9`` of one rank's python."""
        found = self.task(rank)
        assert found, f"no process of rank {rank}"
        for pid in found:
            _kill(pid)

    def _start_if_requeued(self) -> None:
        # By itself it would wait until the old life's credential has expired (cred_expire). The second is needed: a node
        # refuses a credential of the same second as the requeue.
        if self.shown("JobState") == "PENDING" and self.shown("Reason") == "BeginTime":
            time.sleep(1.2)
            # It may have started meanwhile.
            self.cluster.run("scontrol", "update", f"jobid={self.number}", "StartTime=now", may_fail=True)


def python_in_a_container(folder: Path) -> dict[str, str]:
    """Variables for a job on nodes without Python, beside a container that has this one.

    In a container runtime's place is a script that adds this Python to the PATH and says so; before it stands an option of srun.
    """
    tools, container = folder / "tools", folder / "a container"
    tools.mkdir()
    for place in ("/usr/sbin", "/usr/bin", "/bin"):
        for tool in Path(place).iterdir():
            if not tool.name.startswith("python") and not (tools / tool.name).exists():
                (tools / tool.name).symlink_to(tool)
    path = f"PATH='{Path(sys.executable).parent}':$PATH; export PATH"
    container.write_text(f'#!/bin/sh\n[ "$1" = img ] || exit 9\nshift; {path}\necho "in the container: $*"\nexec "$@"\n')
    container.chmod(0o755)
    return {"PATH": str(tools), "PERVIT_VENV": "", "PERVIT_SRUN": f"--comment='of a site' '{container}' img"}


def _host_names(process: Path) -> Path:
    """The namespace that is the node's own."""
    return (process / "ns" / "uts").readlink()


def _is_task(process: Path, variables: tuple[str, ...]) -> bool:
    found = (process / "environ").read_bytes().decode(errors="replace").split("\0")
    words = (process / "cmdline").read_bytes().decode(errors="replace").split("\0")
    return set(variables) <= set(found) and "pipeline.train" in words and "python" in words[0]


def _processes(wanted: Callable[[Path], bool]) -> list[int]:
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if wanted(process):
                found.append(int(process.name))
        except OSError:  # ended meanwhile, or another user's
            continue
    return found


def _kill(pid: int) -> None:
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        pass


def _tails(folder: Path) -> str:
    return "\n".join(f"{path}:\n{path.read_text()[-1500:]}" for path in sorted(folder.glob("*.log")))
