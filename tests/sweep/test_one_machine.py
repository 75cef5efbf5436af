"""``launch/sweep.sh``: a sweep on this machine, stopped, killed and gone on with. A toy stands in for the training."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from pipeline.checkpoint.folder import latest_step
from support.launching import PATIENCE, REPOSITORY, clean_environment
from support.runs import step_rows

TOY_TRAIN = REPOSITORY / "tests" / "faults" / "toy_train.py"
LINES = "all: --config demo train.max_steps=25 checkpoint.every_steps=10\nseed=0\nseed=1\nseed=2\n"


class OneMachine:
    """A repository with the toy for ``pipeline.train``, and a sweep of three runs."""

    def __init__(self, folder: Path) -> None:
        self.root, self.folder, self.file = folder / "repository", folder / "a sweep", folder / "sweep.txt"
        for name in ("launch", "pipeline", "configs"):
            shutil.copytree(REPOSITORY / name, self.root / name, ignore=shutil.ignore_patterns("__pycache__"))
        shutil.copy(TOY_TRAIN, self.root / "pipeline" / "train.py")
        self.file.write_text(LINES)
        self.runs = [self.folder / f"seed={seed}" for seed in range(3)]
        self.started: list[subprocess.Popen] = []

    def start(self, *options: str, **variables: str) -> subprocess.Popen:
        toy = {"SLURM_PROCID": "0", "SLURM_JOB_ID": "7", "PERVIT_OUTPUT": str(self.folder), "PYTHONPATH": str(self.root)}
        process = subprocess.Popen(
            ["bash", "launch/sweep.sh", *options, str(self.file)],
            cwd=self.root, env=clean_environment(**toy, **variables), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
        self.started.append(process)
        return process

    def wait(self, *runs: Path, step: int = 5) -> None:
        deadline = time.monotonic() + PATIENCE
        while not all(_at_step(run, step) for run in runs):
            assert time.monotonic() < deadline
            time.sleep(0.1)

    def trainings(self) -> list[int]:
        return [pid for run in self.runs for pid in _processes(lambda words, run=run: f"output_dir={run}" in words)]


def _at_step(run: Path, step: int) -> bool:
    try:
        return bool(rows := step_rows(run)) and rows[-1]["step"] >= step
    except (OSError, ValueError):
        return False


def _processes(wanted: Callable[[list[str]], bool]) -> list[int]:
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = path.read_bytes().decode(errors="replace").split("\0")
        except OSError:  # ended meanwhile
            continue
        if wanted(words):
            found.append(int(path.parent.name))
    return found


@pytest.fixture
def machine(tmp_path: Path) -> Iterator[OneMachine]:
    made = OneMachine(tmp_path)
    yield made
    for process in made.started:
        if process.poll() is None:
            process.kill()
            process.communicate()
    for pid in made.trainings():
        os.kill(pid, signal.SIGKILL)


@pytest.mark.long
def test_stopped_and_gone_on_with(machine: OneMachine) -> None:
    """Guards against Ctrl-C that loses steps or leaves trainings behind, and a second call that trains again what is finished."""
    process = machine.start("--jobs", "2", TOY_SECONDS="0.2")
    machine.wait(*machine.runs[:2])
    process.send_signal(signal.SIGINT)
    said, errors = process.communicate(timeout=PATIENCE)
    assert process.returncode == 130, said + errors
    assert "stopped; 0 of 3 runs finished, the same command continues" in said and errors == ""
    assert machine.trainings() == [] and not machine.runs[2].exists()
    stopped = [latest_step(run) for run in machine.runs[:2]]
    assert stopped == [step_rows(run)[-1]["step"] for run in machine.runs[:2]] and min(stopped) >= 5

    process = machine.start("--jobs", "2", TOY_SECONDS="0.02")
    said, errors = process.communicate(timeout=PATIENCE)
    assert process.returncode == 0, said + errors
    for run in machine.runs:
        assert [row["step"] for row in step_rows(run)] == list(range(1, 26))
    assert "3 of 3 runs finished" in said and (machine.folder / "report.html").stat().st_size > 1e5
    assert (machine.folder / "sweep.txt").read_text() == LINES

    machine.file.write_text(LINES.replace("seed=0", "seed=3"))
    said, _ = machine.start(TOY_EXIT="2").communicate(timeout=PATIENCE)
    assert "3 runs, 2 finished already" in said and "failed: seed=3: its log is empty" in said
    assert machine.started[-1].returncode == 1


@pytest.mark.long
def test_what_is_killed(machine: OneMachine) -> None:
    """Guards against a killed run that nobody starts again, and a killed sweep whose trainings go on unseen."""
    process = machine.start("--jobs=3", TOY_SECONDS="0.2")
    machine.wait(*machine.runs, step=12)
    (pid,) = _processes(lambda words: f"output_dir={machine.runs[0]}" in words)
    os.kill(pid, signal.SIGKILL)
    deadline = time.monotonic() + PATIENCE
    while "steps 10 to 25" not in (machine.folder / "logs" / "seed=0.out").read_text():  # it trains again
        assert time.monotonic() < deadline
        time.sleep(0.1)
    (sweep,) = _processes(lambda words: "pipeline.sweep" in words and str(machine.file) in words)
    os.kill(sweep, signal.SIGKILL)
    said, _ = process.communicate(timeout=PATIENCE)
    assert "[1/3] seed=0: a process was ended by SIGKILL (exit code 137); it resumes from its newest checkpoint" in said
    deadline = time.monotonic() + PATIENCE
    while machine.trainings():
        assert time.monotonic() < deadline
        time.sleep(0.1)
    assert all(latest_step(run) == step_rows(run)[-1]["step"] for run in machine.runs)
    process = machine.start("--jobs=3", TOY_SECONDS="0.02")
    process.communicate(timeout=PATIENCE)
    assert process.returncode == 0
    assert all([row["step"] for row in step_rows(run)] == list(range(1, 26)) for run in machine.runs)


@pytest.mark.parametrize(
    ("options", "variables", "said"),
    [
        (["--jobs", "0"], {}, "--jobs must be at least 1, got 0"),
        (["--processes", "3"], {}, "sweep.txt, line 2: train.global_batch_size must be a multiple of"),
        (["--jobs", "2", "--processes", "2"], {"CUDA_VISIBLE_DEVICES": "0,1,2"}, "requires 4 GPUs, got 3"),
    ],
)
def test_refused(options: list[str], variables: dict[str, str], said: str, machine: OneMachine) -> None:
    """Guards against a sweep that begins and cannot go on."""
    process = machine.start(*options, **variables)
    output, errors = process.communicate(timeout=PATIENCE)
    assert (process.returncode, output) == (2, "") and said in errors and len(errors.splitlines()) == 1, errors
    assert not machine.folder.exists()
