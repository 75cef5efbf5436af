"""Sharding as a job array on a real Slurm of two nodes."""

from __future__ import annotations

import random
import re
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from data_prep.sources import ImageFolder
from data_prep.writer import write_shards
from pipeline.files import file_sha256
from support.launching import PATIENCE, run_script
from support.slurm_cluster import ENDED, Cluster, python_in_a_container

pytestmark = pytest.mark.slurm

SCRIPT = "launch/shard_imagenet.slurm"


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    started = Cluster(random.randrange(16200, 19800, 200))
    try:
        started.up()
        yield started
    finally:
        started.down()


def submit(cluster: Cluster, logs: Path, *arguments: object, **variables: str) -> tuple[list[str], str]:
    """Run a job array to its end; returns the states of its tasks and their logs."""
    options = [f"--output={logs}/%a.out", "--cpus-per-task=1", "--time=10", "--parsable"]
    number = cluster.run("sbatch", *options, *arguments, **variables).strip()
    deadline = time.monotonic() + PATIENCE
    while time.monotonic() < deadline:
        states = re.findall(r"JobState=(\w+)", cluster.run("scontrol", "show", "job", number))
        if states and all(state in ENDED for state in states):
            return states, "".join(path.read_text() for path in sorted(logs.glob("*.out")))
        time.sleep(0.3)
    cluster.run("scancel", number)
    pytest.fail(f"the tasks are {states} after 120 s")


def test_a_job_array_writes_what_one_process_writes(cluster: Cluster, digits_images: Path, tmp_path: Path) -> None:
    """Guards against tasks that do each other's work or nobody's, and against a manifest that no task or two tasks write."""
    output, alone = tmp_path / "array", tmp_path / "alone"
    arguments = ["--source", digits_images, "--output", output, "--samples-per-shard", 50, "--split", "val"]
    states, log = submit(cluster, tmp_path, "--array=4-6", SCRIPT, *arguments)
    assert states == ["COMPLETED"] * 3, log
    assert sorted(re.findall(r"task (\d) of 3", log)) == ["0", "1", "2"]
    assert log.count("the last task to finish writes the manifest") <= 2 and "val has 359 images" in log
    write_shards(ImageFolder(digits_images, "val"), alone, "val", 50)
    assert {f.name: file_sha256(f) for f in output.iterdir()} == {f.name: file_sha256(f) for f in alone.iterdir()}
    run_script("data_prep/verify_shards.py", output, "--decode")


def test_a_mistake_is_one_sentence_in_the_log(cluster: Cluster, digits_images: Path, tmp_path: Path) -> None:
    """Guards against a job that waits in the queue for hours to end with a traceback."""
    states, log = submit(cluster, tmp_path, "--array=0,5", SCRIPT, "--source", tmp_path / "nowhere", "--output", tmp_path / "x")
    assert states == ["FAILED"] * 2 and "Traceback" not in log
    assert "nowhere does not exist" in log and "submit with --array=FIRST-LAST" in log


def test_python_in_a_container_alone(cluster: Cluster, digits_images: Path, tmp_path: Path) -> None:
    """Guards against sharding that needs a Python on every node beside the container's."""
    arguments = ["--source", digits_images, "--output", tmp_path / "shards", "--split", "val"]
    states, log = submit(cluster, tmp_path, "--array=0", SCRIPT, *arguments, **python_in_a_container(tmp_path))
    assert states == ["COMPLETED"], log
    assert "in the container: python -u data_prep/shard_imagenet.py" in log and "val has 359 images" in log
