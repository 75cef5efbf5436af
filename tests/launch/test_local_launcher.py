"""``launch/local.sh`` with small programs instead of the training."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from faults.nodes import Node, limited
from support.launching import PATIENCE, REPOSITORY, clean_environment

pytestmark = pytest.mark.multiprocess

TOY = """
import json, os, signal, sys, time
rank, what = os.environ["RANK"], sys.argv[1]
print(json.dumps(dict(os.environ)), flush=True)
print(f"stderr of rank {rank}", file=sys.stderr, flush=True)
if what == "save-at-hangup":
    signal.signal(signal.SIGHUP, lambda *_: sys.exit(75))
with open(os.path.join(os.environ["NOTES"], rank), "w") as file:
    json.dump({"pid": os.getpid(), **os.environ}, file)
if what == f"rank{rank}-fails":
    sys.exit(7)
if what == f"rank{rank}-eats":
    kept = bytearray(1 << 30)
if what != "all-succeed":
    time.sleep(10_000)  # longer than anybody is waited for: who has ended was ended
"""


class Launch:
    """``launch/local.sh processes -- toy what``; each rank leaves its pid and environment in a file."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.notes = folder, folder / "notes"
        (folder / "toy.py").write_text(TOY)
        self.notes.mkdir()

    def start(self, processes: object, *words: str, **more: object) -> subprocess.Popen:
        return subprocess.Popen(
            [str(REPOSITORY / "launch" / "local.sh"), str(processes), *words],
            cwd=self.folder, env=clean_environment(NOTES=str(self.notes)), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **more,
        )  # fmt: skip

    def start_two_that_sleep(self, what: str = "sleep") -> subprocess.Popen:
        process = self.start(2, "--", "toy", what)
        deadline = time.monotonic() + PATIENCE
        while len(list(self.notes.iterdir())) < 2 and time.monotonic() < deadline:
            time.sleep(0.1)
        time.sleep(0.2)  # the notes are written, not only begun
        assert len(self.alive()) == 2
        return process

    def ranks(self) -> list[dict]:
        return [json.loads(path.read_text()) for path in sorted(self.notes.iterdir())]

    def alive(self) -> list[int]:
        return [rank["pid"] for rank in self.ranks() if _state(rank["pid"]) not in ("Z", None)]


def _state(pid: int) -> str | None:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][0]
    except OSError:
        return None


@pytest.fixture
def launch(tmp_path: Path) -> Iterator[Launch]:
    started = Launch(tmp_path)
    yield started
    for pid in started.alive():
        os.kill(pid, signal.SIGKILL)


@pytest.mark.parametrize("processes", [1, 2])
def test_every_rank_knows_its_place(processes: int, launch: Launch) -> None:
    """Guards against ranks that are missing or doubled, meet at different ports, or write over each other's output."""
    process = launch.start(processes, "--", "toy", "all-succeed")
    output, errors = process.communicate(timeout=PATIENCE)
    assert process.returncode == 0, errors
    ranks = launch.ranks()
    assert [(rank["RANK"], rank["LOCAL_RANK"]) for rank in ranks] == [(str(i), str(i)) for i in range(processes)]
    assert {(rank["WORLD_SIZE"], rank["LOCAL_WORLD_SIZE"], rank["MASTER_ADDR"]) for rank in ranks} == {
        (str(processes),) * 2 + ("127.0.0.1",)
    }
    assert len({rank["MASTER_PORT"] for rank in ranks}) == 1
    (secret,) = {rank["PERVIT_JOB_SECRET"] for rank in ranks}
    assert re.fullmatch("[0-9a-f]{64}", secret)
    assert json.loads(output)["RANK"] == "0"
    assert errors == "stderr of rank 0\n"


@pytest.mark.parametrize("failing", [0, 1])
def test_failure_of_one_ends_all(failing: int, launch: Launch) -> None:
    """Guards against a rank that waits for a dead one until somebody looks, and against a failure that leaves no trace."""
    process = launch.start(2, "--", "toy", f"rank{failing}-fails")
    _, errors = process.communicate(timeout=PATIENCE)
    assert process.returncode == 7
    assert launch.alive() == []
    assert f"stderr of rank {failing}" in errors
    if failing == 1:
        assert "rank 1 failed with exit code 7" in errors


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)])
def test_signal_ends_all(number: int, code: int, launch: Launch) -> None:
    """Guards against training that goes on unseen after Ctrl-C."""
    process = launch.start_two_that_sleep()
    process.send_signal(number)
    process.communicate(timeout=PATIENCE)
    assert process.returncode == code
    assert launch.alive() == []


def test_closed_terminal(launch: Launch) -> None:
    """Guards against a hang-up, of which the shell and the system each send one, that ends ranks before they have saved."""
    process = launch.start_two_that_sleep("save-at-hangup")
    process.send_signal(signal.SIGHUP)
    process.send_signal(signal.SIGHUP)
    process.communicate(timeout=PATIENCE)
    assert process.returncode == 75
    assert launch.alive() == []


def test_nohup(launch: Launch) -> None:
    """Guards against a hang-up that ends what was started with nohup."""
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)  # inherited
    try:
        process = launch.start_two_that_sleep()
    finally:
        signal.signal(signal.SIGHUP, before)
    process.send_signal(signal.SIGHUP)
    time.sleep(1)
    assert len(launch.alive()) == 2
    process.terminate()
    process.communicate(timeout=PATIENCE)
    assert process.returncode == 143


def test_killed_launcher_ends_all(launch: Launch) -> None:
    """Guards against ranks that nobody waits for any longer."""
    process = launch.start_two_that_sleep()
    process.kill()
    process.communicate(timeout=PATIENCE)  # at the end of the pipe, which the ranks hold
    deadline = time.monotonic() + PATIENCE
    while launch.alive() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert launch.alive() == []


@pytest.mark.parametrize("words", [("0", "--", "toy"), ("two", "--", "toy"), ("2", "toy"), ("2", "--")])
def test_bad_words(words: tuple[str, ...], launch: Launch) -> None:
    """Guards against a usage mistake that starts something, or is answered in bash's words."""
    process = launch.start(*words)
    output, errors = process.communicate(timeout=PATIENCE)
    assert (process.returncode, output) == (2, "")
    assert errors.startswith(f"error: the arguments must be 'N -- MODULE ARGS...', got '{' '.join(words)}'")
    assert len(errors.splitlines()) == 1


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_is_killed_for_lack_of_memory(rank: int, launch: Launch) -> None:
    """Guards against a job that ends with a number alone, or with a line of the shell's, where the kernel has killed a rank."""
    node = Node(0, holder=None)
    with limited(node, "memory", bytes_=256 << 20) as group:
        process = launch.start(2, "--", "toy", f"rank{rank}-eats", preexec_fn=lambda: (group / "cgroup.procs").write_text("0"))
        _, errors = process.communicate(timeout=PATIENCE)
        assert process.returncode == 128 + signal.SIGKILL and launch.alive() == []
    sentence = f"rank {rank} failed with exit code 137, killed (for lack of memory? see dmesg)"
    said = [line for line in errors.splitlines() if not line.startswith("stderr of rank ")]
    assert said == [sentence + ":" * (rank != 0)], errors
