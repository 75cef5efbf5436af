"""A rank that dies, stops or hangs: the others name it and end. Real processes, real signals; all cases run at the same time."""

from __future__ import annotations

import multiprocessing
import os
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from torch.distributed.flight_recorder.components.loader import read_dump

from pipeline.cluster.beats import Beat, Status
from pipeline.cluster.host import cause_on
from pipeline.cluster.lost_ranks import Judge
from pipeline.cluster.nccl import FLIGHT_RECORD
from pipeline.config import DistributedConfig
from pipeline.errors import RANK_LOST, USER_ERROR
from support.launching import PATIENCE, REPOSITORY, clean_environment
from support.ranks import meeting_point

pytestmark = pytest.mark.multiprocess

FOLDER = Path(__file__).parent
FAULT_STEP = 30  # of ring.py, 50 ms each
LIMIT = 5  # silence_timeout and progress_timeout of ring.py
BOUND = LIMIT + 10  # what heartbeat.py promises, in seconds from the fault to the end of all


@dataclass
class Ring:
    """Ranks of one job and what became of them."""

    folder: Path
    ranks: int
    fault: str
    victim: int
    number: signal.Signals | None = None  # sent to the victim
    processes: list[multiprocessing.Process] = field(default_factory=list)
    fault_at: float = 0.0
    ended_at: dict[int, float] = field(default_factory=dict)  # rank -> time

    def start(self, context: multiprocessing.context.ForkServerContext) -> None:
        from faults import ring

        self.folder.mkdir()
        common = {**meeting_point(self.ranks), "LOCAL_WORLD_SIZE": self.ranks}
        steps = 100_000 if self.number else FAULT_STEP + 10
        for rank in range(self.ranks):
            environment = {key: str(value) for key, value in (common | {"RANK": rank, "LOCAL_RANK": rank}).items()}
            process = context.Process(target=ring.forked_rank, args=(environment, steps, self.fault, self.victim, self.folder))
            process.start()
            self.processes.append(process)

    def at(self, rank: int) -> tuple[int, int]:
        """Pid and step of a rank, zeros before its first step."""
        note = self.folder / f"{rank}.at"
        return tuple(map(int, note.read_text().split())) if note.exists() else (0, 0)

    def look(self) -> None:
        """Strike when the time has come; note who has ended."""
        if not self.fault_at and min(self.at(rank)[1] for rank in range(self.ranks)) >= FAULT_STEP - 1:
            if self.number:
                os.kill(self.processes[self.victim].pid, self.number)
            self.fault_at = time.monotonic()
        for rank, process in enumerate(self.processes):
            if not process.is_alive():
                self.ended_at.setdefault(rank, time.monotonic())

    @property
    def cannot_end(self) -> bool:
        """Whether the victim is stopped, or holds its interpreter's lock: only SIGKILL ends it."""
        return self.number == signal.SIGSTOP or self.fault == "hold the lock"

    @property
    def over(self) -> bool:
        return len(self.ended_at) == self.ranks - self.cannot_end

    @property
    def others(self) -> list[int]:
        return [rank for rank in range(self.ranks) if rank != self.victim]

    def stderr(self, rank: int) -> str:
        return (self.folder / f"{rank}.stderr").read_text()


CASES = {  # ranks, fault, victim, signal
    "rank 1 stopped": (3, "none", 1, signal.SIGSTOP),
    "rank 0 stopped": (3, "none", 0, signal.SIGSTOP),
    "rank 1 killed": (3, "none", 1, signal.SIGKILL),
    "rank 0 killed": (2, "none", 0, signal.SIGKILL),
    "rank 3 of 5 stopped": (5, "none", 3, signal.SIGSTOP),
    "rank 1 holds the lock": (2, "hold the lock", 1, None),
    "rank 1 hangs": (3, "hang", 1, None),
    "rank 0 hangs": (2, "hang", 0, None),
    "rank 1 errs": (3, "err", 1, None),
    "rank 0 errs": (2, "err", 0, None),
    "all well": (3, "leave late", 1, None),
}


