"""A job whose ranks ``launch/local.sh`` or torchrun starts and ends, with what a :class:`~support.ranks.Job` has."""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path

import psutil

from support.launching import REPOSITORY, clean_environment
from support.ranks import Job

LAUNCHERS = ("local.sh", "torchrun")


class LaunchedJob(Job):
    """``pipeline.train`` by a launcher; every rank has the launcher's exit code, a rank's number in place of torchrun's 1."""

    def __init__(self, launcher: str, world_size: int, *arguments: object) -> None:
        self.world_size, self.started = world_size, time.time()
        self._ranks: dict[int, psutil.Process] = {}
        self._output = Path(tempfile.mkdtemp(prefix="launched-"))
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", f"{world_size}", "-m"]
        words = torchrun if launcher == "torchrun" else ["bash", "launch/local.sh", f"{world_size}", "--"]
        with open(self._output / "out", "wb") as out, open(self._output / "err", "wb") as err:
            self._launcher = subprocess.Popen(
                [*words, "pipeline.train", *map(str, arguments)],
                cwd=REPOSITORY,
                env=clean_environment(OMP_NUM_THREADS="1"),
                stdout=out,
                stderr=err,
            )

    @property
    def runs(self) -> bool:
        return self._launcher.poll() is None

    def code(self, rank: int) -> int | None:
        code = self._launcher.poll()
        if code == 1 and (reported := re.findall(r"exitcode\s*:\s*(-?\d+)", self.stderr())):
            code = int(reported[-1])  # of the rank that failed first, at the end of torchrun's report
        return 128 - code if code is not None and code > 128 else code

    def stdout(self, rank: int = 0) -> str:
        return (self._output / "out").read_text()

    def stderr(self, rank: int = 0) -> str:
        return (self._output / "err").read_text()

    def signal(self, number: int, *ranks: int) -> None:
        """Send a signal to some ranks, to all if none is named, once the launcher has started them all."""
        if not self._ranks:
            self.until(lambda: len(self._processes()) == self.world_size)
            self._ranks = self._processes()
        for rank in ranks or self._ranks:
            with suppress(psutil.NoSuchProcess, KeyError):  # it has ended
                self._ranks[rank].send_signal(number)

    def _processes(self) -> dict[int, psutil.Process]:
        """By rank: the launcher's children that have one."""
        found = {}
        with suppress(psutil.NoSuchProcess):
            for process in psutil.Process(self._launcher.pid).children():
                with suppress(psutil.NoSuchProcess, psutil.AccessDenied):
                    if (rank := process.environ().get("RANK")) is not None:
                        found[int(rank)] = process
        return found
