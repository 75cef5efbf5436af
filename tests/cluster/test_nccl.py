"""NCCL under the heartbeat's rule: its environment, what its watchdog reports, the flight record, and faults on two GPUs."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import ErrorType
from torch.distributed.flight_recorder.components.loader import read_dump

from pipeline.cluster import nccl
from pipeline.cluster.beats import Status
from pipeline.cluster.heartbeat import Heartbeat
from pipeline.cluster.rendezvous import init_world
from pipeline.cluster.world import World
from pipeline.config import DistributedConfig
from pipeline.errors import RANK_LOST
from support.launching import PATIENCE, REPOSITORY, clean_environment
from support.ranks import meeting_point, steps_taken

OURS = {
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
    "TORCH_NCCL_RETHROW_CUDA_ERRORS": "0",
    "TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC": "1920",
    "TORCH_FR_BUFFER_SIZE": "2000",
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "1",
    "TORCH_FR_DUMP_TEMP_FILE": "runs/x/flight-record-",
    "TORCH_NCCL_DEBUG_INFO_TEMP_FILE": "runs/x/flight-record-",
}
ALIASES = ("NCCL_ASYNC_ERROR_HANDLING", "TORCH_NCCL_TRACE_BUFFER_SIZE")


@pytest.fixture
def environment(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Without any of these variables; they are gone after the test."""
    for name in (*OURS, *ALIASES):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    return monkeypatch


class Group:
    """The part of a process group that is named."""

    def __init__(self, name: str) -> None:
        self.group_name = name


def ours() -> dict[str, str]:
    nccl.leave_faults_to_the_heartbeat(Path("runs/x"), 1920.0)
    return {name: os.environ[name] for name in OURS if name in os.environ}


def test_the_watchdog_ends_no_process_and_a_user_has_the_last_word(environment: pytest.MonkeyPatch) -> None:
    """Guards against SIGABRT instead of a name, and against debugging variables that have no effect."""
    assert ours() == OURS
    for name in OURS:
        environment.delenv(name)
    environment.setenv("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1")
    environment.setenv("TORCH_NCCL_TRACE_BUFFER_SIZE", "7")  # an older name of TORCH_FR_BUFFER_SIZE
    environment.setenv("TORCH_NCCL_DEBUG_INFO_TEMP_FILE", "/tmp/mine-")
    found = ours()
    assert found["TORCH_NCCL_ASYNC_ERROR_HANDLING"] == "1" and found["TORCH_NCCL_DEBUG_INFO_TEMP_FILE"] == "/tmp/mine-"
    assert not {"TORCH_FR_BUFFER_SIZE", "TORCH_FR_DUMP_TEMP_FILE"} & found.keys()
    assert found["TORCH_NCCL_RETHROW_CUDA_ERRORS"] == "0"
    environment.setenv("TORCHELASTIC_RUN_ID", "x")  # torchrun sets 1, which PyTorch takes for "abort the process"
    assert ours()["TORCH_NCCL_ASYNC_ERROR_HANDLING"] == "0"
    environment.delenv("TORCH_NCCL_ASYNC_ERROR_HANDLING")
    environment.setenv("NCCL_ASYNC_ERROR_HANDLING", "3")
    assert "TORCH_NCCL_ASYNC_ERROR_HANDLING" not in ours()


def test_without_a_heartbeat_the_watchdog_stays(environment: pytest.MonkeyPatch) -> None:
    """Guards against an evaluation that waits for ever for a lost process: it has no heartbeat. Nor has a single process."""
    own = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    for name, value in own.items():
        environment.setenv(name, value)
    environment.setattr("pipeline.cluster.rendezvous._init_libraries", lambda *arguments: None)
    environment.setattr("pipeline.cluster.rendezvous.keep_freed_memory", lambda: True)  # it cannot be taken back
    environment.setattr(torch, "set_num_threads", lambda number: None)
    init_world(run_folder=Path("runs/x"))
    assert not OURS.keys() & os.environ.keys()
    environment.setenv("WORLD_SIZE", "2")
    init_world()
    assert not OURS.keys() & os.environ.keys()
    init_world(1920.0, Path("runs/x"))
    assert {name: os.environ[name] for name in OURS} == OURS


