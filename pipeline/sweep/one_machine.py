"""Train all runs of a sweep on this machine, one after the other or some at a time."""

import ctypes
import os
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter, deque
from dataclasses import dataclass
from pathlib import Path

from tqdm import tqdm

from pipeline.command_line import python_command
from pipeline.errors import PREEMPTED, USER_ERROR, UserError, counted, exit_reason
from pipeline.files import replace_text
from pipeline.sweep.lines import Sweep, SweepRun
from pipeline.sweep.states import LOGS, REPORT, check_batches, is_finished, make_report, state
from pipeline.training.restart import allow_restart

_LOOK = 0.2  # seconds between two looks at the runs
_DIES_WITH_PARENT = 1  # PR_SET_PDEATHSIG of linux/prctl.h


@dataclass
class _Started:
    run: SweepRun
    process: subprocess.Popen[bytes]
    place: int
    since: float


class OneMachine:
    """Runs a sweep here, so many ``jobs`` at a time, without the finished ones; ``processes`` of each, by ``launch/local.sh`` if several.

    Each run is a process group of its own, so that Ctrl-C reaches this process alone, which passes on SIGTERM: a training saves
    what it has trained. If this process is killed, its runs receive SIGTERM from the kernel. Raises UserError: there are fewer
    GPUs than that, or a run's batch does not divide by its processes.
    """

    def __init__(self, sweep: Sweep, jobs: int, processes: int) -> None:
        self.sweep, self.jobs, self.processes = sweep, jobs, processes
        self.gpus = visible_gpus()
        if self.gpus and len(self.gpus) < jobs * processes:
            problem = f"--jobs {jobs} with --processes {processes} requires {jobs * processes} GPUs, got {len(self.gpus)}"
            raise UserError(problem, "lower --jobs or --processes")
        check_batches(sweep, processes)
        python_command(processes)  # refused before anything is begun
        self.logs = sweep.folder / LOGS
        self._running: list[_Started] = []
        self._through = 0  # runs that have ended well
        self._failed: list[SweepRun] = []
        self._restarts: Counter[int] = Counter()  # by the run's number
        self._signals: list[int] = []
        self._passed_on = 0

    def train(self) -> int:
        """Train what is not finished, then write the report; returns the exit code."""
        self.logs.mkdir(parents=True, exist_ok=True)
        copy = self.sweep.folder / self.sweep.file.name
        if not (copy.exists() and copy.samefile(self.sweep.file)):
            replace_text(copy, self.sweep.text)
        waiting = deque(run for run in self.sweep.runs if not is_finished(run))
        self._through = there = len(self.sweep.runs) - len(waiting)
        say(f"{self.sweep.folder}: {counted(len(self.sweep.runs), 'run')}, {there} finished already; logs in {self.logs}/")
        handlers = {
            number: signal.signal(number, lambda number, _: self._signals.append(number))
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
            if signal.getsignal(number) is not signal.SIG_IGN  # as under nohup
        }
        tqdm.monitor_interval = 0  # no thread, in which fork would find locks held
        bar = tqdm(
            total=len(self.sweep.runs), initial=there, desc="runs", unit="run", miniters=0, mininterval=1, leave=False, disable=None,
            dynamic_ncols=True,
        )  # fmt: skip
        try:
            while self._running or (waiting and not self._signals):
                while waiting and len(self._running) < self.jobs and not self._signals:
                    self._start(waiting.popleft())
                time.sleep(_LOOK)
                self._pass_signals_on()
                for ended in [started for started in self._running if started.process.poll() is not None]:
                    self._running.remove(ended)
                    if self._ended(ended):
                        waiting.append(ended.run)
                bar.update(self._through - bar.n)
        finally:
            bar.close()
            for started in self._running:
                started.process.kill()
            for number, handler in handlers.items():
                signal.signal(number, handler)
        return self._end()

    def _end(self) -> int:
        through = f"{self._through} of {counted(len(self.sweep.runs), 'run')} finished"
        if self._signals:
            say(f"stopped; {through}, the same command continues with the others")
            return 130 if self._signals[0] == signal.SIGINT else PREEMPTED
        code = make_report([run.folder for run in self.sweep.runs], self.sweep.folder)
        say(f"{through}; the page that compares them: {self.sweep.folder / REPORT}")
        for run in self._failed:
            say(f"failed: {run.name}: {last_line(self._log(run))} ({self._log(run)})")
        return 1 if self._failed else code

    def _log(self, run: SweepRun) -> Path:
        return self.logs / f"{run.name}.out"

    def _start(self, run: SweepRun) -> None:
        place = min(set(range(self.jobs)) - {started.place for started in self._running})
        command = python_command(self.processes, "pipeline.train", "--config", run.config_file, *run.overrides)
        environment = dict(os.environ)
        if self.gpus:
            environment["CUDA_VISIBLE_DEVICES"] = ",".join(self.gpus[place * self.processes : (place + 1) * self.processes])
        if self.processes == 1 or self.jobs > 1:  # local.sh divides the cores among its ranks, but knows of one run only
            environment.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // (self.jobs * self.processes))))
        if self.jobs > 1:  # threads that spin while they wait slow the other runs down
            environment.setdefault("OMP_WAIT_POLICY", "PASSIVE")
        parent, libc = os.getpid(), ctypes.CDLL(None)

        def die_with_parent() -> None:
            libc.prctl(_DIES_WITH_PARENT, int(signal.SIGTERM))
            if os.getppid() != parent:  # it is gone already
                os._exit(143)

        with open(self._log(run), "ab") as log:
            process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment, start_new_session=True,
                preexec_fn=die_with_parent,
            )  # fmt: skip
        self._running.append(_Started(run, process, place, time.monotonic()))
        self._say(run, "begins")

    def _ended(self, ended: _Started) -> bool:
        """Say how a run has ended; returns whether it is to be started again."""
        run, code = ended.run, ended.process.returncode
        code = 128 - code if code < 0 else code  # as a shell counts signals
        minutes, seconds = divmod(round(time.monotonic() - ended.since), 60)
        if code == 0:
            self._through += 1
            self._say(run, f"{state(run.folder)}, {minutes}:{seconds:02} min")
            return False
        if self._signals:
            self._say(run, f"stopped: {state(run.folder)}")
            return False
        if code != USER_ERROR:
            self._restarts[run.number] += 1
            try:
                allow_restart(run.folder, f"sweep-{os.getpid()}", self._restarts[run.number], code)
                self._say(run, f"{exit_reason(code)} (exit code {code}); it resumes from its newest checkpoint")
                return True
            except (UserError, OSError) as error:
                self._say(run, f"is given up: {error}")
        self._failed.append(run)
        self._say(run, f"failed with exit code {code}: {last_line(self._log(run))}")
        return False

    def _say(self, run: SweepRun, text: str) -> None:
        say(f"[{run.number}/{len(self.sweep.runs)}] {run.name}: {text}")

    def _pass_signals_on(self) -> None:
        """The first signal lets the runs save, the second one ends them."""
        heard = min(len(self._signals), 2)
        if heard > self._passed_on:
            self._passed_on = heard
            if heard == 1 and self._running:
                say("stopping: the runs save what they have trained; once more ends them at once")
            for started in self._running:
                started.process.send_signal(signal.SIGTERM if heard == 1 else signal.SIGKILL)


def visible_gpus() -> list[str]:
    """What CUDA_VISIBLE_DEVICES may name; empty on a machine without GPUs."""
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    if named is not None:
        return [gpu.strip() for gpu in named.split(",") if gpu.strip()]
    if shutil.which("nvidia-smi") is None:
        return []
    found = subprocess.run(["nvidia-smi", "--list-gpus"], capture_output=True, text=True)
    return [str(i) for i in range(sum(line.startswith("GPU ") for line in found.stdout.splitlines()))]


def last_line(log: Path) -> str:
    """The last words of a run's log."""
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()] if log.exists() else []
    return lines[-1].strip() if lines else "its log is empty"


def say(text: str) -> None:
    tqdm.write(text)
    sys.stdout.flush()
