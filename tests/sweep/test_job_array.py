"""What a submission says where Slurm refuses or is not there. The real one is in tests/faults/test_sweep.py."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from pipeline.errors import UserError
from pipeline.sweep.job_array import report, submit
from pipeline.sweep.lines import Sweep, parse_sweep
from support.launching import REPOSITORY

ANSWERS = {
    "squeue": "exit 0",
    "scontrol": "echo 'MaxArraySize            = 3'",
    "sbatch": 'echo "$*" >> "$CALLS"; case "$*" in *--wrap=*) echo "sbatch: error: Invalid qos specification" >&2; exit 1 ;; esac; echo 7',
}


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of stand-ins for Slurm's commands, first on the PATH; ``calls`` beside it has what sbatch was given."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for name, answer in ANSWERS.items():
        answering(folder, name, answer)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    monkeypatch.setenv("CALLS", str(tmp_path / "calls"))
    monkeypatch.chdir(REPOSITORY)
    return folder


def answering(folder: Path, name: str, answer: str) -> None:
    (folder / name).write_text(f"#!/bin/sh\n{answer}\n")
    (folder / name).chmod(0o755)


def sweep_of(runs: int, folder: Path) -> Sweep:
    lines = "".join(f"seed={seed}\n" for seed in range(runs))
    return parse_sweep(Path("s.txt"), f"all: --config demo output_dir={folder}\n{lines}", variables={})


def test_more_runs_than_an_array_may_have(slurm: Path, tmp_path: Path) -> None:
    """Guards against Slurm's "Invalid job array specification" for a file without a mistake."""
    with pytest.raises(
        UserError, match="s.txt has 3 runs, but the tasks of a job array are numbered to 2 here .*MaxArraySize is 3"
    ):
        submit(sweep_of(3, tmp_path / "runs"), ["--ntasks-per-node=2"], None)
    assert not (tmp_path / "calls").exists() and not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("name", "answer", "said"),
    [
        ("squeue", "echo 'slurm_load_jobs error: Unable to contact slurm controller' >&2; exit 1", "squeue does not answer"),
        ("scontrol", "exit 1", "scontrol does not tell Slurm's MaxArraySize"),
        ("sbatch", "echo 'sbatch: error: Invalid account' >&2; exit 1", "sbatch refused the job: Invalid account"),
    ],
)
def test_a_slurm_that_refuses(name: str, answer: str, said: str, slurm: Path, tmp_path: Path) -> None:
    """Guards against a traceback, and a folder of a submission that never was."""
    answering(slurm, name, answer)
    with pytest.raises(UserError, match=said):
        submit(sweep_of(2, tmp_path / "runs"), ["--ntasks-per-node=2"], None)
    assert list((tmp_path / "runs").glob("submitted/*")) == []


@pytest.mark.parametrize(
    ("options", "processes"),
    [([], 8), (["-N3", "--ntasks-per-node=1"], 3), (["--nodes=4", "--ntasks-per-node=2"], 8), (["-n4"], 4)],
)
def test_a_batch_that_the_jobs_processes_cannot_share(options: list[str], processes: int, slurm: Path, tmp_path: Path) -> None:
    """Guards against an array whose every task waits in the queue to say this."""
    with pytest.raises(
        UserError, match=rf"^s.txt, line 2: train.global_batch_size must be a multiple of .* x {processes} processes = "
    ) as error:
        submit(sweep_of(2, tmp_path / "runs"), options, None)
    assert "--ntasks-per-node say how many." in str(error.value) and not (tmp_path / "runs").exists()


def test_a_report_that_is_refused(slurm: Path, tmp_path: Path) -> None:
    """Guards against runs that are submitted while the command seems to have failed as a whole."""
    with pytest.raises(UserError) as error:
        submit(sweep_of(2, tmp_path / "runs"), ["--ntasks=2", "-pgpu", "--qos=high", "--nodes=4"], 2)
    assert str(error.value).startswith("the runs are submitted, but not their report: sbatch refused the job: Invalid qos")
    assert f"pervit report {tmp_path}/runs/seed=0 {tmp_path}/runs/seed=1 --output" in str(error.value)
    array, last = (tmp_path / "calls").read_text().splitlines()
    assert "--partition=gpu --qos=high --nodes=4 --array=1-2%2 launch/sweep.slurm --task" in array
    assert "--dependency=afterany:7 --partition=gpu --qos=high --wrap" in last and "--nodes=1" in last
    (submission,) = (tmp_path / "runs" / "submitted").iterdir()
    assert (submission / "tasks" / "2").read_text().splitlines() == ["demo", "seed=1", f"output_dir={tmp_path}/runs/seed=1"]
    assert (submission / "s.txt").read_text().endswith("seed=0\nseed=1\n")


def test_where_no_sweep_can_be_submitted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against tasks that do not find the repository, and a traceback on a machine without Slurm."""
    sweep = sweep_of(1, tmp_path / "runs")
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(
        UserError, match="a job array requires Slurm, got no sbatch on the PATH: on one machine: pervit sweep s.txt"
    ):
        submit(sweep, [], None)
    answering(tmp_path, "sbatch", "exit 1")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match="must be submitted from the repository's root, got .* without launch/sweep.slurm"):
        submit(sweep, [], None)
    with pytest.raises(UserError, match="--report must be a submission"):
        report(tmp_path / "runs")
