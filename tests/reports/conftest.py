"""A run that was killed, stopped and killed again, with a sample that cannot be read; its pages are looked at by several tests."""

from __future__ import annotations

import shutil
import signal
from pathlib import Path

import pytest

from pipeline.shards.shard_set import ShardSet
from support.predictions import BAD
from support.ranks import train, wait_for_steps
from support.runs import write_small_config


@pytest.fixture(scope="session")
def damaged_shards(digits_shards: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = Path(shutil.copytree(digits_shards, tmp_path_factory.mktemp("damaged") / "shards"))
    opened = ShardSet(folder, "train")
    sample = opened.samples[BAD]
    with open(folder / opened.info.shards[sample["shard"]].file, "r+b") as tar:
        tar.seek(int(sample["offset"]))
        tar.write(b"\xff" * int(sample["bytes"]))
    return folder


@pytest.fixture(scope="session")
def storied_run(damaged_shards: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """60 steps in four starts: killed in step 8 or later, stopped by SIGTERM, killed, finished. The whole set passes within 45 steps."""
    folder = tmp_path_factory.mktemp("storied")
    run, config = folder / "run", write_small_config(damaged_shards, folder)
    options = (
        "train.max_steps=60",
        "train.global_batch_size=32",
        "train.micro_batch_size=16",
        "checkpoint.every_steps=5",
        "eval.every_epochs=0.3",
    )
    for steps, number in ((8, signal.SIGKILL), (12, signal.SIGTERM), (9, signal.SIGKILL)):
        job = train(1, config, run, *options)
        assert wait_for_steps(job, run, steps), job.outputs()
        job.signal(number)
        job.wait()
    train(1, config, run, *options).succeed()
    return run


@pytest.fixture
def copied_run(storied_run: Path, tmp_path: Path) -> Path:
    """One that a test may damage."""
    return Path(shutil.copytree(storied_run, tmp_path / "run"))