def test_what_the_watchdog_noted_marks_a_broken_collective(environment: pytest.MonkeyPatch) -> None:
    """Guards against ranks that wait for progress_timeout, 30 minutes, for a collective that NCCL knows has failed."""
    backends = {"0": None, "1": SimpleNamespace(get_error=lambda: ErrorType.SUCCESS)}  # gloo and NCCL
    environment.setattr(dist.distributed_c10d, "_world", SimpleNamespace(pg_map=dict.fromkeys(map(Group, backends))))
    environment.setattr(nccl, "_nccl_backend", lambda group: backends[group.group_name])
    heartbeat = Heartbeat(World(0, 1, torch.device("cpu"), 1), DistributedConfig())
    heartbeat.at(7, "training")
    assert nccl.failure() is None and heartbeat._beat(1).status is Status.RUNNING
    backends["1"] = SimpleNamespace(get_error=lambda: ErrorType.COMM_ERROR)
    beat = heartbeat._beat(2)
    assert (beat.status, beat.message) == (Status.BROKEN, "NCCL reports COMM_ERROR in the process group 1")


def test_a_record_that_cannot_be_written_ends_nothing(tmp_path: Path) -> None:
    """Guards against a full disk, or a run folder that was never made, in the way of the exit code."""
    nccl.write_flight_record(tmp_path / "missing", 0)
    assert not (tmp_path / "missing").exists()


def records(folder: Path, ranks: int) -> list[dict]:
    """What PyTorch's own reader (``torchfrtrace``) makes of the records in a run folder."""
    return [read_dump(nccl.FLIGHT_RECORD, str(folder / f"{nccl.FLIGHT_RECORD}{rank}")) for rank in range(ranks)]


@pytest.mark.gpu
@pytest.mark.multiprocess
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA GPUs")
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_nccl_a_lost_rank_is_named_and_the_other_ends_with_76(number: signal.Signals, small_run: Path, tmp_path: Path) -> None:
    """Guards against NCCL's watchdog, which aborts the waiting process (134) before it can say whom it waits for."""
    run, logs = tmp_path / "run", [tmp_path / "0.log", tmp_path / "1.log"]
    common = {**meeting_point(2), "LOCAL_WORLD_SIZE": 2, "CUDA_VISIBLE_DEVICES": "0,1"}
    options = ["train.precision=bf16", "log.samples=true", "log.every_steps=1", "distributed.silence_timeout=5"]
    ranks = []
    for rank, log in enumerate(logs):
        environment = {key: str(value) for key, value in {**common, "RANK": rank, "LOCAL_RANK": rank}.items()}
        command = [sys.executable, "-m", "pipeline.train", "--config", str(small_run), f"output_dir={run}", *options]
        with log.open("w") as output:
            ranks.append(
                subprocess.Popen(
                    command, cwd=REPOSITORY, env={**clean_environment(), **environment}, stdout=output, stderr=output
                )
            )
    try:
        deadline = time.monotonic() + PATIENCE
        while min(steps_taken(run, rank) for rank in (0, 1)) < 3:
            assert all(rank.poll() is None for rank in ranks) and time.monotonic() < deadline, [log.read_text() for log in logs]
            time.sleep(0.1)
        ranks[1].send_signal(number)
        assert ranks[0].wait(timeout=120) == RANK_LOST, logs[0].read_text()
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    assert f"error: rank 1 (host {socket.gethostname()}, pid {ranks[1].pid}) sent no heartbeat" in logs[0].read_text()
    (record,) = records(run, 1)
    assert any(str(entry["profiling_name"]).startswith("nccl:") for entry in record["entries"])
