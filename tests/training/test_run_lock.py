"""Two runs never share a folder, and no crash leaves a folder locked."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path

import pytest

from pipeline.errors import UserError
from pipeline.files import lock_bytes
from pipeline.logs import console
from pipeline.training.folder import LOCK, RunLock
from support.launching import REPOSITORY, clean_environment

HOLDER = """
import os, sys, time
from pathlib import Path
from pipeline.training.folder import LOCK, RunLock
lock = RunLock.take(Path(sys.argv[1]))
if sys.argv[2] == "with a child":
    if os.fork() == 0:
        time.sleep(600)
if sys.argv[2] == "with a child that ends":
    child = os.fork()
    if child == 0:
        os.close(lock._descriptor)
        os._exit(0)
    os.waitpid(child, 0)
print("held", flush=True)
sys.stdin.read()
if sys.argv[2] == "releases":
    lock.release()
    time.sleep(600)
"""


# Starts that are refused as soon as they have the folder: 40 times each, beside others that do the same.
REFUSED = """
import os, sys
from pathlib import Path
from pipeline.errors import UserError
from pipeline.training.folder import LOCK, RunLock
folder, alone, held = Path(sys.argv[1]), Path(sys.argv[2]), 0
sys.stdin.read()
while held < 40:
    try:
        lock = RunLock.take(folder)
    except UserError as error:
        assert any(word in str(error) for word in ("only one run at a time", "start again", "No such file or directory", "File exists")), error
        continue
    os.close(os.open(alone, os.O_CREAT | os.O_EXCL))  # fails if another one holds the folder too
    alone.unlink()
    lock.abandon()
    lock.release()  # where another one has created the folder it is not this one's to remove
    held += 1
"""


def holder(run_dir: Path, how: str = "", **environment: str) -> subprocess.Popen:
    """Another process, once it holds the folder; it ends, or releases the lock, when its stdin is closed."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(run_dir), how],
        env=clean_environment(PYTHONPATH=str(REPOSITORY), **environment),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert process.stdout.readline() == "held\n"
    return process


def end(process: subprocess.Popen) -> None:
    """The process and its children."""
    with suppress(ProcessLookupError):  # all of them are gone already
        os.killpg(process.pid, signal.SIGKILL)
    process.communicate()


def test_a_second_run_is_refused_and_told_who_holds_the_folder(tmp_path: Path) -> None:
    """Guards against two runs that write each other's checkpoints, and against a refusal that names nobody."""
    process = holder(tmp_path, SLURM_JOB_ID="17")
    with pytest.raises(UserError) as error:
        RunLock.take(tmp_path)
    end(process)
    host = os.uname().nodename
    assert f"{tmp_path} is being trained by process {process.pid} on {host} (Slurm job 17, since 20" in str(error.value)
    assert str(error.value).endswith(
        "), and a folder can have only one run at a time: wait for it, stop it, or choose another output_dir."
    )


def test_a_task_of_a_job_array_is_named_as_slurm_names_it(tmp_path: Path) -> None:
    """Guards against a holder that `scancel` takes for the whole array, or that `squeue` does not list."""
    process = holder(tmp_path, SLURM_JOB_ID="19", SLURM_ARRAY_JOB_ID="17", SLURM_ARRAY_TASK_ID="2")
    with pytest.raises(UserError, match=r" \(Slurm job 17_2, since 20"):
        RunLock.take(tmp_path)
    end(process)


def test_a_refused_run_does_not_free_the_folder_for_a_third(tmp_path: Path) -> None:
    """Guards against a refusal that closes the file and so drops, or overwrites, the holder's claim."""
    process = holder(tmp_path)
    for _ in range(2):
        with pytest.raises(UserError, match=f"process {process.pid} on "):
            RunLock.take(tmp_path)
    end(process)


@pytest.mark.parametrize("how", ["", "with a child"])
def test_a_killed_run_leaves_no_lock(how: str, tmp_path: Path) -> None:
    """Guards against a folder that stays locked after a crash, also when a child of the run lives on."""
    process = holder(tmp_path, how)
    process.kill()
    process.wait()
    try:
        RunLock.take(tmp_path).release()
    finally:
        end(process)


def test_a_child_that_ends_takes_no_lock_with_it(tmp_path: Path) -> None:
    """Guards against a worker process whose end releases the run's lock: closing a handle does, in the process that holds it."""
    process = holder(tmp_path, "with a child that ends")
    with pytest.raises(UserError, match="can have only one run at a time"):
        RunLock.take(tmp_path)
    end(process)


