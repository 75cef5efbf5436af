"""Kills at random moments and signals at bad ones: the run goes on as if nothing had happened, bit for bit."""

from __future__ import annotations

import json
import random
import signal
from pathlib import Path

import pytest

from faults.history import Start, assert_each_image_once, same_files, what_the_weights_saw
from faults.killing import Ordeal
from pipeline.checkpoint.folder import latest_step, step_folder
from pipeline.errors import PREEMPTED
from support.ranks import seed_from_environment, steps_taken, train
from support.runs import evaluation_rows, write_small_config

pytestmark = pytest.mark.multiprocess

STEPS = 40  # more than the kills of a test let happen on a fast machine, so that each finds the run alive
OPTIONS = (f"train.max_steps={STEPS}", "checkpoint.every_steps=4")


@pytest.fixture(scope="module")
def config(digits_shards: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_small_config(digits_shards, tmp_path_factory.mktemp("kills"))


@pytest.fixture(scope="module")
def straight(config: Path) -> tuple[Path, Start]:
    """A run in two processes that nobody disturbs."""
    run = config.parent / "straight"
    return run, Start(train(2, config, run, *OPTIONS).succeed().started, 0, 2)


def test_random_kills_leave_no_trace(config: Path, straight: tuple[Path, Start], tmp_path: Path) -> None:
    """Guards against images lost or seen twice, and against a checkpoint that is visible before it is complete."""
    ordeal = Ordeal(config, tmp_path / "killed", OPTIONS, random.Random(seed_from_environment()))
    for moment in ("save", "start", "step", "save"):
        assert ordeal.start_and_kill(2, moment, most_steps=4), ordeal.report()
    ordeal.start(2).succeed()
    seen = what_the_weights_saw(ordeal.run, ordeal.starts, STEPS)
    assert seen == what_the_weights_saw(straight[0], [straight[1]], STEPS)
    assert_each_image_once(seen, images_per_epoch=1438, global_batch_size=16)
    assert same_files(ordeal.run, straight[0])
    assert not list((ordeal.run / "checkpoints").glob(".*"))


def test_a_signal_within_an_evaluation_leaves_it_to_the_next_start(
    config: Path, straight: tuple[Path, Start], tmp_path: Path
) -> None:
    """Guards against an evaluation that is lost, or one that keeps a preempted job from saving in time."""
    run = tmp_path / "run"
    job = train(2, config, run, *OPTIONS, "eval.every_epochs=0.03", "eval.batch_size=1")  # after steps 3, 6, 9, ...
    job.until(lambda: steps_taken(run, 1) == 3)
    job.signal(signal.SIGTERM, 1)
    assert job.wait() == [PREEMPTED] * 2, job.outputs()
    assert latest_step(run) == 3 and not evaluation_rows(run)
    manifest = json.loads((step_folder(run, 3) / "checkpoint.json").read_text())
    assert manifest["content"]["state"]["evaluation_due"] is True

    def kill_when_evaluated(processes: int) -> None:
        """When its rows are written, maybe before the checkpoint is which says that it is not due any more."""
        job = train(processes, config, run, *OPTIONS)
        job.until(lambda: sum(row["time"] > job.started for row in evaluation_rows(run)) == 2 or steps_taken(run) > 3)
        job.kill()
        job.wait()

    kill_when_evaluated(1)
    kill_when_evaluated(2)
    train(2, config, run, *OPTIONS).succeed()
    assert [row["step"] for row in evaluation_rows(run)] == [3, 3, STEPS, STEPS]  # of the weights and of their average
    assert same_files(run, straight[0])