@pytest.fixture(scope="module")
def rings(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Ring]]:
    """All cases, run to their end. PyTorch and DeepSpeed are imported once, in the process from which the ranks fork."""
    folder = tmp_path_factory.mktemp("rings")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", f"{REPOSITORY}:{FOLDER.parent}")
        patch.setenv("OMP_NUM_THREADS", "1")
        patch.setenv("TORCH_CPP_LOG_LEVEL", "ERROR")  # as launch/local.sh does
        for name in [name for name in os.environ if name.startswith("SLURM_")]:
            patch.delenv(name)
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["faults.ring"])
        rings = {name: Ring(folder / name, *case) for name, case in CASES.items()}
        for each in rings.values():
            each.start(context)
    deadline = time.monotonic() + PATIENCE
    while time.monotonic() < deadline and not all(each.over for each in rings.values()):
        for each in rings.values():
            each.look()
        time.sleep(0.05)
    yield rings
    for each in rings.values():
        for process in each.processes:
            process.kill()


@pytest.mark.parametrize("name", [name for name in CASES if name != "all well"])
def test_all_end_in_time_and_none_is_left(name: str, rings: dict[str, Ring]) -> None:
    """Guards against processes that wait for a lost one for ever, and hold their GPUs."""
    ring = rings[name]
    assert ring.over, f"ended: {ring.ended_at}"
    assert max(ring.ended_at.values()) - ring.fault_at < BOUND
    expected = USER_ERROR if ring.fault == "err" else RANK_LOST
    assert {ring.processes[rank].exitcode for rank in ring.others} == {expected}


@pytest.mark.parametrize("name", [name for name in CASES if name.endswith(("stopped", "killed", "lock"))])
def test_the_silent_one_is_named(name: str, rings: dict[str, Ring]) -> None:
    """Guards against an error that names the neighbour, or a connection, instead of the lost rank and its step."""
    ring = rings[name]
    pid, step = ring.at(ring.victim)
    for rank in ring.others:
        (sentence,) = ring.stderr(rank).splitlines()
        assert sentence.startswith(f"error: rank {ring.victim} (host {socket.gethostname()}, pid {pid}) ")
        named = int(sentence.partition("from step ")[2].partition(",")[0])
        assert 0 < named <= step + 1  # of its last heartbeat, which is up to a beat old
        assert "ended without a word" in sentence if name == "rank 0 killed" else "sent no heartbeat for" in sentence


@pytest.mark.parametrize("name", ["rank 1 hangs", "rank 0 hangs"])
def test_the_hanging_one_is_named_and_shows_where(name: str, rings: dict[str, Ring]) -> None:
    """Guards against an error that names one of those who wait, and against a hang of which nobody learns the place."""
    ring = rings[name]
    for rank in range(ring.ranks):
        sentence, *traceback = ring.stderr(rank).splitlines()
        assert sentence.startswith(f"error: rank {ring.victim} (host ") and f"distributed.progress_timeout {LIMIT}" in sentence
        assert "it is at step 30, reading data, while rank" in sentence and "waits at step 30, training" in sentence
        assert any("in go_round" in line for line in traceback) == (rank == ring.victim)
    assert ring.ended_at[ring.victim] == min(ring.ended_at.values())  # first: launchers show the first one's output


@pytest.mark.parametrize("name", ["rank 1 hangs", "rank 0 killed"])
def test_each_that_ends_after_a_fault_leaves_a_record_of_its_collectives(name: str, rings: dict[str, Ring]) -> None:
    """Guards against a fault of which nobody can tell which rank had begun which collective."""
    ring, begun = rings[name], {}
    for rank in range(ring.ranks) if ring.fault == "hang" else ring.others:
        dump = read_dump(FLIGHT_RECORD, str(ring.folder / f"{FLIGHT_RECORD}{rank}"))  # as torchfrtrace reads it
        last = max((entry for entry in dump["entries"]), key=lambda entry: entry["record_id"])
        assert last["profiling_name"] == "gloo:all_reduce" and last["input_sizes"] == [[1]]
        begun[rank] = last["collective_seq_id"]
    if ring.fault == "hang":  # the victim did not begin the one that the others wait for
        assert {begun[rank] - begun[ring.victim] for rank in ring.others} == {1}
    assert not list(rings["all well"].folder.glob(f"{FLIGHT_RECORD}*"))


