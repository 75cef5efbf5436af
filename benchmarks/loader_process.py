"""Control of a contestant's process: starts it, runs a turn and measures its cost."""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path

import psutil
from loader_settings import Settings, Unavailable

from pipeline.errors import UserError

HERE = Path(__file__).parent
TICK = 1 / os.sysconf("SC_CLK_TCK")  # resolution of a process's CPU time, seconds
REST = 0.4  # seconds without CPU time after which a contestant counts as resting
PATIENCE = 120  # seconds to come to rest


@dataclass(frozen=True)
class Turn:
    """The cost of a turn."""

    wall: float  # seconds, of the timed batches
    cpu: float  # seconds, of all batches, from idle to idle: every image is counted exactly once


class ContestantProcess:
    """A running contestant that waits for turns.

    Args:
        name: for messages.
        command: what to run; it speaks the protocol of loader_peers.py.
        threads: for OpenMP.
        log: file for its error output.

    Raises:
        Unavailable: it says that it cannot run here, or ends before it is ready.
    """

    def __init__(self, name: str, command: list[str], threads: int, log: Path) -> None:
        self.name = name
        self._log = log
        with open(log, "w") as errors:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                env={**os.environ, **peer_environment(threads)},
            )
        answer = self._process.stdout.readline().strip()
        if answer != "ready":
            self.close()
            raise Unavailable(answer.removeprefix("skipped: ") or self._last_words())
        self._rest()

    def turn(self, batches: int, untimed: int) -> Turn:
        """Let it make ``batches`` batches and refill its queues; the clock starts after the first ``untimed``.

        Raises:
            UserError: it ended instead, or does not come to rest.
        """
        before = self._rest()
        self._process.stdin.write(f"{batches} {untimed}\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline().strip()
        if not answer:
            self.close()
            raise UserError(
                f"contestant {self.name} stopped in its turn ({self._last_words()}) of {batches} batches",
                "fix it, or leave it out with --only",
            )
        return Turn(wall=float(answer), cpu=self._rest() - before)

    def close(self) -> None:
        """End the process and its children."""
        for process in self._family():
            try:
                process.kill()
            except psutil.NoSuchProcess:
                pass  # it ended by itself
        self._process.wait()
        self._process.stdin.close()
        self._process.stdout.close()

    def _rest(self) -> float:
        """Wait until its CPU time stops increasing; returns that time."""
        deadline = time.monotonic() + PATIENCE
        seen, since = self._cpu_time(), time.monotonic()
        while time.monotonic() - since < REST:
            if time.monotonic() > deadline:
                raise UserError(
                    f"contestant {self.name} must rest after its turn, to measure the others, but still computes {PATIENCE} s after it",
                    "leave it out with --only",
                )
            time.sleep(REST / 4)
            now = self._cpu_time()
            if now > seen + 1.5 * TICK:  # a single tick may be a thread's periodic wake-up
                seen, since = now, time.monotonic()
        return self._cpu_time()

    def _cpu_time(self) -> float:
        """User and system seconds so far, of the process and all its children, those that ended included."""
        seconds = 0.0
        for process in self._family():
            try:
                seconds += sum(process.cpu_times()[:4])  # user, system, and both of the children that ended
            except psutil.NoSuchProcess:
                pass  # it has just exited: its time is now part of its parent's
        return seconds

    def _family(self) -> list[psutil.Process]:
        try:
            root = psutil.Process(self._process.pid)
            return [root, *root.children(recursive=True)]
        except psutil.NoSuchProcess:
            return []  # it has exited: the caller that waits for its answer reports that

    def _last_words(self) -> str:
        lines = self._log.read_text().strip().splitlines()
        return lines[-1].strip() if lines else f"it ended with code {self._process.returncode} and no message"


def peer_environment(threads: int) -> dict[str, str]:
    """Environment variables for a measured process: busy-waiting threads would count as work, and all get as many threads."""
    return {"OMP_WAIT_POLICY": "PASSIVE", "OMP_NUM_THREADS": str(threads), "PYTHONPATH": str(HERE.parent)}


def start_peer(name: str, python: str, settings: Settings, log: Path) -> ContestantProcess:
    """Start a contestant of loader_peers.py with the interpreter ``python``."""
    command = [python, str(HERE / "loader_peers.py"), name]
    images = settings.images
    command += ["--folder", str(images.folder), "--shards", str(images.shards), "--listing", str(images.listing)]
    command += ["--workers", str(settings.workers), "--batch-size", str(settings.batch_size)]
    if settings.timm:
        command += ["--timm", str(settings.timm)]
    if not shutil.which(python):
        raise Unavailable(f"{python} is not a Python interpreter")
    return ContestantProcess(name, command, settings.workers, log)


def start_limit(settings: Settings, log: Path) -> ContestantProcess:
    """Compile jpeg_limit.c beside ``log`` and start it on the listed JPEGs.

    Raises:
        Unavailable: no C compiler, or no libjpeg-turbo to compile with.
    """
    program, source = log.with_suffix(""), HERE / "jpeg_limit.c"
    try:
        compiled = subprocess.run(
            ["cc", "-O2", "-o", program, source, "-ljpeg", "-lm", "-lpthread"], capture_output=True, text=True
        )
    except FileNotFoundError:
        raise Unavailable("no C compiler `cc`") from None
    if compiled.returncode:
        first_error = next((line for line in compiled.stderr.splitlines() if "error" in line), "cc failed")
        raise Unavailable(f"jpeg_limit.c cannot be compiled: {first_error} (needs apt-get install libjpeg-dev)")
    command = [str(program), *map(str, (settings.images.listing, settings.workers, settings.batch_size))]
    return ContestantProcess("limit", command, settings.workers, log)
