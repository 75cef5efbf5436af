"""Commands of launchers in the background, and jobs whose ranks ``launch/local.sh`` or torchrun starts and ends."""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path

import psutil

from support.launching import PATIENCE, REPOSITORY, clean_environment
from support.ranks import Job, free_port, logs

LAUNCHERS = ("local.sh", "torchrun")
TORCHRUN = (sys.executable, "-m", "torch.distributed.run")


class Launched:
    """A command in the background, its output in files."""

    def __init__(self, folder: Path, *words: object, **environment: str) -> None:
        self.started = time.time()
        self._files = [folder / f"{free_port()}.{name}" for name in ("out", "err")]
        with self._files[0].open("wb") as out, self._files[1].open("wb") as err:
            self.process = subprocess.Popen(
                [*map(str, words)],
                cwd=REPOSITORY,
                env=clean_environment(OMP_NUM_THREADS="1", **environment),
                stdout=out,
                stderr=err,
            )

    @property
    def out(self) -> str:
        return self._files[0].read_text()

    @property
    def errors(self) -> str:
        return self._files[1].read_text()

    def until(self, pattern: str) -> re.Match:
        """The pattern in its output, once it is there."""
        deadline = time.monotonic() + PATIENCE
        while not (found := re.search(pattern, self.out)):
            assert self.process.poll() is None and time.monotonic() < deadline, self.errors
            time.sleep(0.02)
        return found

    def ends_with(self, code: int) -> Launched:
        try:
            assert self.process.wait(PATIENCE) == code, self.errors
        finally:
            self.process.terminate()
        return self

    def sentences(self) -> list[str]:
        """What this project says in its errors; torchrun's own follow."""
        return re.findall(r"^error: .*", self.errors, re.MULTILINE)


def ranks_of(launcher: Launched) -> dict[int, psutil.Process]:
    """The ranks that a launcher has started, by their number."""
    found = {}
    with suppress(psutil.NoSuchProcess):
        for process in psutil.Process(launcher.process.pid).children():
            with suppress(psutil.NoSuchProcess, psutil.AccessDenied):
                if (rank := process.environ().get("RANK")) is not None:
                    found[int(rank)] = process
    return found


class LaunchedJob(Job):
    """``pipeline.train`` by a launcher; every rank has the launcher's exit code, a rank's number in place of torchrun's 1."""

    def __init__(self, launcher: str, world_size: int, *arguments: object) -> None:
        by_torchrun = (*TORCHRUN, "--nproc-per-node", world_size, "-m")
        words = by_torchrun if launcher == "torchrun" else ("bash", "launch/local.sh", world_size, "--")
        self._launcher = Launched(Path(tempfile.mkdtemp(dir=logs().name)), *words, "pipeline.train", *arguments)
        self.world_size, self.started = world_size, self._launcher.started
        self._ranks: dict[int, psutil.Process] = {}

    @property
    def runs(self) -> bool:
        return self._launcher.process.poll() is None

    def code(self, rank: int) -> int | None:
        code = self._launcher.process.poll()
        if code == 1 and (reported := re.findall(r"exitcode\s*:\s*(-?\d+)", self.stderr())):
            code = int(reported[-1])  # of the rank that failed first, at the end of torchrun's report
        return 128 - code if code is not None and code > 128 else code

    def stdout(self, rank: int = 0) -> str:
        return self._launcher.out

    def stderr(self, rank: int = 0) -> str:
        return self._launcher.errors

    def signal(self, number: int, *ranks: int) -> None:
        """Send a signal to some ranks, to all if none is named, once the launcher has started them all."""
        if not self._ranks:
            self.until(lambda: len(ranks_of(self._launcher)) == self.world_size)
            self._ranks = ranks_of(self._launcher)
        for rank in ranks or self._ranks:
            with suppress(psutil.NoSuchProcess, KeyError):  # it has ended
                self._ranks[rank].send_signal(number)