def test_the_same_process_cannot_take_it_twice(tmp_path: Path) -> None:
    """Guards against the POSIX rule that a second handle of the same process is granted and, closed, releases the first."""
    lock = RunLock.take(tmp_path)
    with pytest.raises(UserError, match=f"is being trained by process {os.getpid()} on"):
        RunLock.take(tmp_path / ".." / tmp_path.name)
    lock.release()
    lock.release()  # once more changes nothing
    process = holder(tmp_path)
    with pytest.raises(UserError, match=f"process {process.pid} on"):
        RunLock.take(tmp_path)
    end(process)


def test_a_requeued_job_waits_for_its_former_life(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Guards against a requeued job that gives up because its former self needs a second to die; and against silence meanwhile."""
    console.install()
    process = holder(tmp_path, "releases")
    with pytest.raises(UserError, match="can have only one run at a time"):
        RunLock.take(tmp_path, wait_seconds=0.1)
    assert capsys.readouterr().out.count("waiting up to 0.1 s for its end") == 1
    threading.Timer(1, process.stdin.close).start()
    begun = time.monotonic()
    RunLock.take(tmp_path, wait_seconds=600).release()
    assert time.monotonic() - begun < 300  # not to the end of its patience
    assert capsys.readouterr().out.count(f"is still held by process {process.pid} on") == 1
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def test_a_lock_that_the_system_refuses_is_one_sentence(tmp_path: Path) -> None:
    """Guards against a traceback on a file system without locks. The refusal here is that of a handle that cannot be written."""
    (tmp_path / ".lock").touch()
    descriptor = os.open(tmp_path / ".lock", os.O_RDONLY)
    with pytest.raises(UserError, match=r"\.lock requires a file system with POSIX locks, which keep two writers apart, got "):
        lock_bytes(descriptor, tmp_path / LOCK)
    os.close(descriptor)


def test_a_folder_that_cannot_be_written_is_one_sentence(tmp_path: Path) -> None:
    """Guards against a traceback where the output lies on a read-only file system or its file system has no locks."""
    with pytest.raises(UserError, match=r"output_dir /proc/1 must be a writable folder \(.*\): choose another output_dir"):
        RunLock.take(Path("/proc/1"))
    script = (
        "import subprocess, sys\nfrom pathlib import Path\nfrom pipeline.training.folder import RunLock\n"
        "subprocess.run(['mount', '-t', 'tmpfs', '-o', 'ro', 'none', sys.argv[1]], check=True)\nRunLock.take(Path(sys.argv[1]))"
    )
    command = ["unshare", "--mount", sys.executable, "-c", script, str(tmp_path)]
    environment = clean_environment(PYTHONPATH=str(REPOSITORY))
    result = subprocess.run(command, env=environment, capture_output=True, text=True)
    if "CalledProcessError" in result.stderr or "unshare" in result.stderr:
        pytest.skip("needs the right to mount a file system")
    assert (
        f"output_dir {tmp_path} must be a writable folder (Read-only file system): choose another output_dir." in result.stderr
    )


def test_a_refused_start_leaves_no_folder_that_it_created(tmp_path: Path) -> None:
    """Guards against folders with nothing but a lock, and against the removal of what was there before or holds anything else."""
    RunLock.take(tmp_path / "new").abandon()
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "mine").mkdir()
    RunLock.take(tmp_path / "mine").abandon()
    assert [path.name for path in tmp_path.rglob("*")] == ["mine", ".lock"]
    lock = RunLock.take(tmp_path / "used")
    (tmp_path / "used" / "config.yaml").touch()
    lock.abandon()
    assert sorted(path.name for path in (tmp_path / "used").iterdir()) == [".lock", "config.yaml"]
    with pytest.raises(UserError, match="can have only one run at a time"):  # its threads may still be writing
        RunLock.take(tmp_path / "used")
    (tmp_path / "nowhere").mkdir()
    (tmp_path / "nowhere" / ".lock").symlink_to(tmp_path / "x" / "y")
    with pytest.raises(UserError, match="nowhere must be a writable folder"):
        RunLock.take(tmp_path / "nowhere")


def test_refused_starts_that_meet_never_share_a_folder(tmp_path: Path) -> None:
    """Guards against two runs in one folder, one of which holds the lock of a file that a third has removed; and against an error
    because a folder is removed between two system calls."""
    command = [sys.executable, "-c", REFUSED, str(tmp_path / "run"), str(tmp_path / "alone")]
    environment = clean_environment(PYTHONPATH=str(REPOSITORY))
    starts = [
        subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, stderr=subprocess.PIPE, text=True) for _ in range(4)
    ]
    for process in starts:
        process.stdin.close()
    errors = [process.stderr.read() for process in starts]
    assert [process.wait() for process in starts] == [0] * 4, errors
    assert not (tmp_path / "alone").exists()
