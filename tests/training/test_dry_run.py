"""``pipeline.train --dry-run``: it tells what a start would do, with the same sentences, and leaves every file as it was."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from pipeline.errors import UserError
from pipeline.training.dry_run import check_room
from pipeline.training.folder import LOCK, RunLock
from support.ranks import run_forked
from support.small_run import SMALL_MODEL

pytestmark = pytest.mark.multiprocess

NOTHING_WRONG = "the dry run found nothing wrong; no file was written"


def files(folder: Path) -> dict[Path, tuple[int, bytes]]:
    """Time of change and content of every file, the lock's too."""
    return {path: (path.stat().st_mtime_ns, path.read_bytes()) for path in folder.rglob("*") if path.is_file()}


def rows(output: str) -> dict[str, str]:
    """The summary's table."""
    assert NOTHING_WRONG in output, output
    return dict(re.findall(r"^  (\w[\w ]*?)  +(.*)$", output.partition(NOTHING_WRONG)[2], re.MULTILINE))


def dry(config: Path, *overrides: object, processes: int = 1, check: bool = True):
    return run_forked(
        "pipeline.train", "--config", config, "--dry-run", *SMALL_MODEL, *overrides, processes=processes, check=check
    )


def test_it_says_what_a_start_would_do_and_leaves_every_file(small_run: Path, tmp_path: Path) -> None:
    """Guards against a dry run that creates the folder, cleans it up, sets a checkpoint aside, drops rows, or cannot tell where a run
    would go on; the run is one of two processes, the dry run also of one."""
    run = tmp_path / "deep" / "run"
    overrides = [f"output_dir={run}", "train.max_steps=3", "checkpoint.every_steps=1"]
    said = rows(dry(small_run, *overrides, f"data.cache={tmp_path / 'cache'}", processes=2).stdout)
    assert said["run"] == f"{run}: a new run; the last is step 3"
    assert said["batch"] == "16 = 4 x 2 processes x 2"
    assert "1,438 training and 359 validation images, 10 classes" in said["data"]
    assert re.match(r"2 of 2 micro-batches of random images: loss \d\.\d+, gradient norm [\d.]+, ", said["step"])
    assert said["cache"].endswith("all of it fits") and not (tmp_path / "cache").exists()
    assert not run.parent.exists()

    trained = ["--config", small_run, *SMALL_MODEL, *overrides]
    run_forked("pipeline.train", *trained, "train.max_steps=2", processes=2)
    (run / ".lock").write_text(
        '{"pid": 1, "host": "dead", "slurm_job": null, "since": "yesterday"}'
    )  # of a start that was killed
    before = files(run)
    assert rows(dry(small_run, *overrides).stdout)["run"] == f"{run}: resumes from step 2; the last is step 3"
    assert files(run) == before
    assert f"{run} is complete at step 2: nothing to train." in dry(small_run, *overrides, "train.max_steps=2").stdout

    part = run / "checkpoints" / "step-00000002" / "part-00001.safetensors"
    part.write_bytes(part.read_bytes()[:-1])
    before = files(run)
    result = dry(small_run, *overrides)
    assert rows(result.stdout)["run"] == f"{run}: resumes from step 1; the last is step 3"
    assert "it would be set aside, the run resumes from step 1" in result.stderr
    assert files(run) == before


@pytest.mark.parametrize(
    "overrides",
    [
        ["model.num_classes=7"],
        ["data.path=nowhere"],
        ["output_dir=/dev/null/run"],
        ["train.micro_batch_size=12"],
        ["model.image_size=60"],
        ["train.init_from=nowhere"],
    ],
    ids=lambda overrides: overrides[0],
)
def test_what_stops_a_start_stops_a_dry_run(overrides: list[str], small_run: Path, tmp_path: Path) -> None:
    """Guards against two sets of checks that drift apart."""
    start = run_forked("pipeline.train", "--config", small_run, *SMALL_MODEL, *overrides, check=False)
    result = dry(small_run, *overrides, check=False)
    assert (result.returncode, result.stderr) == (2, start.stderr) and start.returncode == 2
    assert start.stderr.startswith("error: ") and len(start.stderr.splitlines()) == 1
    assert not (tmp_path / "run").exists()


def test_a_run_that_another_process_trains(small_run: Path, tmp_path: Path) -> None:
    """Guards against a dry run that waits for the folder's lock, takes it, or says nothing of it."""
    lock, held = RunLock.take(tmp_path / "run"), tmp_path / "run" / LOCK  # to open it here would release it
    try:
        before = held.stat()
        start = run_forked("pipeline.train", "--config", small_run, *SMALL_MODEL, check=False)
        result = dry(small_run, check=False)
        assert "can have only one run at a time" in result.stderr and result.stderr == start.stderr
        assert held.stat().st_mtime_ns == before.st_mtime_ns and list(held.parent.iterdir()) == [held]
    finally:
        lock.release()


def test_a_disk_without_room_for_a_checkpoint(tmp_path: Path) -> None:
    """Guards against a run that finds out at its first checkpoint, hours later."""
    check_room(tmp_path / "not" / "there", 1)
    with pytest.raises(UserError, match=r"checkpoints cannot be written: its disk is full .*free some space"):
        check_room(tmp_path, 10**18)
