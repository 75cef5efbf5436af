"""A run that continues with other numbers of processes, ZeRO stages and micro-batches: the same images, the same losses."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from faults.history import Start, assert_each_image_once, distance, loss_difference, what_the_weights_saw
from pipeline.checkpoint.folder import latest_step
from pipeline.errors import PREEMPTED
from support.ranks import train, wait_for_steps
from support.runs import step_rows

pytestmark = pytest.mark.multiprocess

STEPS = 22
LOSS_LIMIT, WEIGHT_LIMIT = 1e-4, 1e-3  # what rounding may make of so few steps; a loss differed by 5e-8
OPTIONS = ("optim.lr_batch_size=16", f"train.max_steps={STEPS}")
CHAIN = [  # processes, ZeRO stage, the rank that gets a signal after some steps
    (1, 0, 0),
    (2, 1, 1),
    (4, 3, 2),  # slices of unequal length: four ranks share ten biases
    (1, 2, None),
]


def test_a_chain_of_world_sizes_and_stages(small_run: Path, tmp_path: Path) -> None:
    """Guards against images lost or repeated, and moments or averages mixed up, at a change of processes or stage; against
    processes that do not agree where to stop when one of them gets a signal."""
    straight, changed = tmp_path / "straight", tmp_path / "changed"
    job = train(1, small_run, straight, *OPTIONS, "train.zero_stage=0", f"checkpoint.every_steps={STEPS - 1}").succeed()
    expected = what_the_weights_saw(straight, [Start(job.started, 0, 1)], STEPS)

    starts = []
    for world_size, stage, signalled in CHAIN:
        before = latest_step(changed) or 0
        job = train(world_size, small_run, changed, *OPTIONS, f"train.zero_stage={stage}")
        starts.append(Start(job.started, before, world_size))
        if signalled is None:
            job.succeed()
        else:
            wait_for_steps(job, changed, 3, signalled)
            job.signal(signal.SIGUSR1, signalled)
            assert job.wait() == [PREEMPTED] * world_size, job.outputs()
            assert latest_step(changed) >= before + 3
    assert latest_step(changed) == STEPS > starts[-1].begins_after

    seen = what_the_weights_saw(changed, starts, STEPS)
    assert seen == expected
    assert_each_image_once(seen, images_per_epoch=1438, global_batch_size=16)
    assert loss_difference(step_rows(changed), step_rows(straight)) < LOSS_LIMIT
    for kind in ("model", "ema"):
        assert distance(changed, straight, kind) < WEIGHT_LIMIT
        assert distance(straight, straight, kind, step_of_b=STEPS - 1) > 2 * WEIGHT_LIMIT  # one step is more than that


def test_another_micro_batch(small_run: Path, tmp_path: Path) -> None:
    """Guards against a stream of samples that depends on how a global batch is divided. A patch embedding instead of the stem:
    BatchNorm would normalize over other images."""
    options = (
        *OPTIONS,
        "model.switches={widths: [16, 16, 16, 16], depths: [1, 1, 1, 1], conv_stem: false}",
        "train.max_steps=8",
    )
    straight, changed = tmp_path / "straight", tmp_path / "changed"
    started = train(2, small_run, straight, *options).succeed().started
    starts = []
    for micro_batch, last in ((8, 4), (4, 8)):
        job = train(
            1, small_run, changed, *options, f"train.micro_batch_size={micro_batch}", f"train.max_steps={last}"
        ).succeed()
        starts.append(Start(job.started, last - 4, 1))
    assert what_the_weights_saw(changed, starts, 8) == what_the_weights_saw(straight, [Start(started, 0, 2)], 8)
    assert loss_difference(step_rows(changed), step_rows(straight)) < LOSS_LIMIT
    assert distance(changed, straight) < WEIGHT_LIMIT
