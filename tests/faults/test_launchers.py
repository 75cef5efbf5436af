"""Runs under torchrun, accelerate and plain variables: they start, an agent's restart resumes exactly, and errors are said once."""

from __future__ import annotations

import json
import socket
import sys
import time
from importlib.util import find_spec
from pathlib import Path

import psutil
import pytest
import yaml

from faults.history import Start, assert_each_image_once, what_the_weights_saw
from faults.launched import TORCHRUN, Launched, ranks_of
from pipeline.checkpoint.folder import latest_step
from pipeline.errors import USER_ERROR
from support.launching import PATIENCE
from support.ranks import Job, free_port, steps_taken, train
from support.runs import step_rows
from support.small_run import SMALL_MODEL

pytestmark = pytest.mark.multiprocess

ACCELERATE = (sys.executable, "-m", "accelerate.commands.launch", "--multi_gpu", "--num_machines=1", "--mixed_precision=no")
TWO = ("--nproc-per-node", "2")


def training(config: Path, run: Path, *overrides: object) -> tuple[object, ...]:
    return ("-m", "pipeline.train", "--config", config, f"output_dir={run}", "log.samples=true", *SMALL_MODEL, *overrides)


@pytest.mark.long
def test_starts_by_torchrun_and_by_hand_resume_exactly(small_run: Path, tmp_path: Path) -> None:
    """Guards against a job that waits for its own agent's port, images lost or repeated by a restart, ranks of a restart that find the
    store of the ranks before, ranks of one machine that listen on the network, a lost rank that each of the others reports, and steps
    lost when a cluster ends the agents."""
    run, last = tmp_path / "run", "train.max_steps=8"
    one = Launched(tmp_path, *TORCHRUN, *TWO, "--max-restarts=1", *training(small_run, run, last, "checkpoint.every_steps=2"))
    one.until("step 1/")
    ranks = ranks_of(one)
    connections = [connection for rank in ranks.values() for connection in rank.net_connections("inet")]
    while not latest_step(run):
        assert one.process.poll() is None, one.errors
        time.sleep(0.005)
    ranks[1].kill()
    resumed = int(one.until(r"resuming .* from step (\d+)")[1])
    starts = [Start(one.started, 0, 2), Start(time.time(), resumed, 2)]
    one.ends_with(0)
    assert {each.laddr.ip for each in connections if each.status == psutil.CONN_LISTEN} == {"127.0.0.1"}
    (lost,) = one.sentences()
    assert lost.startswith("error: rank 1 (host ") and "[W" not in one.errors
    assert "note: torchrun's store listens on all addresses" in one.out and "PERVIT_JOB_SECRET" not in one.out

    # Two nodes, for the ranks: an address that is not written as loopback.
    endpoint = f"--rdzv-endpoint=127.0.0.1:{free_port()}"
    nodes = ("--nnodes=2", "--nproc-per-node=1", "--rdzv-backend=c10d", endpoint, f"--local-addr={socket.gethostname()}")
    starts.append(Start(time.time(), 8, 2))
    before = steps_taken(run, 1)
    both = [Launched(tmp_path, *TORCHRUN, *nodes, *training(small_run, run)) for _ in range(2)]
    while steps_taken(run, 1) < before + 2:
        assert both[0].process.poll() is None, both[0].errors
        time.sleep(0.02)
    for node in both:
        node.process.terminate()
    for node in both:
        assert node.process.wait(PATIENCE) != 0 and not node.sentences(), node.errors
    said = both[0].out + both[1].out
    stopped = latest_step(run)
    assert stopped == len(step_rows(run)) > 8 and f"stopped by a signal at step {stopped}" in said
    assert said.count("without PERVIT_JOB_SECRET, whoever reaches") == 1

    # By hand: no secret, and LOCAL_RANK follows from MASTER_ADDR.
    unset = {"PERVIT_JOB_SECRET": None, "LOCAL_RANK": None}
    by_hand = Job(2, *training(small_run, run, f"train.max_steps={stopped + 2}")[2:], **unset).succeed()
    starts.append(Start(by_hand.started, stopped, 2))
    assert "note: torchrun" not in by_hand.stdout() and not by_hand.stderr()
    straight = tmp_path / "straight"
    alone = train(1, small_run, straight, f"train.max_steps={stopped + 2}").succeed()
    seen = what_the_weights_saw(run, starts, stopped + 2)
    assert seen == what_the_weights_saw(straight, [Start(alone.started, 0, 1)], stopped + 2)
    assert_each_image_once(seen, images_per_epoch=1438, global_batch_size=16)
    result = tmp_path / "result.json"
    shards = yaml.safe_load(small_run.read_text())["data"]["path"]
    Job(2, "--checkpoint", run, "--data", shards, "--json", result, module="pipeline.evaluate", **unset).succeed()
    assert json.loads(result.read_text())["count"] == 359


def test_a_mistake_is_said_once_and_at_once(small_run: Path, tmp_path: Path) -> None:
    """Guards against a sentence for each rank, and a wait for ranks that have ended."""
    wrong = Launched(tmp_path, *TORCHRUN, *TWO, *training(small_run, tmp_path / "run", "train.max_stepz=2")).ends_with(1)
    (sentence,) = wrong.sentences()
    assert "unknown key 'train.max_stepz'" in sentence and f"exitcode  : {USER_ERROR} " in wrong.errors


@pytest.mark.skipif(not find_spec("accelerate"), reason="needs accelerate, which nothing here depends on")
def test_accelerate_launch(small_run: Path, tmp_path: Path) -> None:
    """Guards against variables of accelerate's that are not torchrun's."""
    run = tmp_path / "run"
    words = ("--dynamo_backend=no", "--num_processes=2", *training(small_run, run, "train.max_steps=2"))
    Launched(tmp_path, *ACCELERATE, *words).ends_with(0)
    assert latest_step(run) == 2 and steps_taken(run, 1) == 2
