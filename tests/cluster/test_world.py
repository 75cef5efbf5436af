"""What the environment says of the processes: what is malformed, missing or unreachable is one sentence."""

from __future__ import annotations

import os
import resource
import secrets
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from pipeline.cluster.environment import SECRET, is_loopback, nodes_of, read_place, slurm_granted_gpus
from pipeline.cluster.meeting import _ask, _give, _host_store, _listen, _reach_store, meet
from pipeline.cluster.rendezvous import _why, connect, init_world
from pipeline.cluster.world import World
from pipeline.command_line import run_command
from pipeline.errors import RANK_LOST, NotConnected, UserError
from support.launching import PATIENCE, REPOSITORY, clean_environment
from support.ranks import free_port

PAIR = {
    "RANK": "0",
    "WORLD_SIZE": "2",
    "LOCAL_RANK": "0",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "1",
    "PERVIT_JOB_SECRET": "0" * 64,
}
ALONE = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}
STEP = {"SLURM_STEP_ID": "0", "SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1", "SLURM_LOCALID": "0"}


CPU = torch.device("cpu")


@pytest.fixture
def environment(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    """Without a trace of a job; ``init_world`` may write into it."""
    others = (
        "LOCAL_WORLD_SIZE",
        "PET_NNODES",
        "TORCHELASTIC_RUN_ID",
        "SLURM_CPUS_PER_TASK",
        "SLURM_STEP_TASKS_PER_NODE",
        "SLURM_STEP_GPUS",
        "GLOO_SOCKET_IFNAME",
        "NCCL_SOCKET_IFNAME",
    )
    for name in (*PAIR, *STEP, *others):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    yield monkeypatch


@pytest.mark.parametrize(
    ("given", "named"),
    [
        (ALONE | {"RANK": "²"}, "RANK must be a whole number from 0 to 0, got '²'"),
        (ALONE | {"RANK": "0" * 5000}, "RANK must be .*, got '0"),
        (ALONE | {"SLURM_CPUS_PER_TASK": "abc"}, "SLURM_CPUS_PER_TASK must be .*, got 'abc'"),
        (ALONE | {"SLURM_CPUS_PER_TASK": "0"}, "SLURM_CPUS_PER_TASK must be .*, got '0'"),
        (ALONE | {"SLURM_STEP_TASKS_PER_NODE": "8(y2"}, r"SLURM_STEP_TASKS_PER_NODE must have counts such as .*, got '8\(y2'"),
        (ALONE | {"SLURM_STEP_TASKS_PER_NODE": "2,,2"}, "SLURM_STEP_TASKS_PER_NODE must have .*, got '2,,2'"),
        (STEP | {"SLURM_PROCID": "x"}, "SLURM_PROCID must be .*, got 'x'"),
        (STEP | {"SLURM_STEP_NUM_TASKS": "-1"}, "SLURM_STEP_NUM_TASKS must be .*, got '-1'"),
        (PAIR | {"MASTER_ADDR": ""}, "MASTER_ADDR must be set for 2 processes"),
        (PAIR | {"MASTER_PORT": "65536"}, "MASTER_PORT must be .*, got '65536'"),
        (PAIR | {"MASTER_PORT": "0"}, "MASTER_PORT must be a whole number from 1 to 65535, got '0'"),
        (PAIR | {"MASTER_PORT": "http"}, "MASTER_PORT must be .*, got 'http'"),
        (PAIR | {"RANK": "2"}, "RANK must be a whole number from 0 to 1, got '2'"),
        (PAIR | {"WORLD_SIZE": ""}, "RANK 0 requires WORLD_SIZE, which is not set"),
        (PAIR | {"RANK": ""}, "WORLD_SIZE 2 requires RANK, which is not set"),
        (PAIR | {"LOCAL_RANK": "", "MASTER_ADDR": "node1"}, "LOCAL_RANK must be set for 2 processes on several nodes"),
        (PAIR | {"LOCAL_RANK": "", "LOCAL_WORLD_SIZE": "3"}, "LOCAL_WORLD_SIZE must be .* from 1 to 2, got '3'"),
    ],
)
def test_a_malformed_variable_is_named(given: dict[str, str], named: str, environment: pytest.MonkeyPatch) -> None:
    """Guards against a traceback, or a silent guess, when a variable of the launcher or of Slurm is not a number."""
    for name, value in given.items():
        environment.setenv(name, value) if value or name == "MASTER_ADDR" else environment.delenv(name, raising=False)
    with pytest.raises(UserError, match=named) as error:
        init_world(timeout=1)
    assert "\n" not in str(error.value) and ": " in str(error.value)


@pytest.mark.parametrize(
    ("given", "place"),
    [
        ({"MASTER_ADDR": "127.0.0.1"}, (5, 8)),
        ({"MASTER_ADDR": "node1", "LOCAL_WORLD_SIZE": "4"}, (1, 4)),
        ({"MASTER_ADDR": "job-master-0", "PET_NNODES": "8"}, (0, 1)),  # a PyTorchJob with one process in each pod
    ],
)
def test_the_local_rank_follows(given: dict[str, str], place: tuple[int, int], environment: pytest.MonkeyPatch) -> None:
    """Guards against a rank on another's GPU, or with another's cores, where a launcher sets RANK and WORLD_SIZE alone."""
    for name, value in {"RANK": "5", "WORLD_SIZE": "8", "MASTER_PORT": "23456", **given}.items():
        environment.setenv(name, value)
    found = read_place()
    assert (found.local_rank, found.local_size) == place


def test_the_nodes_of_late_ranks_are_those_where_slurm_starts_them(tmp_path: Path, environment: pytest.MonkeyPatch) -> None:
    """Guards against a healthy node that is drained for another's rank: where numbers follow no order of nodes, none is named."""
    (tmp_path / "scontrol").write_text('#!/bin/sh\n[ "$*" = "show hostnames" ] && printf "n1\\nn2\\nn3\\n"\n')
    (tmp_path / "scontrol").chmod(0o755)
    environment.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    environment.setenv("LOCAL_WORLD_SIZE", "2")
    assert nodes_of([2, 3, 5], 6) == []  # no job
    environment.setenv("SLURM_JOB_NODELIST", "n[1-3]")
    assert nodes_of([2, 3, 5], 6) == ["n2", "n3"]
    assert nodes_of([2, 3], 4) == []  # a step on some of the job's nodes
    environment.setenv("TORCHELASTIC_RUN_ID", "x")
    assert nodes_of([2, 3, 5], 6) == []


def test_only_one_machine_moves_to_loopback(environment: pytest.MonkeyPatch) -> None:
    """Guards against ranks of torchrun that listen on the network for nobody, and against nodes that cannot meet."""
    for local, address in (("4", "node1"), ("8", "127.0.0.1")):
        given = {"RANK": "1", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "MASTER_ADDR": "node1", "MASTER_PORT": "23456"}
        for name, value in {**given, "LOCAL_WORLD_SIZE": local, "TORCHELASTIC_RUN_ID": "x"}.items():
            environment.setenv(name, value)
        read_place()
        assert os.environ["MASTER_ADDR"] == address


def test_a_secret_that_only_some_ranks_have(environment: pytest.MonkeyPatch) -> None:
    """Guards against a rank that joins without the secret that rank 0 was given, and one that waits for it."""
    given = PAIR | {"MASTER_ADDR": socket.gethostname(), "MASTER_PORT": str(free_port())}
    for name, value in given.items():
        environment.setenv(name, value)
    store, secret = meet(0, 2, timedelta(seconds=20), on_one_machine=False)
    assert secret == bytes(32)
    environment.delenv(SECRET)
    with pytest.raises(UserError, match=f"{SECRET} must be one number of 64 .*, got nothing"):
        meet(1, 2, timedelta(seconds=20), on_one_machine=False)
    del store  # until here


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to become another user")
def test_the_secret_is_handed_to_this_user_alone() -> None:
    """Guards against another user of the machine who asks for the secret of a run, or answers in place of its rank 0."""
    name = f"\0pervit-test-{secrets.token_hex(8)}"
    stranger = os.fork()
    if stranger == 0:
        os.setuid(65534)
        with suppress(NotConnected):
            _ask(name, 1, 2.0)
            os._exit(1)
        os._exit(0)
    with pytest.raises(NotConnected, match="rank 0 waited in vain for 1 of the other ranks"):
        _give(name, "a secret", 1, 2.0)  # until nobody has asked for so long
    assert os.waitpid(stranger, 0)[1] == 0
    answering = os.fork()
    if answering == 0:
        os.setuid(65534)
        with suppress(OSError), socket.socket(socket.AF_UNIX) as listener:
            listener.bind(name)
            listener.listen()
            asked = listener.accept()[0]
            with suppress(OSError):  # it may be closed already
                asked.sendall(b"1 another secret")
            os._exit(0)
        os._exit(1)
    with pytest.raises(NotConnected, match="rank 1 found no rank 0 on this machine"):
        _ask(name, 1, 1.0)
    assert os.waitpid(answering, 0)[1] == 0  # it was asked


def test_who_cannot_be_reached_is_named(environment: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Guards against PyTorch's C++ traceback, an endless wait, and a job that is not requeued, where processes do not meet."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
        for name, value in (PAIR | {"MASTER_PORT": str(port)}).items():
            environment.setenv(name, value)
        taken.listen()
        for address in ("127.0.0.1", "localhost", socket.gethostname()):
            environment.setenv("MASTER_ADDR", address)
            with pytest.raises(NotConnected, match=rf"rank 0 cannot listen at .*:{port} \(Address already in use\)"):
                _host_store(2, timedelta(seconds=1))
        environment.setenv("MASTER_ADDR", "127.0.0.1")
    with pytest.raises(
        NotConnected,
        match=rf"rank 1 found nobody at .* 127.0.0.1:{port} for 0 s \(Connection refused\), where rank 0 must listen",
    ):
        _reach_store(1, timeout=0.3)
    for address in ("no-such-host.invalid", "a" * 70 + ".invalid", "not a name"):
        environment.setenv("MASTER_ADDR", address)
        environment.setattr("pipeline.cluster.meeting._RESOLVE_TIMEOUT", 0)
        with pytest.raises(
            NotConnected, match="MASTER_ADDR must be a host name or address of rank 0's node, got '.*', which cannot be found"
        ):
            _reach_store(1, timeout=0.3)
    with pytest.raises(SystemExit) as end:
        run_command(lambda: _reach_store(1, timeout=0.3))
    assert end.value.code == RANK_LOST and capsys.readouterr().err.startswith("error: MASTER_ADDR")


def test_rank_0_waits_for_the_others_and_says_who_is_missing(environment: pytest.MonkeyPatch) -> None:
    """Guards against "wait timeout after 1000ms, keys: /0//cpu//0/1" when a process did not start."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    for name, value in (PAIR | {"MASTER_PORT": port, "PERVIT_JOB_SECRET": secrets.token_hex(32)}).items():
        environment.setenv(name, value)
    with pytest.raises(NotConnected, match="rank 0 timed out waiting for rank 1 of 2 ranks: see in their logs"):
        connect(World(0, 2, CPU, 1), timedelta(seconds=1))
    environment.delenv("PERVIT_JOB_SECRET")
    with pytest.raises(NotConnected, match=r"rank 0 waited in vain for 1 of the other ranks .* \(timed out\): see in"):
        connect(World(0, 2, CPU, 1), timedelta(seconds=1))


def test_the_missing_among_a_thousand_are_named() -> None:
    """Guards against a list of hundreds, and against what a stranger has written to the store counting as a rank."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=20))
    store.set(
        "arrived", b"\xff 1023x:cpu 1021:tpu -5:cpu " + " ".join(f"{rank}:cuda" for rank in range(0, 1024, 2)).encode() + b" "
    )
    store.append("arrived", "1:cuda 3:cuda 5:cpu ")
    sentence = str(_why(RuntimeError("timeout"), store, 0, 1024))
    assert "waiting for ranks 7, 9, 11, 13, 15, 17, 19, 21 and 501 more of 1024 ranks: see in their logs" in sentence


def test_a_rank_without_a_gpu_is_named() -> None:
    """Guards against ranks that wait in NCCL for one that has come to gloo, since its node's driver is not loaded."""
    store = dist.HashStore()
    store.set("arrived", "1:cuda 2:cpu 0:cuda ")
    error = _why(RuntimeError("timeout"), store, 0, 3)
    assert "timed out waiting for rank 2 of 3 ranks, which found no GPU, unlike others: see nvidia-smi" in str(error)
    assert error.missing == [2]
    store.set("arrived", "1:cpu 2:cpu 0:cpu ")
    assert "cannot connect to the others" in str(_why(RuntimeError("refused"), store, 0, 3))


def test_a_job_that_needs_more_open_files_gets_or_names_them(environment: pytest.MonkeyPatch) -> None:
    """Guards against a store that drops connections from the 500th rank on, where a process may open 1,024 files."""
    for name, value in (PAIR | {"WORLD_SIZE": "4096", "MASTER_PORT": str(free_port())}).items():
        environment.setenv(name, value)
    limits, asked = [(1024, 4096), (1024, 65536), (1024, resource.RLIM_INFINITY), (20000, 65536)], []
    environment.setattr("resource.setrlimit", lambda which, limit: asked.append(limit))
    environment.setattr("pipeline.cluster.meeting._host_store", lambda *given: 1 / 0)
    for soft_hard in limits:
        environment.setattr("resource.getrlimit", lambda which, soft_hard=soft_hard: soft_hard)
        expected = (
            UserError,
            r"\(ulimit -Hn\) of rank 0 must be at least 8448 for the connections of 4096 processes, got 4096",
        )
        with pytest.raises(*expected[:1] if soft_hard[1] == 4096 else (ZeroDivisionError,)) as error:
            connect(World(0, 4096, CPU, 1), timedelta(seconds=1))
        assert soft_hard[1] != 4096 or error.match(expected[1])
    assert asked == [(16896, 65536), (16896, resource.RLIM_INFINITY)]


def test_loopback_is_what_is_written_not_what_a_name_resolves_to() -> None:
    """Guards against a store that other nodes cannot reach because a node knows its own name as 127.0.1.1."""
    assert all(map(is_loopback, ("127.0.0.1", "127.0.1.2", "::1", "localhost")))
    assert not any(map(is_loopback, (socket.gethostname(), "10.0.0.1", "0.0.0.0", "node1", "localhost.example.org", "")))


def test_the_store_listens_where_it_is_needed() -> None:
    """Guards against a store of one machine that strangers reach, and against one between nodes that its own ranks do not."""
    for address, addresses in (
        ("127.0.0.1", {"127.0.0.1"}),
        ("localhost", {"127.0.0.1", "::1"}),
        (socket.gethostname(), {"::", "0.0.0.0"}),
    ):
        with _listen(address, 0) as listener:
            assert listener.getsockname()[0] in addresses


def test_gpus_are_those_of_the_step(environment: pytest.MonkeyPatch) -> None:
    """Guards against a note about GPUs that nobody was given: sbatch --exclusive fills SLURM_JOB_GPUS whatever was asked for."""
    environment.setenv("SLURM_JOB_GPUS", "0,1,2,3")
    environment.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert not slurm_granted_gpus()
    environment.setenv("SLURM_STEP_GPUS", "0,1")
    environment.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    assert slurm_granted_gpus()
    environment.setenv("CUDA_VISIBLE_DEVICES", "")  # the user's wish for the CPU
    assert not slurm_granted_gpus()


_THREADS = """
import os
from pipeline.cluster.environment import SECRET
from pipeline.cluster.rendezvous import disconnect, init_world
world = init_world()
gathered = world.gather(world.rank)
disconnect()
threads = [open(f"/proc/self/task/{task}/comm").read().strip() for task in os.listdir("/proc/self/task")]
print(gathered, [name for name in threads if "gloo" in name or "store" in name])
"""


def test_disconnect_ends_the_threads_of_gloo() -> None:
    """Guards against exit code 134 after all work is done: such a thread aborts a process whose interpreter shuts down."""
    shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), SECRET: secrets.token_hex(32), "WORLD_SIZE": "2"}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", _THREADS],
            cwd=REPOSITORY,
            env=clean_environment(RANK=str(rank), LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE="2", **shared),
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    printed = [rank.communicate(timeout=PATIENCE)[0] for rank in ranks]
    assert printed == ["[0, 1] []\n"] * 2
    assert [rank.returncode for rank in ranks] == [0, 0]


def test_warnings_as_errors_end_nothing() -> None:
    """Guards against a traceback from the middle of an import of PyTorch where PYTHONWARNINGS=error is set."""
    program = "import pipeline, warnings; warnings.warn('x', DeprecationWarning)"
    result = subprocess.run(
        [sys.executable, "-W", "error", "-c", program], cwd=REPOSITORY, env=clean_environment(), capture_output=True, text=True
    )
    assert result.returncode == 0 and "DeprecationWarning: x" in result.stderr, result.stderr


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        OSError(12, "Cannot allocate memory"),
        RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes"),
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"),
        ImportError("libtorch.so: failed to map segment from shared object"),
    ],
)
def test_no_memory_is_a_sentence(error: Exception, capsys: pytest.CaptureFixture[str]) -> None:
    """Guards against a traceback of PyTorch when ulimit -v, a job's limit or the GPU is too small."""

    def fail() -> None:
        raise error

    with pytest.raises(SystemExit) as end:
        run_command(fail)
    assert end.value.code == 1
    (sentence,) = capsys.readouterr().err.splitlines()
    assert sentence.startswith("error: there is not enough memory (") and "train.micro_batch_size" in sentence
