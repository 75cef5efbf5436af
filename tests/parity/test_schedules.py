"""Learning rates and optimizer settings of the configs beside those of the authors' scripts."""

from __future__ import annotations

from pathlib import Path

import pytest

from pipeline.config import Config, load_config
from pipeline.optim.build import learning_rate
from support import parity

CONFIGS = Path(__file__).parents[2] / "configs"
FAMILIES = ("pervit", "convit", "deit", "lsat", "posmlp")
SCHEDULES = {name: its for family in FAMILIES for name, its in parity.load(family)["schedules"].items()}
STEPS_PER_EPOCH = 20

schedules = pytest.mark.parametrize("name", SCHEDULES)


def rate(config: Config, step: int) -> float:
    return learning_rate(step, STEPS_PER_EPOCH, config.train.epochs, config.train.global_batch_size, config.optim)


@schedules
def test_learning_rates_at_forty_epochs(name: str) -> None:
    """Guards against another schedule: the cosine's beginning, the linear scaling, the rates at both ends."""
    config, theirs = load_config(CONFIGS / f"{name}.yaml"), SCHEDULES[name]
    ours = {epoch: rate(config, int(epoch) * STEPS_PER_EPOCH) for epoch in theirs["at"]}
    assert len(ours) >= 40
    assert ours == pytest.approx(theirs["at"], rel=1e-12, abs=0)


@schedules
def test_the_learning_rate_in_sum(name: str) -> None:
    """Ours moves by step, theirs by epoch and up to one epoch late: over a run that makes less than 0.1 %."""
    config, theirs = load_config(CONFIGS / f"{name}.yaml"), SCHEDULES[name]
    steps = config.train.epochs * STEPS_PER_EPOCH
    ours = sum(rate(config, step) for step in range(int(steps))) / STEPS_PER_EPOCH
    assert ours == pytest.approx(theirs["sum"], rel=1e-3)


@schedules
def test_the_optimizers_settings(name: str) -> None:
    """Guards against another batch size, length, weight decay, epsilon or clipping than the published command's."""
    config, theirs = load_config(CONFIGS / f"{name}.yaml"), SCHEDULES[name]
    optim = config.optim
    assert config.train.global_batch_size == theirs["batch"]
    assert config.train.epochs == theirs["epochs"]
    # PosMLP's configurations and logs contradict each other about the epochs after the cosine; the logs tell what was run.
    assert config.train.epochs + optim.cooldown_epochs == (theirs["epochs_in_log"] or theirs["epochs_in_code"])
    assert (optim.weight_decay, optim.eps, optim.clip_grad_norm) == (theirs["weight_decay"], theirs["eps"], theirs["clip_grad"])
    assert theirs["betas"] is None and optim.betas == (0.9, 0.999)  # None: PyTorch's default
