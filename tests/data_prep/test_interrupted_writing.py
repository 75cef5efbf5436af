"""Kills, Ctrl-C, job arrays and two runs in one folder: nothing is lost, nothing is written twice."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from data_prep.sources import ImageFolder
from data_prep.writer import Share, write_shards
from pipeline.errors import UserError
from support.launching import PATIENCE, REPOSITORY, clean_environment, run_script
from support.sharding import SHARDER, digests


def test_a_killed_run_is_finished_without_writing_a_shard_twice(digits_images: Path, tmp_path: Path) -> None:
    """Guards against days of sharding lost to one kill, and against workers that outlive their parent."""
    output, whole = tmp_path / "shards", tmp_path / "whole"
    arguments = [SHARDER, "--source", digits_images, "--output", output, "--split", "train", "--samples-per-shard", 40]
    process = subprocess.Popen(
        [sys.executable, *map(str, arguments), "--workers", "2"],
        cwd=REPOSITORY,
        env=clean_environment(),
        start_new_session=True,
    )
    deadline = time.monotonic() + PATIENCE
    while len(list(output.glob(".*.finished.npz"))) < 5:
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.002)
    os.kill(process.pid, signal.SIGKILL)  # the parent alone: its workers must notice
    process.wait()
    while _session_members(process.pid):
        assert time.monotonic() < deadline, "workers outlive their parent"
        time.sleep(0.01)
    assert not (output / "manifest.json").exists()
    finished = {path.name[1:13] for path in output.glob(".*.finished.npz")}
    assert 4 <= len(finished) < 36
    times = {path.name: path.stat().st_mtime_ns for name in finished for path in output.glob(f"{name}.*")}

    other = run_script(*arguments, "--seed", 7, check=False)
    assert "holds an unfinished train set of another run (seed must be 7, got 0)" in other.stderr
    run_script(*arguments)
    assert times == {name: (output / name).stat().st_mtime_ns for name in times}
    write_shards(ImageFolder(digits_images, "train"), whole, "train", 40, workers=1)
    assert digests(output) == digests(whole)


@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGHUP, signal.SIGTERM])
def test_ctrl_c_is_one_line_and_keeps_what_is_finished(sent: signal.Signals, digits_images: Path, tmp_path: Path) -> None:
    """Guards against a screen full of the workers' tracebacks, half-written files that stay, and workers of a closed terminal."""
    output = tmp_path / "shards"
    arguments = [SHARDER, "--source", digits_images, "--output", output, "--split", "train", "--samples-per-shard", 20]
    process = _started(arguments, output, finished=1)
    if sent == signal.SIGTERM:
        os.kill(process.pid, sent)
    else:
        os.killpg(process.pid, sent)  # as a terminal does
    _, stderr = process.communicate(timeout=PATIENCE)
    assert process.returncode == 130 and stderr.endswith(
        "stopped; the same command continues from what was saved, if anything was\n"
    )
    assert "Traceback" not in stderr and (sent != signal.SIGINT or stderr.count("\n") == 1)
    assert not [pid for pid in _session_members(process.pid) if b"spawn_main" in Path(f"/proc/{pid}/cmdline").read_bytes()]
    assert list(output.glob(".*.finished.npz")) and not list(output.glob(".*.tmp"))


def test_a_killed_worker_is_one_line(digits_images: Path, tmp_path: Path) -> None:
    """Guards against a run that waits for ever for a worker that the system killed for its memory, and against a traceback."""
    output = tmp_path / "shards"
    arguments = [SHARDER, "--source", digits_images, "--output", output, "--split", "train", "--samples-per-shard", 20]
    process = _started(arguments, output, finished=1)
    workers = [pid for pid in _session_members(process.pid) if b"spawn_main" in Path(f"/proc/{pid}/cmdline").read_bytes()]
    os.kill(workers[0], signal.SIGKILL)
    _, stderr = process.communicate(timeout=PATIENCE)
    assert process.returncode == 2 and stderr.count("\n") == 1, stderr
    assert "one of 2 worker processes was killed or ran out of memory" in stderr


def test_a_finished_shard_that_was_changed_is_written_again(digits_images: Path, tmp_path: Path) -> None:
    """Guards against a manifest over a tar that somebody cut off between two runs."""
    source, output = ImageFolder(digits_images, "val"), tmp_path / "shards"
    assert write_shards(source, output, "val", 100, share=Share(0, 2)) is None
    whole = (output / "val-000000.tar").read_bytes()
    (output / "val-000000.tar").write_bytes(whole[:1000])
    (output / ".val-000002.tar.123.tmp").write_bytes(b"left by a killed run")
    write_shards(source, output, "val", 100)
    assert (output / "val-000000.tar").read_bytes() == whole
    assert not list(output.glob(".val*"))


def test_tasks_write_their_own_shards_and_the_last_one_the_manifest(digits_images: Path, tmp_path: Path) -> None:
    """Guards against a job array whose shards nobody joins, or whose result depends on the number of tasks."""
    source = ImageFolder(digits_images, "val")
    for task in (2, 0):
        assert write_shards(source, tmp_path / "array", "val", 50, share=Share(task, 3)) is None
        assert not (tmp_path / "array" / "manifest.json").exists()
    assert write_shards(source, tmp_path / "array", "val", 50, share=Share(1, 3)).samples == 359
    write_shards(source, tmp_path / "alone", "val", 50, workers=2)
    assert digests(tmp_path / "array") == digests(tmp_path / "alone")
    assert write_shards(source, tmp_path / "array", "val", 50, share=Share(1, 3)).samples == 359
    error = run_script(SHARDER, "--source", digits_images, "--output", tmp_path, "--task", 3, "--tasks", 3, check=False)
    assert "--task must be 0 to 2 with --tasks 3, got" in error.stderr


def test_two_runs_do_not_write_the_same_shard(digits_images: Path, tmp_path: Path) -> None:
    """Guards against a requeued job that meets its former self."""
    holder = (
        "import sys, time\nfrom pathlib import Path\nfrom data_prep.output import FolderLock\n"
        "with FolderLock(Path(sys.argv[1])) as lock:\n    lock.take_shards('val', [1])\n    print('held', flush=True)\n    sys.stdin.read()\n"
    )
    command = [sys.executable, "-c", holder, str(tmp_path)]
    environment = clean_environment(PYTHONPATH=str(REPOSITORY))
    with subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "held\n"
        source = ImageFolder(digits_images, "val")
        with pytest.raises(UserError, match="val shard 1 is being written by another process"):
            write_shards(source, tmp_path, "val", 100)
        assert write_shards(source, tmp_path, "val", 100, share=Share(0, 2)) is None
        process.stdin.close()
    assert write_shards(source, tmp_path, "val", 100, share=Share(1, 2)).samples == 359


def _started(arguments: list, output: Path, finished: int) -> subprocess.Popen:
    """The sharder in a session of its own, once it has finished that many shards."""
    process = subprocess.Popen(
        [sys.executable, *map(str, arguments), "--workers", "2"],
        cwd=REPOSITORY,
        env=clean_environment(),
        start_new_session=True,
        stderr=subprocess.PIPE,
        text=True,
    )
    deadline = time.monotonic() + PATIENCE
    while len(list(output.glob(".*.finished.npz"))) < finished:
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.002)
    return process


def _session_members(session: int) -> list[int]:
    """Processes of a session that live."""
    members = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            state, _, _, found = (entry / "stat").read_text().rpartition(")")[2].split()[:4]
        except OSError:  # it ended meanwhile
            continue
        if int(found) == session and state != "Z":
            members.append(int(entry.name))
    return members
