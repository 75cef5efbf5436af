"""Every family learns in the whole system: DeepSpeed ZeRO 2, activation checkpointing, bf16."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from conftest import step_rows
from faults.ranks import run_forked


@pytest.mark.parametrize(
    ("name", "image_size", "lr", "steps"),
    [
        ("pervit_t", 32, 5e-4, 16),
        ("convit_ti", 32, 5e-4, 16),
        ("deit_t", 32, 5e-4, 16),
        ("lsat_t_224", 56, 5e-4, 16),
        ("posmlp_t", 32, 1e-3, 16),
        ("gmlp_s", 32, 1e-3, 40),
    ],
)
def test_the_loss_goes_down_on_the_digits(name: str, image_size: int, lr: float, steps: int, small_run: Path) -> None:
    """Guards against a family that builds and runs but does not learn, or that DeepSpeed, checkpointing or bf16 break."""
    plain = "augment={rand_augment_ops: 0, erasing: 0, mixup: 0, cutmix: 0}"
    recipe = [
        f"model.image_size={image_size}",
        f"optim.lr={lr}",
        "optim.lr_batch_size=32",
        "optim.warmup_epochs=0.05",
        "train.label_smoothing=0",
        "data.flip=0",
    ]
    system = ["train.zero_stage=2", "train.activation_checkpointing=true", "train.precision=bf16", "model.drop_path=0.05"]
    size = ["train.global_batch_size=32", "train.micro_batch_size=32", f"train.max_steps={steps}", "train.epochs=1"]
    run_forked("pipeline.train", "--config", small_run, f"model.name={name}", plain, *recipe, *system, *size)
    losses = [row["loss"] for row in step_rows(small_run.parent / "run")]
    assert np.mean(losses[-3:]) < np.mean(losses[:3]) - 0.05, losses