@pytest.mark.parametrize("name", ["rank 1 errs", "rank 0 errs"])
def test_last_words_are_repeated(name: str, rings: dict[str, Ring]) -> None:
    """Guards against processes that guess, or wait for a timeout, when one of them knows what is wrong."""
    ring = rings[name]
    assert ring.stderr(ring.victim) == "error: the disk is full: free some space.\n"
    assert ring.processes[ring.victim].exitcode == USER_ERROR
    for rank in ring.others:
        (sentence,) = ring.stderr(rank).splitlines()
        assert sentence.startswith(f"error: rank {ring.victim} (host ")
        assert sentence.endswith("ended at step 30, reading data: the disk is full: free some space.")


def test_a_normal_end_is_quiet(rings: dict[str, Ring]) -> None:
    """Guards against a false alarm when the ranks finish one after the other and rank 0's store goes away."""
    ring = rings["all well"]
    assert [process.exitcode for process in ring.processes] == [0] * 3
    assert [ring.stderr(rank) for rank in range(3)] == [""] * 3
    assert ring.ended_at[0] >= ring.ended_at[1] - 1  # rank 0 has waited for the late one


@pytest.mark.long
def test_the_launcher_ends_a_stopped_rank_and_a_stopped_job_goes_on(tmp_path: Path) -> None:
    """Guards against a stopped process that outlives its job, and against a false alarm when a whole job was suspended."""
    environment = clean_environment(PYTHONPATH=f"{REPOSITORY}:{FOLDER}")
    command = [str(REPOSITORY / "launch" / "local.sh"), "2", "--", "ring", "100000", "none", "1", str(tmp_path)]
    launcher = subprocess.Popen(command, cwd=tmp_path, env=environment, stderr=subprocess.PIPE, text=True)
    ring = Ring(tmp_path, 2, "none", 1)
    wait_for_step(ring, 10)
    pids = [ring.at(rank)[0] for rank in range(2)]
    for number, pause in ((signal.SIGSTOP, LIMIT + 2), (signal.SIGCONT, 0)):
        for pid in pids:
            os.kill(pid, number)
        time.sleep(pause)
    wait_for_step(ring, ring.at(0)[1] + 50)
    assert launcher.poll() is None

    os.kill(pids[1], signal.SIGSTOP)
    stopped_at = time.monotonic()
    _, errors = launcher.communicate(timeout=PATIENCE)
    assert time.monotonic() - stopped_at < BOUND + 5  # local.sh waits 5 s for who does not hear SIGTERM
    assert launcher.returncode == RANK_LOST
    assert errors.count(f"error: rank 1 (host {socket.gethostname()}, pid {pids[1]}) sent no heartbeat") == 1
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)


def wait_for_step(ring: Ring, step: int) -> None:
    deadline = time.monotonic() + PATIENCE
    while min(ring.at(rank)[1] for rank in range(ring.ranks)) < step:
        assert time.monotonic() < deadline
        time.sleep(0.1)


def judged(seconds: int, beats: Callable[[int], list[Beat]]) -> tuple[int, str]:
    """The second in which a judge who reads ``beats(second)`` once a second says something, and what."""
    judge = Judge(DistributedConfig(silence_timeout=20, progress_timeout=60), cause_on)
    for second in range(seconds):
        judge.observe(beats(second), 1)
        if verdict := judge.verdict():
            return second, verdict.message
    return seconds, ""


