"""A sweep as a job array on a real Slurm of two nodes: tasks that are preempted, killed and submitted again, and the report after them.

With a toy instead of the training (quick), and with the real one on the digits (part of the soak).
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from pipeline.checkpoint.folder import latest_step
from pipeline.training import restart
from support.launching import PATIENCE, REPOSITORY
from support.runs import evaluation_rows, step_rows
from support.slurm_cluster import ON_CPUS, Cluster, Submitted
from support.small_run import SMALL_MODEL

pytestmark = pytest.mark.slurm
TOY_TRAIN = Path(__file__).with_name("toy_train.py")
STEPS = 180  # of two epochs of the digits in batches of 16
SHARED = (*ON_CPUS, "--nodes=1", "--ntasks-per-node=1", "--mem=100", "--oversubscribe")


@dataclass(frozen=True)
class Submission:
    """The jobs of one call of ``launch/sweep.slurm``."""

    cluster: Cluster
    said: str
    folder: Path  # of the sweep

    @property
    def array(self) -> str:
        return re.search(r"^job array (\d+):", self.said, re.MULTILINE)[1]

    def task(self, number: int) -> Submitted:
        return Submitted(self.cluster, f"{self.array}_{number}", self.folder / "logs" / f"{self.array}_{number}.out")

    @property
    def report(self) -> Submitted:
        number = re.search(r"^job (\d+): the report", self.said, re.MULTILINE)[1]
        return Submitted(self.cluster, number, self.folder / "logs" / f"report-{number}.out")


def submit(cluster: Cluster, repository: Path, folder: Path, *words: object, **variables: str) -> Submission:
    """One command."""
    command = ("bash", "launch/sweep.slurm", *SHARED, *words)
    said = cluster.run(*command, cwd=repository, PERVIT_OUTPUT=str(folder), **variables)
    return Submission(cluster, said, folder)


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    root = tmp_path / "a repository"
    for name in ("launch", "pipeline", "configs"):
        shutil.copytree(REPOSITORY / name, root / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(TOY_TRAIN, root / "pipeline" / "train.py")
    return root


def wait_until(what: str, happened: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE
    while not happened():
        assert time.monotonic() < deadline, f"still not {what}"
        time.sleep(0.2)


def at_step(run: Path, step: int) -> bool:
    try:
        return bool(rows := step_rows(run)) and rows[-1]["step"] >= step
    except (OSError, ValueError):
        return False


@pytest.mark.long
def test_two_preempted_tasks_and_the_report_after_all(cluster: Cluster, repository: Path, tmp_path: Path) -> None:
    """Guards against a preempted task that takes others along, a report that does not wait for a requeued task, a file whose change
    changes what was submitted, and a second submission that trains twice what is finished or in the queue."""
    file, folder = tmp_path / "sweep.txt", tmp_path / "a sweep"
    words = "--config demo train.max_steps=30 checkpoint.every_steps=20"
    file.write_text(f"all: {words}\n\n# three\nseed=0\nseed=1\nseed=2 'optim.betas=[0.9, 0.99]'\n")
    sweep = submit(cluster, repository, folder, file, TOY_SECONDS="0.2")
    file.write_text(f"all: {words}\nseed=7\nseed=7\n")  # two lines with one folder: of no matter to what is submitted
    wait_until("at step 5", lambda: len(found := list(folder.glob("*seed=*"))) == 3 and all(at_step(run, 5) for run in found))
    runs = [folder / "seed=0", folder / "seed=1", *folder.glob("optim.betas=0.9_0.99,seed=2-*")]
    bears_the_id = next(n for n in (1, 2, 3) if sweep.task(n).shown("JobId") == sweep.array)
    other = bears_the_id % 3 + 1
    sweep.task(bears_the_id).signal("USR1")
    cluster.run("scontrol", "requeue", sweep.task(other).number)  # as a partition's preemption does
    file.write_text(f"all: {words}\nseed=0\nseed=1\nseed=2 'optim.betas=[0.9, 0.99]'\nseed=3\n")
    again = submit(cluster, repository, folder, file)
    assert "1 of 4 runs, tasks 4," in again.said and "in the queue already: 3 of 4" in again.said, again.said
    for number in (bears_the_id, other):
        sweep.task(number).wait("running again", lambda number=number: "restarts: 1," in sweep.task(number).log)
    assert sweep.report.shown("JobState") == again.report.shown("JobState") == "PENDING"
    for number, run in enumerate(runs, 1):
        ended = sweep.task(number).end()
        assert (ended.state, ended.exit_code) == ("COMPLETED", 0), ended.log[-3000:]
        assert [row["step"] for row in step_rows(run)] == list(range(1, 31))
        assert sweep.task(number).shown("Restarts") == str(int(number in (bears_the_id, other)))
    assert again.task(4).end().state == "COMPLETED" and latest_step(folder / "seed=3") == 30
    ended = again.report.end()
    assert (ended.state, ended.exit_code) == ("COMPLETED", 0), ended.log
    assert len(re.findall(r"^ +\d  .*finished at step 30, top-1 50.0 %$", ended.log, re.MULTILINE)) == 4, ended.log
    assert (folder / "report.html").stat().st_size > 1e5
    assert [path.read_text() for path in sorted(folder.glob("submitted/*/sweep.txt"))][1] == file.read_text()
    nothing = submit(cluster, repository, folder, file)
    assert "job array" not in nothing.said and "finished already: 4 of 4" in nothing.said
    nothing.report.cancel()
    submitted = len(list((folder / "submitted").iterdir()))

    # Refused: nothing is submitted.
    jobs = set(cluster.run("squeue", "--noheader", "--states=all", "--format=%A").split())
    file.write_text(f"all: {words}\nseed=0\nseed=x\n")
    for options, sentence in (
        ((file,), f"error: {file}, line 3: "),
        (("--nodes=none", file, "data.flip=0.1"), "sbatch refused the job"),
        (("--nodes", "2", file), "error: 2 must be a file"),
        (("--array=1-3", file), "that a sweep sets itself"),
        (("--jobs=0", file), "got '0'"),
    ):
        if "sbatch" in sentence:
            file.write_text(f"all: {words}\nseed=9\n")
        result = _fails(cluster, repository, folder, *options)
        assert sentence in result, result
    assert "Invalid job array specification" in _fails(
        cluster, repository, folder, file, program=("sbatch", "launch/sweep.slurm")
    )
    assert set(cluster.run("squeue", "--noheader", "--states=all", "--format=%A").split()) == jobs
    assert len(list((folder / "submitted").iterdir())) == submitted


def _fails(
    cluster: Cluster, repository: Path, folder: Path, *words: object, program: tuple = ("bash", "launch/sweep.slurm")
) -> str:
    """What a call that is refused says, in one sentence."""
    result = subprocess.run(
        [*program, *map(str, words)], cwd=repository, env={**cluster.environment, "PERVIT_OUTPUT": str(folder)},
        capture_output=True, text=True, timeout=PATIENCE,
    )  # fmt: skip
    assert result.returncode != 0 and result.stdout == "" and len(result.stderr.splitlines()) == 1, result
    return result.stderr


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_six_runs_with_preemptions_and_kills(cluster: Cluster, digits_shards: Path, tmp_path: Path) -> None:
    """Guards against a sweep of real trainings that loses a step, a run or its page when a task, or the report, is killed."""
    file, folder = tmp_path / "lr_and_seed.txt", tmp_path / "lr_and_seed"
    keys = "model.image_size=32 train.global_batch_size=16 train.micro_batch_size=16 train.epochs=2 eval.every_epochs=1"
    common = [
        *keys.split(),
        "checkpoint.every_steps=20",
        *SMALL_MODEL,
        f"data.path={digits_shards}",
        "data.num_threads=1",
        "data.flip=0.5",
        "augment.erasing=0.25",
    ]
    axes = ["optim.lr=2e-3,1e-3,5e-4", "seed=0,1"]
    quiet = {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}
    file.write_text(cluster.run("bash", "launch/sweep.sh", "--grid", "--config", "demo", *common, *axes))
    sweep = submit(cluster, REPOSITORY, folder, "--jobs=2", "--time=120", file, **quiet)
    print(file.read_text(), sweep.said, sep="\n")
    runs = {number: folder / f"optim.lr={lr},seed={seed}" for number, (lr, seed) in enumerate(
        ((lr, seed) for lr in ("2e-3", "1e-3", "5e-4") for seed in (0, 1)), 1)}  # fmt: skip
    for number, end in ((1, "signal"), (2, "requeue"), (4, "kill")):
        task = sweep.task(number)
        task.wait("past a checkpoint", lambda number=number: at_step(runs[number], 50))
        print(time.strftime("%H:%M:%S"), f"task {number} at step {step_rows(runs[number])[-1]['step']}: {end}", flush=True)
        if end == "signal":
            # Delivered at once; but while tasks of the array wait, Slurm 22.05 answers scancel that it try again, for a minute.
            cluster.run("timeout", "3", "scancel", "--signal=USR1", task.number, may_fail=True)
        elif end == "requeue":
            cluster.run("scontrol", "requeue", task.number)
        else:
            Submitted(cluster, task.shown("JobId"), task.log_path).kill_task(0)
    for number in runs:
        ended = sweep.task(number).end(3000)
        assert (ended.state, ended.exit_code) == ("COMPLETED", 0), ended.log[-4000:]
        assert sweep.task(number).shown("Restarts") == str(int(number in (1, 2, 4)))
        assert [row["step"] for row in step_rows(runs[number])] == list(range(1, STEPS + 1))
        assert evaluation_rows(runs[number])[-1]["step"] == latest_step(runs[number]) == STEPS
    assert [each.exit_code for each in restart.read_restarts(runs[1] / restart.RESTARTS)] == [75]

    sweep.report.wait("reading the runs", lambda: bool(_reports(folder)))
    for pid in _reports(folder):
        os.kill(pid, signal.SIGKILL)
    ended = sweep.report.end()
    print(ended.log)
    assert (ended.state, ended.exit_code) == ("COMPLETED", 0) and "attempt 1 of 3" in ended.log
    assert (folder / "report.html").stat().st_size > 1e5


def _reports(folder: Path) -> list[int]:
    """The processes that make the page of a sweep."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = path.read_bytes().decode(errors="replace").split("\0")
        except OSError:
            continue
        if "pipeline.report" in words and f"{folder}/report.html" in words:
            found.append(int(path.parent.name))
    return found
