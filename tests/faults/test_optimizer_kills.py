"""Optimizers through kills, and through other numbers of processes: exact where AdamW is, and close where it is.

LAMB and Muon, and two that the package knows nothing of, by ``optim.name=module:Class``.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

import pytest

from faults.history import distance, loss_difference, same_files
from pipeline.checkpoint.folder import latest_step, step_folder
from pipeline.checkpoint.manifest import CheckpointManifest
from pipeline.checkpoint.parts import SliceReader, optimizer_quantity, read_headers
from support.ranks import run_forked, train
from support.runs import step_rows

pytestmark = pytest.mark.multiprocess

STEPS = 6
OPTIONS = ("train.global_batch_size=24", "optim.lr_batch_size=24", "optim.clip_grad_norm=1.0", "checkpoint.every_steps=2")
LAYERS = "optim.layer_decay=0.8"


@dataclass(frozen=True)
class Case:
    """An optimizer, and how far it may be from a straight run after other numbers of processes, relative, in losses and weights."""

    options: tuple[str, ...]
    words: str  # of the log
    losses: float
    weights: float
    chain: tuple[tuple[int, int], ...]  # processes and ZeRO stages
    kept: tuple[set[str], ...]  # names of its state, for each form of group


# Muon gives directions that have but rounding errors in a gradient the same length as all others, as Lion does with signs.
ADAM = {"exp_avg", "exp_avg_sq", "step"}
CASES = {
    "lamb": Case(("optim.name=lamb", LAYERS), "LAMB, learning rate times 0.8 per layer below the last of 6", 1e-4, 1e-3, ((2, 2), (1, 0), (3, 3)), (ADAM,)),
    "muon": Case(("optim.name=muon", LAYERS), "Muon for 28 matrices (", 0.02, 0.05, ((2, 2), (1, 0), (3, 3)), (ADAM, {"momentum_buffer", "step"})),
    "nadam": Case(("optim.name=torch.optim:NAdam", "optim.options={momentum_decay: 0.01}"), "NAdam", 1e-4, 1e-3, ((2, 0), (1, 0), (2, 1)), ({*ADAM, "mu_product"},)),
    "lion": Case(("optim.name=support.lion:Lion", "optim.lr=1e-4"), "Lion", 0.01, 0.02, ((2, 0), (1, 0), (2, 1)), ({"momentum"},)),
}  # fmt: skip


@pytest.mark.parametrize("name", ["lion", *(pytest.param(name, marks=pytest.mark.long) for name in CASES if name != "lion")])
def test_kills_and_other_world_sizes(name: str, small_run: Path, tmp_path: Path) -> None:
    """Guards against an optimizer that trains to the end and whose checkpoint is then called damaged, whose state is not all in the
    checkpoint, or depends on who held it."""
    case = CASES[name]
    options = (*OPTIONS, *case.options, f"train.max_steps={STEPS}")
    straight, killed, chain = (tmp_path / folder for folder in ("straight", "killed", "chain"))
    said = train(2, small_run, straight, *options).succeed().stdout()
    assert f"building the optimizer, {case.words}" in said

    job = train(2, small_run, killed, *options)
    assert job.until(lambda: latest_step(killed))
    job.kill()
    job.wait()
    assert (latest_step(killed) or 0) < STEPS
    train(2, small_run, killed, *options).succeed()
    assert same_files(killed, straight)

    for number, (processes, stage) in enumerate(case.chain, start=1):
        train(processes, small_run, chain, *options, f"train.zero_stage={stage}", f"train.max_steps={2 * number}").succeed()
    assert latest_step(chain) == STEPS
    assert loss_difference(step_rows(chain), step_rows(straight)) < case.losses
    assert distance(chain, straight) < case.weights
    rates = [row["lr"] for row in step_rows(chain)]
    assert rates == [row["lr"] for row in step_rows(straight)] and math.isfinite(sum(rates))

    scalars = saved_scalars(chain, case.kept)
    assert scalars == saved_scalars(straight, case.kept)
    assert all(value == STEPS for key, value in scalars.items() if key.startswith("step of "))
    assert run_forked("pipeline.checkpoint", "verify", chain).stdout.splitlines()[-1] == "intact"


def saved_scalars(run: Path, kept: tuple[set[str], ...]) -> dict[str, float]:
    """The optimizer's numbers in the newest checkpoint, whose state has these names."""
    folder = step_folder(run, latest_step(run) or 0)
    manifest = CheckpointManifest.read(folder)
    reader = SliceReader(folder, read_headers(folder, manifest.files))
    groups = manifest.optimizer_state
    assert {parameter for group in groups for parameter in group.parameters} == manifest.shapes.keys()
    assert all({*group.tensors, *group.scalars} in kept for group in groups)
    return {
        f"{scalar} of {parameter}": reader.read(optimizer_quantity(scalar), parameter, 0, 1).item()
        for group in groups
        for scalar in group.scalars
        for parameter in group.parameters
    }


def test_a_run_keeps_its_class_and_its_options(small_run: Path, tmp_path: Path) -> None:
    """Guards against moments of one optimizer in another, and against other options that nobody meant."""
    run, lion = tmp_path / "run", CASES["lion"].options
    train(1, small_run, run, *OPTIONS, *lion, "train.max_steps=2").succeed()
    other = train(1, small_run, run, *OPTIONS, "optim.lr=1e-4", "optim.name=torch.optim:RAdam", "checkpoint.accept=[optim]")
    assert other.wait() == [2] and "no run can continue with another optim.name" in other.stderr()
    changed = (*OPTIONS, *lion, "optim.options={betas: [0.8, 0.9]}", "train.max_steps=4")
    refused = train(1, small_run, run, *changed)
    assert refused.wait() == [2] and "optim.options" in refused.stderr()
    train(1, small_run, run, *changed, "checkpoint.accept=[optim.options]").succeed()
    assert latest_step(run) == 4


@pytest.mark.parametrize("name", ["LBFGS", "Adafactor"])
def test_state_that_no_checkpoint_can_hold_is_refused_before_the_first_step(name: str, small_run: Path, tmp_path: Path) -> None:
    """Guards against a run that trains to its end and cannot be resumed."""
    job = train(2, small_run, tmp_path / "run", *OPTIONS, f"optim.name=torch.optim:{name}", "optim.weight_decay=0")
    assert job.wait() == [2, 2]
    (sentence,) = job.stderr().strip().splitlines()
    assert sentence.startswith(f"error: optim.name torch.optim:{name} ") and sentence.endswith("choose another optimizer.")
    assert latest_step(tmp_path / "run") is None and not (tmp_path / "run" / "metrics.jsonl").exists()
