"""Optimizers that the package knows nothing of, by ``optim.name=module:Class``: kills, other numbers of processes, ZeRO 0 and 1."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from faults.history import distance, loss_difference, same_files
from pipeline.checkpoint import CheckpointManifest, latest_step, step_folder
from pipeline.checkpoint.manifest import OptimizerState
from pipeline.checkpoint.parts import SliceReader, read_headers
from support.launching import run_module
from support.ranks import train
from support.runs import step_rows

pytestmark = pytest.mark.multiprocess

STEPS = 6
OPTIONS = ("train.global_batch_size=24", "optim.lr_batch_size=24", f"train.max_steps={STEPS}", "checkpoint.every_steps=2")
NADAM = ("optim.name=torch.optim:NAdam", "optim.options={momentum_decay: 0.01}")
LION = ("optim.name=support.lion:Lion", "optim.lr=1e-4")
# Largest relative differences of losses and weights after other numbers of processes. A sign enlarges rounding.
CASES = {"NAdam": (NADAM, 1e-4, 1e-3), "Lion": (LION, 0.01, 0.02)}


def kept(run: Path) -> tuple[list[OptimizerState], dict[str, list[float]]]:
    """What the newest checkpoint has of the optimizer, and its scalars, of all parameters."""
    folder = step_folder(run, latest_step(run) or 0)
    manifest = CheckpointManifest.read(folder)
    reader = SliceReader(folder, read_headers(folder, [record.name for record in manifest.files]))
    scalars = {
        name: [
            reader.read(f"optimizer.{name}", parameter, 0, 1).item()
            for group in manifest.optimizer_state
            for parameter in group.parameters
        ]
        for name in manifest.optimizer_state[0].scalars
    }
    return manifest.optimizer_state, scalars


@pytest.mark.parametrize("name", CASES)
def test_kills_and_other_world_sizes(name: str, small_run: Path, tmp_path: Path) -> None:
    """Guards against an optimizer that trains to the end and whose checkpoint is then called damaged, or is resumed without its state."""
    own, for_losses, for_weights = CASES[name]
    straight, killed, chain = (tmp_path / folder for folder in ("straight", "killed", "chain"))
    said = train(2, small_run, straight, *OPTIONS, *own, "train.zero_stage=1").succeed().stdout()
    assert f"building the optimizer, {name}" in said

    job = train(2, small_run, killed, *OPTIONS, *own, "train.zero_stage=1")
    assert job.until(lambda: latest_step(killed))
    job.kill()
    job.wait()
    assert (latest_step(killed) or 0) < STEPS
    train(2, small_run, killed, *OPTIONS, *own, "train.zero_stage=1").succeed()
    assert same_files(killed, straight)

    for number, (processes, stage) in enumerate([(2, 0), (1, 0), (2, 1)], start=1):
        steps = (f"train.zero_stage={stage}", f"train.max_steps={2 * number}")
        train(processes, small_run, chain, *OPTIONS, *own, *steps).succeed()
    assert loss_difference(step_rows(chain), step_rows(straight)) < for_losses
    assert distance(chain, straight) < for_weights
    groups, scalars = kept(chain)
    assert (groups, scalars) == kept(straight) and all(len(set(values)) == 1 for values in scalars.values())
    if name == "NAdam":
        assert [(group.tensors, group.scalars) for group in groups] == 2 * [(["exp_avg", "exp_avg_sq"], ["step", "mu_product"])]
        assert scalars["step"][0] == STEPS and 0 < scalars["mu_product"][0] < 1
    else:
        assert [(group.tensors, group.scalars) for group in groups] == 2 * [(["momentum"], [])]
    assert run_module("pipeline.checkpoint", "verify", chain).stdout.splitlines()[-1] == "intact"
    assert math.isfinite(sum(row["loss"] for row in step_rows(chain)))

    other = train(1, small_run, chain, *OPTIONS, "optim.name=torch.optim:RAdam")
    assert other.wait() == [2] and "no run can go on with another optim.name" in other.stderr()
    changed = train(1, small_run, chain, *OPTIONS, *own, "optim.options={betas: [0.8, 0.9]}")
    assert changed.wait() == [2] and "optim.options" in changed.stderr()


@pytest.mark.parametrize("name", ["LBFGS", "Adafactor"])
def test_state_that_no_checkpoint_can_hold_is_refused_before_the_first_step(name: str, small_run: Path, tmp_path: Path) -> None:
    """Guards against a run that trains to its end and cannot be resumed."""
    job = train(2, small_run, tmp_path / "run", *OPTIONS, f"optim.name=torch.optim:{name}", "optim.weight_decay=0")
    assert job.wait() == [2, 2]
    (sentence,) = job.stderr().strip().splitlines()
    assert sentence.startswith(f"error: optim.name torch.optim:{name} ") and sentence.endswith("choose another optimizer.")
    assert latest_step(tmp_path / "run") is None and not (tmp_path / "run" / "metrics.jsonl").exists()
