"""Every family learns in the whole system: DeepSpeed ZeRO 2, activation checkpointing, stochastic depth, bf16.

Of the three largest, narrow models; ``tests/config/test_recipes.py`` takes two steps with those that are published.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from support.precisions import BF16, BF16_BATCH, BF16_STEPS, FP32, RECIPE
from support.ranks import run_forked
from support.runs import step_rows

SIZES = {"pervit_t": 32, "convit_ti": 32, "deit_t": 32, "lsat_narrow": 32, "posmlp_narrow": 32, "gmlp_narrow": 32}
LEARNING_RATES = {"lsat_narrow": 2e-3, "posmlp_narrow": 2e-3, "gmlp_narrow": 5e-3}  # of the others: 5e-4


def train(name: str, config: Path, run: Path, precision: str, batch: int, steps: int) -> list[dict]:
    """The log of the first steps on the digits."""
    plain = "augment={rand_augment_ops: 0, erasing: 0, mixup: 0, cutmix: 0}"
    recipe = [
        f"model.image_size={SIZES[name]}",
        f"optim.lr={LEARNING_RATES.get(name, 5e-4)}",
        "optim.lr_batch_size=32",
        "optim.warmup_epochs=0.05",
        "train.label_smoothing=0",
        "data.flip=0",
    ]
    system = [
        "train.zero_stage=2",
        "train.activation_checkpointing=true",
        f"train.precision={precision}",
        "model.drop_path=0.05",
    ]
    size = [f"train.global_batch_size={batch}", f"train.micro_batch_size={batch}", f"train.max_steps={steps}", "train.epochs=1"]
    options = (f"output_dir={run}", f"model.name={name}", plain, *recipe, *system, *size)
    run_forked("support.train_narrow", "--config", config, *options)
    return step_rows(run)


@pytest.mark.parametrize("name", SIZES)
def test_the_loss_goes_down_on_the_digits(name: str, small_run: Path, tmp_path: Path) -> None:
    """Guards against a family that builds and runs but does not learn, or that DeepSpeed or checkpointing break."""
    rows = train(name, small_run, tmp_path / "run", RECIPE, batch=32, steps=16)
    losses = [row["loss"] for row in rows]
    assert np.mean(losses[-3:]) < np.mean(losses[:3]) - 0.05, losses


@pytest.mark.parametrize("name", SIZES)
def test_bf16_takes_the_same_steps_as_fp32(name: str, small_run: Path, tmp_path: Path) -> None:
    """Guards against a family that bf16 breaks under DeepSpeed and activation checkpointing: types that do not meet, a loss that
    leaves fp32's by more than rounding."""
    in_bf16, in_fp32 = (train(name, small_run, tmp_path / p, p, BF16_BATCH, BF16_STEPS) for p in (BF16, FP32))
    assert [row["grad_norm"] for row in in_bf16] != [row["grad_norm"] for row in in_fp32]
    np.testing.assert_allclose([row["loss"] for row in in_bf16], [row["loss"] for row in in_fp32], rtol=0.1)
