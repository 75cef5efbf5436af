"""A job that is stopped, killed or cancelled, on a real Slurm of two nodes, and what becomes of the run.

Each scenario runs with a toy instead of the training (quick), and with the real one on the digits (part of the soak).
"""

from __future__ import annotations

import re
import shutil
import time
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import yaml

from pipeline.checkpoint.folder import latest_step
from pipeline.errors import exit_reason
from pipeline.training import restart
from support.launching import PATIENCE, REPOSITORY
from support.runs import step_rows
from support.slurm_cluster import ON_CPUS, Cluster, Job, Submitted, free_ports, python_in_a_container, running_cluster

on_slurm = pytest.mark.slurm
TOY_TRAIN = Path(__file__).with_name("toy_train.py")
SCRIPT = "launch/train.slurm"
TWO_NODES = (*ON_CPUS, "--nodes=2", "--ntasks-per-node=1")


@dataclass(frozen=True)
class Training:
    """What a scenario submits: the toy or the real training, of ``steps`` steps."""

    cluster: Cluster
    folder: Path
    repository: Path
    config: Path
    steps: int
    every: int = 20  # steps between checkpoints

    @property
    def run(self) -> Path:
        return Path(yaml.safe_load(self.config.read_text())["output_dir"])

    def submit(self, *options: str, steps: int | None = None, **variables: str) -> Submitted:
        words = [f"train.max_steps={steps or self.steps}", f"checkpoint.every_steps={self.every}", "log.every_steps=1"]
        command = [*TWO_NODES, *options, SCRIPT, self.config, *words]
        return self.cluster.submit(self.folder, *command, cwd=self.repository, **variables)

    def at_step(self, step: int) -> bool:
        """Whether a row of that step, or a later one, is in metrics.jsonl."""
        try:
            return bool(rows := step_rows(self.run)) and rows[-1]["step"] >= step
        except (OSError, ValueError):  # not yet there, or in the middle of a line
            return False

    def restarts(self) -> list[restart.Restart]:
        return restart.read_restarts(self.run / restart.RESTARTS)

    def assert_finished(self, job: Job, submitted: Submitted) -> None:
        """Every step once in what the weights saw; one job; a line for each restart."""
        assert (job.state, job.exit_code) == ("COMPLETED", 0), job.log[-4000:]
        assert [row["step"] for row in step_rows(self.run)] == list(range(1, self.steps + 1))
        assert latest_step(self.run) == self.steps
        assert {each.job for each in self.restarts()} <= {submitted.number}
        lives = [
            int(number) for number in re.findall(rf"^job {submitted.number} on .*, restarts: (\d+),", job.log, re.MULTILINE)
        ]
        assert lives == list(range(len(lives)))
        for each in self.restarts():
            assert f"restart {each.restart} of job {submitted.number}: {exit_reason(each.exit_code)}" in job.log


