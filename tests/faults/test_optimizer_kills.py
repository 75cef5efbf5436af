"""LAMB and Muon through kills, and through other numbers of processes: exact where AdamW is, and close where it is."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from faults.history import distance, loss_difference, same_files
from pipeline.checkpoint import latest_step, read_weights
from support.ranks import train
from support.runs import step_rows

pytestmark = pytest.mark.multiprocess

STEPS = 6
OPTIONS = ("train.global_batch_size=24", "optim.lr_batch_size=24", "optim.clip_grad_norm=1.0", "optim.layer_decay=0.8")
# Losses and weights, relative, after other numbers of processes than the straight run's. Muon gives directions that have but
# rounding errors in a gradient the same length as all others.
LIMITS = {"lamb": (1e-4, 1e-3), "muon": (0.02, 0.05)}
WORDS = {"lamb": "LAMB, learning rate times 0.8 per layer below the last of 14", "muon": "Muon for 48 matrices ("}


@pytest.mark.parametrize("name", ["lamb", "muon"])
def test_kills_and_other_world_sizes(name: str, small_run: Path, tmp_path: Path) -> None:
    """Guards against an optimizer whose state is not all in the checkpoint, or depends on who held it."""
    options = (*OPTIONS, f"optim.name={name}", f"train.max_steps={STEPS}", "checkpoint.every_steps=2")
    straight, killed, chain = (tmp_path / folder for folder in ("straight", "killed", "chain"))
    said = train(2, small_run, straight, *options).succeed().stdout()
    assert f"building the optimizer, {WORDS[name]}" in said

    job = train(2, small_run, killed, *options)
    assert job.until(lambda: latest_step(killed))
    job.kill()
    job.wait()
    assert (latest_step(killed) or 0) < STEPS
    train(2, small_run, killed, *options).succeed()
    assert same_files(killed, straight)

    for number, (processes, stage) in enumerate([(2, 2), (1, 0), (3, 3)], start=1):
        train(processes, small_run, chain, *options, f"train.zero_stage={stage}", f"train.max_steps={2 * number}").succeed()
    state = read_weights(chain).state
    assert latest_step(chain) == state.step == STEPS and state.skipped_steps == 0
    for_losses, for_weights = LIMITS[name]
    assert loss_difference(step_rows(chain), step_rows(straight)) < for_losses
    assert distance(chain, straight) < for_weights
    rates = [row["lr"] for row in step_rows(chain)]
    assert rates == [row["lr"] for row in step_rows(straight)] and math.isfinite(sum(rates))
