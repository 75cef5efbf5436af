"""A run to audit, and copies of it to forge."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from pipeline.checkpoint.folder import saved_steps
from support.ranks import train, wait_for_steps
from support.runs import write_small_config

KEYS = ("checkpoint.every_steps=2", "checkpoint.keep_last=9", "train.max_steps=8")


@pytest.fixture(scope="session")
def elastic_run(digits_shards: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Killed after its third step on one process, continued on two, stopped at step 6, and ended on one."""
    folder = tmp_path_factory.mktemp("audit")
    config, run = write_small_config(digits_shards, folder), folder / "run"
    job = train(1, config, run, *KEYS)
    assert job.until(lambda: 2 in saved_steps(run)) and wait_for_steps(job, run, 1)
    job.kill()
    job.wait()
    train(2, config, run, *KEYS, "train.max_steps=6").succeed()
    train(1, config, run, *KEYS).succeed()
    assert saved_steps(run) == [2, 4, 6, 8]
    return run


@pytest.fixture
def run(elastic_run: Path, tmp_path: Path) -> Path:
    """A copy of the run, to be changed."""
    return Path(shutil.copytree(elastic_run, tmp_path / "run"))
