"""The detection example as a Slurm job."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from pipeline.training.restart import read_restarts
from support.detection import needs_torchvision, write_config
from support.detection_set import overrides, write_digit_set
from support.launching import PATIENCE, REPOSITORY, clean_environment, run_module
from support.slurm_cluster import ON_CPUS, Cluster, free_ports, running_cluster

SCRIPT = "examples/detection/detection.slurm"


def started(*words: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        ["bash", SCRIPT, *words], cwd=REPOSITORY, env=clean_environment(), capture_output=True, text=True, timeout=PATIENCE
    )


def settings(script: str) -> set[str]:
    return set(re.findall(r"^#SBATCH (?!--job-name)(.*)", (REPOSITORY / script).read_text(), re.MULTILINE))


def test_the_script_says_what_it_takes() -> None:
    """Guards against a help that starts something, a job without a config, and settings other than those of the classifiers' jobs."""
    shown, refused = started("--help"), started()
    assert shown.returncode == 0 and shown.stdout.count(f"sbatch {SCRIPT} ") >= 2 and "set -" not in shown.stdout
    assert (refused.returncode, refused.stdout) == (2, "")
    assert refused.stderr.startswith("error: the first word must be a config file, got ''") and refused.stderr.count("\n") == 1
    assert settings(SCRIPT) == settings("launch/train.slurm")


def test_the_question_of_a_restart_reads_the_runs_checkpoints(tmp_path: Path) -> None:
    """Guards against a job that is never requeued because its config is not a classifier's, or always because no step is seen."""
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump({"output_dir": str(tmp_path / "run"), "model": {"detector": "mask_rcnn"}}))
    (tmp_path / "run" / "checkpoints" / "step-00000007").mkdir(parents=True)
    for restart in range(4):
        asked = run_module(
            "examples.detection.train",
            *("--exit-code", 75, "--config", path),
            check=False,
            SLURM_JOB_ID="5",
            SLURM_RESTART_COUNT=str(restart),
        )
        if restart < 3:
            assert asked.stdout == f"restart {restart + 1} of job 5: stopped by a signal (exit code 75), begins at step 7\n"
    assert asked.returncode == 1 and "has made no progress" in asked.stderr


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    needs_torchvision()
    with running_cluster(next(free_ports())) as started:
        yield started


@pytest.mark.slurm
def test_a_job_that_is_stopped_requeues_itself_and_finishes(cluster: Cluster, tmp_path: Path) -> None:
    """Guards against a detector whose job ends at its time limit, or begins again. Two nodes, with the time limit's signal."""
    run, data = tmp_path / "run", write_digit_set(tmp_path / "set", train=12, val=4, side=64)
    path = write_config(
        tmp_path,
        model={"name": "posmlp_t", "switches": {"groups": [1, 1, 1, 1]}},
        train={"global_batch_size": 2, "micro_batch_size": 1, "max_steps": 16},
        checkpoint={"every_steps": None},
    )
    job = cluster.submit(tmp_path, "--nodes=2", "--ntasks-per-node=1", *ON_CPUS, SCRIPT, path, *overrides(data))

    def steps() -> list[int]:
        rows = (run / "metrics.jsonl").read_text().splitlines() if (run / "metrics.jsonl").exists() else []
        return [json.loads(row)["step"] for row in rows if row.endswith("}") and '"lr"' in row]

    job.wait("at step 2", lambda: len(steps()) >= 2)
    job.signal("USR1")
    job.wait("requeued", lambda: int(job.shown("Restarts")) == 1)
    ended = job.end()
    assert (ended.state, ended.exit_code) == ("COMPLETED", 0), ended.log[-4000:]
    assert steps() == list(range(1, 17))
    (only,) = read_restarts(run / "restarts.json")
    assert only.exit_code == 75 and 2 <= only.step < 16
    assert f"steps {only.step} to 16" in ended.log and "steps 0 to 16" in ended.log
