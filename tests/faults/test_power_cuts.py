"""Power cuts: what a file system really holds without power; a run goes on from it with every row and sample."""

from __future__ import annotations

import random
import subprocess
import time
from pathlib import Path

import pytest

from faults.power import Disk
from pipeline.checkpoint.folder import saved_steps
from support.ranks import is_saving, run_forked, seed_from_environment, train, wait_for_steps
from support.runs import write_small_config
from support.small_run import SMALL_MODEL

pytestmark = pytest.mark.multiprocess

OPTIONS = (*SMALL_MODEL, "log.samples=true", "train.max_steps=16", "checkpoint.every_steps=4", "eval.every_epochs=0.1")


def test_a_disk_that_another_mount_namespace_has_too(disk: Disk) -> None:
    """Guards against a local Slurm cluster beside it, by whose copy of the mount the disk would stay as it is when it is mounted again."""
    node = subprocess.Popen(["unshare", "--mount", "sh", "-c", "echo ready; exec sleep 60"], stdout=subprocess.PIPE, text=True)
    try:
        assert node.stdout and node.stdout.readline() == "ready\n"
        disk.cut()
        with pytest.raises(OSError):
            (disk.folder / "file").write_text("x")
        disk.restart()
        (disk.folder / "file").write_text("x")
    finally:
        node.kill()
        node.wait()


@pytest.mark.soak
def test_a_run_goes_on_after_power_cuts(digits_shards: Path, disk: Disk, tmp_path: Path) -> None:
    """Guards against a checkpoint that is named before its bytes are durable, and one whose rows, samples or config are not. The first
    cut comes as soon as a save has its name, the others anywhere."""
    config, run = write_small_config(digits_shards, tmp_path), disk.folder / "run"
    draw = random.Random(seed_from_environment())
    for moment in ("saved", "step", "save"):
        job = train(2, config, run, *OPTIONS)
        if moment == "saved":
            assert job.until(lambda: 4 in saved_steps(run)), job.outputs()
        else:
            wait_for_steps(job, run, draw.randint(1, 3))
        if moment == "save":
            job.until(lambda: is_saving(run))
            time.sleep(draw.uniform(0, 0.1))
        disk.cut_under(job)  # a checkpoint whose name was not durable yet may be gone
    train(2, config, run, *OPTIONS).succeed()
    told = run_forked("pipeline.audit", run, "--windows", 1, "--output", tmp_path / "audit.html", check=False)
    assert told.returncode == 0, told.stdout + told.stderr