@pytest.fixture
def toy(cluster: Cluster, tmp_path: Path) -> Training:
    repository = tmp_path / "repository"
    shutil.copytree(REPOSITORY / "launch", repository / "launch")
    shutil.copytree(REPOSITORY / "pipeline", repository / "pipeline", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(TOY_TRAIN, repository / "pipeline" / "train.py")
    config = tmp_path / "config.yaml"
    config.write_text(yaml.safe_dump({"output_dir": str(tmp_path / "run")}))
    return Training(cluster, tmp_path, repository, config, steps=60)


@pytest.fixture(params=["toy", pytest.param("real", marks=pytest.mark.soak)])
def training(request: pytest.FixtureRequest, cluster: Cluster, tmp_path: Path) -> Training:
    if request.param == "toy":
        return request.getfixturevalue("toy")
    return Training(cluster, tmp_path, REPOSITORY, request.getfixturevalue("small_run"), steps=60)


# ---- the job stops and goes on ----------------------------------------------------------------


@pytest.mark.long
@on_slurm
def test_a_chain_of_short_jobs_finishes_the_run(training: Training) -> None:
    """Guards against a chain of time limits that breaks, repeats steps, leaves steps out or becomes several jobs."""
    job = training.submit()
    for restarts, step in enumerate((5, 25)):
        job.wait(f"at step {step}", lambda step=step: training.at_step(step))
        job.signal("USR1")
        job.wait("requeued", lambda n=restarts: int(job.shown("Restarts")) == n + 1)
    training.assert_finished(job.end(), job)
    steps = [each.step for each in training.restarts()]
    assert [each.exit_code for each in training.restarts()] == [75, 75]
    assert 5 <= steps[0] < 25 <= steps[1] < training.steps
    assert all(step % training.every for step in steps), "only the periodic checkpoints are there"


@on_slurm
def test_a_killed_task(training: Training) -> None:
    """Guards against a run that waits for its dead rank until the time limit, or is not started again."""
    job = training.submit()
    job.wait("past a checkpoint", lambda: training.at_step(training.every + 5))
    job.kill_task(1)
    job.wait("requeued", lambda: int(job.shown("Restarts")) == 1, timeout=PATIENCE)
    training.assert_finished(job.end(), job)
    (only,) = training.restarts()
    assert only.exit_code not in (0, 2, 75) and only.step >= training.every


@on_slurm
def test_a_cancelled_job(training: Training) -> None:
    """Guards against scancel that loses the steps since the last checkpoint, and against a job that cannot be cancelled."""
    job = training.submit()
    job.wait("past its first checkpoint", lambda: training.at_step(training.every + 5))
    job.cancel()
    ended = job.end()
    assert ended.state == "CANCELLED"
    assert "it was cancelled" in ended.log
    step = latest_step(training.run)
    assert step > training.every and step % training.every and step == step_rows(training.run)[-1]["step"]
    assert training.restarts() == [] and job.shown("Restarts") == "0"
    again = training.submit()
    training.assert_finished(again.end(), again)


@on_slurm
def test_python_in_a_container_alone(toy: Training) -> None:
    """Guards against a job that is not requeued because the node itself has no Python to be asked whether it may."""
    job = toy.submit(**python_in_a_container(toy.folder))
    job.wait("at step 5", lambda: toy.at_step(5))
    job.signal("USR1")
    job.wait("requeued", lambda: int(job.shown("Restarts")) == 1)
    toy.assert_finished(job.end(), job)
    assert [each.exit_code for each in toy.restarts()] == [75]
    (asked,) = re.findall(r"^in the container: (.*)", job.log, re.MULTILINE)  # the trainings' own have a label
    assert asked.startswith("python -m pipeline.training.restart --exit-code 75 ")


@pytest.mark.long
@on_slurm
def test_a_job_array(toy: Training) -> None:
    """Guards against a task that requeues the whole array, whose id one of them bears, and against runs that mix."""
    words = [f"train.max_steps={toy.steps}", f"checkpoint.every_steps={toy.every}", "seed=%a"]
    words.append(f"output_dir={toy.folder}/run-%a")
    three_at_once = (*ON_CPUS, "--nodes=1", "--ntasks-per-node=1", "--mem=100", "--oversubscribe", "--array=0-2")
    command = [*three_at_once, f"--output={toy.folder}/task-%a.out", SCRIPT, toy.config, *words]
    array = toy.cluster.submit(toy.folder, *command, cwd=toy.repository, TOY_SECONDS="0.2").number
    tasks = [Submitted(toy.cluster, f"{array}_{i}", toy.folder / f"task-{i}.out") for i in range(3)]
    runs = [replace(toy, config=toy.folder / f"config-{i}.yaml") for i in range(3)]
    for i, run in enumerate(runs):
        run.config.write_text(yaml.safe_dump({"output_dir": f"{toy.folder}/run-{i}"}))
    for task, run in zip(tasks, runs):
        task.wait("at step 5", lambda run=run: run.at_step(5))
    parents = [task.shown("JobId") for task in tasks].index(array)  # the task that bears the array's id
    tasks[parents].signal("USR1")
    tasks[parents].wait("running again", lambda: "restarts: 1," in tasks[parents].log)
    for i, (task, run) in enumerate(zip(tasks, runs)):
        run.assert_finished(task.end(), task)
        assert task.shown("Restarts") == str(int(i == parents))
        assert [each.job for each in run.restarts()] == [f"{array}_{i}"] * (i == parents)
    ports = {re.search(r"meeting at \S+:(\d+)", task.log)[1] for task in tasks}
    assert len(ports) == 3


# ---- the job must not go on -------------------------------------------------------------------


@pytest.mark.long
@on_slurm
def test_without_progress_it_stops(toy: Training) -> None:
    """Guards against a job that crashes at its start and is requeued for ever."""
    job = toy.submit(TOY_EXIT="1")
    ended = job.end()
    assert (ended.state, ended.exit_code) == ("FAILED", 1)
    assert job.shown("Restarts") == str(restart.LIMIT)
    assert [(each.restart, each.step) for each in toy.restarts()] == [(1, None), (2, None), (3, None)]
    (sentence,) = [line for line in ended.log.splitlines() if line.startswith("no restart of job")]
    assert "has made no progress" in sentence
    assert "Traceback" not in ended.log


@on_slurm
@pytest.mark.parametrize("option", ["--requeue", "--no-requeue"])
def test_not_requeued(option: str, toy: Training) -> None:
    """Guards against a mistake that is repeated by every restart, and a job that is requeued against its submitter's word."""
    mistake = option == "--requeue"
    job = toy.submit(option, TOY_EXIT="2" if mistake else "75")
    ended = job.end()
    assert (ended.state, ended.exit_code) == ("FAILED", 2 if mistake else 75), ended.log
    assert job.shown("Restarts") == "0" and not toy.run.exists()
    assert mistake or "was submitted with --no-requeue. Submit the same command again" in ended.log


# ---- the soak ---------------------------------------------------------------------------------


@on_slurm
@pytest.mark.soak
@pytest.mark.timeout(1200)
def test_the_time_limit(training: Training) -> None:
    """Guards against a signal before the time limit that does not reach the training, or a second life without one."""
    long = replace(training, steps=400)  # more than the minute or so that a life has
    job = long.submit("--time=2", "--signal=USR1@60", TOY_SECONDS="0.5")
    ended = job.end(1100)
    long.assert_finished(ended, job)
    assert long.restarts() and {each.exit_code for each in long.restarts()} == {75}


@on_slurm
@pytest.mark.soak
def test_a_crashed_node(training: Training) -> None:
    """Guards against a job that does not come back after a node is lost."""
    with running_cluster(next(free_ports()), nodes=3) as cluster:  # one to spare
        alone = replace(training, cluster=cluster)
        job = alone.submit(TOY_SECONDS="0.5")
        job.wait("past a checkpoint", lambda: alone.at_step(alone.every + 5))
        nodes = cluster.run("scontrol", "show", "hostnames", job.shown("NodeList")).split()
        cluster.crash(nodes[1])
        job.wait("requeued", lambda: int(job.shown("Restarts")) == 1, timeout=PATIENCE)
        ended = job.end()
        alone.assert_finished(ended, job)
        assert alone.restarts() == [] and "Slurm has done so already" in ended.log


@on_slurm
@pytest.mark.soak
def test_the_controller_is_away(toy: Training) -> None:
    """Guards against a run of days that ends because nobody answered when its job asked to be requeued."""
    job = toy.submit(TOY_SECONDS="0.5")
    job.wait("past a checkpoint", lambda: toy.at_step(toy.every + 5))
    with toy.cluster.controller_away():
        job.kill_task(1)
        unanswered = "Unable to contact slurm controller"
        deadline = time.monotonic() + PATIENCE
        while unanswered not in job.log:
            assert time.monotonic() < deadline, job.log
            time.sleep(0.2)
    job.wait("requeued", lambda: int(job.shown("Restarts")) == 1, timeout=PATIENCE)
    toy.assert_finished(job.end(), job)