def test_the_judge_tells_who_is_behind_from_who_waits() -> None:
    """Guards against naming a process that works alone for long, or blaming rank 0 when no process is behind another."""

    def busy(second: int) -> list[Beat]:  # rank 2 saves, the others wait for it
        return [Beat(rank, number=second, step=7, calls=second if rank == 2 else 3, doing="saving") for rank in range(3)]

    assert judged(500, busy) == (500, "")

    def stuck(second: int) -> list[Beat]:
        return [Beat(rank, number=second, step=7, calls=3, doing="training") for rank in range(3)]

    second, sentence = judged(500, stuck)
    assert second == 60 and "like all the others: at step 7, training, none is ahead" in sentence

    def arrived_first(second: int) -> list[Beat]:  # rank 1 waits there for longer than the others do
        return [Beat(rank, number=second, step=7, calls=3 if rank == 1 else min(3, second // 10)) for rank in range(3)]

    second, sentence = judged(500, arrived_first)
    assert second == 90 and sentence.startswith("rank 1 (") and "has made no progress for 90 s" in sentence

    def behind(second: int) -> list[Beat]:  # in an earlier step, where more calls were made
        return [
            Beat(0, number=second, step=8, calls=0),
            Beat(1, number=second, step=7, calls=9),
            Beat(2, number=second, step=8, calls=0),
        ]

    assert judged(500, behind)[1].startswith("rank 1 (")


def test_the_judge_names_who_waits_for_a_file() -> None:
    """Guards against a stall of reads that is named late, or with those that only wait for the rank, and against one name for two."""

    def stalled(second: int) -> list[Beat]:  # from second 20 on, when the limit is 10 s
        file = "/data/a.tar" if second >= 20 else ""
        return [
            Beat(0, number=second, step=min(second, 20), calls=1, doing="training"),
            Beat(1, number=second, step=min(second, 20), doing="reading data", file=file),
            Beat(2, number=second, step=min(second, 20), doing="reading data", file=file),
        ]

    second, sentence = judged(500, stalled)
    assert 30 <= second <= 32 and sentence.startswith("rank 1 (host unknown, pid 0) (with rank 2) has waited 10 s")
    assert "for a read of /data/a.tar at step 20, reading data" in sentence

    def busy(second: int) -> list[Beat]:  # a file after the other, or one in many reads while steps go on
        return [
            Beat(0, number=second, step=second, file="/data/a.tar"),
            Beat(1, number=second, step=3, calls=second, file="/data/b"),
        ]

    assert judged(500, busy) == (500, "")


def test_the_judge_names_two_nodes_that_do_not_reach_each_other() -> None:
    """Guards against a pair that is named late, a store that is taken for a node, and a node that is down taken for a cut between two."""

    def apart(second: int, peer: str = "10.0.0.3", alive: int = 1000) -> list[Beat]:  # from second 10 on
        beats = [Beat(rank, f"n{rank}", 7, second, min(second, 10), "training", address=f"10.0.0.{rank}") for rank in range(4)]
        beats[2] = beats[2]._replace(peer=peer if second >= 10 else "")
        beats[3] = beats[3]._replace(number=min(second, alive))
        return beats

    second, sentence = judged(500, apart)
    assert 30 <= second <= 32 and sentence.startswith("rank 2 (host n2, pid 7) has waited 20 s for an answer of n3 (10.0.0.3)")
    second, sentence = judged(500, lambda second: apart(second, "10.0.9.9"))
    assert second == 70 and "rank 2 (host n2, pid 7) has no answer from 10.0.9.9" in sentence
    second, sentence = judged(500, lambda second: apart(second, alive=9))
    assert second < 31 and sentence.startswith("rank 3 (host n3, pid 7) sent no heartbeat for 20 s")


def test_the_judge_knows_a_lost_node_and_a_broken_connection() -> None:
    """Guards against one name for eight lost processes, and against a broken connection between living processes that ends nothing."""

    def node_lost(second: int) -> list[Beat]:
        return [Beat(rank, number=second if rank < 4 else min(second, 30), step=second) for rank in range(8)]

    second, sentence = judged(500, node_lost)
    assert second == 50 and sentence.startswith("rank 4 (") and "(and so did ranks 5, 6, 7)" in sentence

    def broken(second: int) -> list[Beat]:
        silent = second if second < 30 else 30
        status = Status.BROKEN if second > 30 else Status.RUNNING
        return [
            Beat(0, number=second, step=5, status=status, message="Connection closed by peer"),
            Beat(1, number=silent, step=5),
        ]

    assert judged(500, broken)[0] == 35  # the break is evidence: no need to wait for the whole silence_timeout

    def broken_but_alive(second: int) -> list[Beat]:
        return [
            Beat(0, number=second, step=5, status=Status.BROKEN, message="Timed out {x}"),
            Beat(1, number=second, step=4, doing="reading data"),
        ]

    second, sentence = judged(500, broken_but_alive)
    assert (
        second < 20 and sentence.startswith("rank 1 (") and "of rank 0 (host unknown, pid 0) failed (Timed out {x})" in sentence
    )
