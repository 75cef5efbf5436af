"""A file system that refuses a save, for a while or for good: a small one in memory, really full, really read-only."""

from __future__ import annotations

import itertools
import shutil
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from pipeline.checkpoint.folder import latest_step, saved_steps
from pipeline.errors import USER_ERROR
from support.ranks import Job, steps_taken, train

pytestmark = pytest.mark.multiprocess

INODES = 100
SIZE_KB = 12 << 10  # a checkpoint has 2.8 MB; the last one, the next one and something to fill
EVERY, RETRY_SECONDS = 6, 8
OPTIONS = (f"checkpoint.every_steps={EVERY}", "checkpoint.keep_last=1", f"checkpoint.retry_seconds={RETRY_SECONDS}")


@contextmanager
def small_disk(folder: Path) -> Iterator[None]:
    """A file system of 12 MB and some files in a folder."""
    folder.mkdir(parents=True)
    command = ["mount", "-t", "tmpfs", "-o", f"size={SIZE_KB}k,nr_inodes={INODES}", "tmpfs", folder]
    mounted = subprocess.run(command, capture_output=True, text=True, check=False)
    if mounted.returncode:
        pytest.skip(f"cannot mount a file system here: {mounted.stderr.strip()}")
    try:
        yield
    finally:
        subprocess.run(["umount", "--lazy", folder], check=True)


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Path]:
    """A run folder whose checkpoints lie on a small disk of their own."""
    with small_disk(tmp_path / "run" / "checkpoints"):
        yield tmp_path / "run"


def fill(folder: Path, leave_kb: int = 0) -> Path:
    """Write a file until nothing more fits, or that much is left."""
    filler = folder / "filler"
    with open(filler, "ab", buffering=0) as file:
        try:
            while shutil.disk_usage(folder).free > leave_kb << 10:
                file.write(bytes(4096))
        except OSError:  # full
            pass
    return filler


def use_up_inodes(folder: Path) -> list[Path]:
    """Create empty files until the file system has no inode for another one; all of them so far."""
    with suppress(OSError):
        for number in itertools.count():
            (folder / f"empty-{number}").touch()
    return list(folder.glob("empty-*"))


def remount(folder: Path, mode: str) -> None:
    subprocess.run(["mount", "-o", f"remount,{mode}", folder], check=True)


def retries(job: Job) -> int:
    """How often a process has said that it tries again."""
    return sum(job.stderr(rank).count("trying again for") for rank in range(job.world_size))


def wait_for_retry(job: Job, run: Path, already: int, refuse: Callable[[], object] = lambda: None) -> None:
    """Until a process says that it tries again, and the training has gone on meanwhile.

    Args:
        refuse: called until then: a checkpoint that was on its way out has given its space back since the last time.
    """

    def tried_again() -> bool:
        refuse()
        return retries(job) > already

    assert job.until(tried_again), job.outputs()
    steps = steps_taken(run)
    assert job.until(lambda: steps_taken(run) > steps), "training waits for the disk"


@pytest.mark.long
def test_a_disk_that_refuses_a_save(small_run: Path, run: Path) -> None:
    """Guards against a run that ends because the disk was full, out of inodes or read-only for a minute, and, where it stays so, against one that
    hangs, leaves half a checkpoint in the way or spoils the former one."""
    checkpoints = run / "checkpoints"
    job = train(2, small_run, run, *OPTIONS)
    job.until(lambda: latest_step(run) == EVERY)

    remount(checkpoints, "ro")
    wait_for_retry(job, run, already=0)
    remount(checkpoints, "rw")
    assert job.until(lambda: latest_step(run) > EVERY), job.outputs()

    before, already = latest_step(run), retries(job)
    wait_for_retry(job, run, already, lambda: fill(checkpoints))
    fill(checkpoints).unlink()
    assert job.until(lambda: latest_step(run) > before), job.outputs()

    before, already = latest_step(run), retries(job)
    wait_for_retry(job, run, already, lambda: use_up_inodes(checkpoints))
    assert "0 inodes free: too many files" in job.stderr(0) + job.stderr(1)
    for file in use_up_inodes(checkpoints):
        file.unlink()
    assert job.until(lambda: latest_step(run) > before), job.outputs()

    wait_for_retry(job, run, retries(job), lambda: fill(checkpoints))
    assert job.wait() == [USER_ERROR] * 2, job.outputs()
    for rank in range(2):
        *_, sentence = job.stderr(rank).splitlines()
        assert sentence.startswith("error: ") and "No space left on device" in sentence, sentence
        assert "free some space" in sentence and "Traceback" not in job.stderr(rank)
    (last,) = saved_steps(run)
    assert sorted(path.name for path in checkpoints.iterdir()) == ["filler", f"step-{last:08d}"]

    (checkpoints / "filler").unlink()
    job = train(2, small_run, run, *OPTIONS, f"train.max_steps={last + 2}").succeed()
    assert f"steps {last} to {last + 2}" in job.stdout()


def test_a_disk_that_is_nearly_full_takes_the_log(small_run: Path, tmp_path: Path) -> None:
    """Guards against half a checkpoint that takes the last bytes of the disk, so that the log cannot be written and the run ends
    although space was made in time."""
    run = tmp_path / "run"
    with small_disk(run):
        job = train(2, small_run, run, *OPTIONS, f"train.max_steps={2 * EVERY + 2}")
        job.until(lambda: latest_step(run) == EVERY)
        filler = fill(run, leave_kb=1000)  # a process's part has 1400 kB
        wait_for_retry(job, run, already=0)
        filler.unlink()
        job.succeed()
        assert latest_step(run) == 2 * EVERY + 2
