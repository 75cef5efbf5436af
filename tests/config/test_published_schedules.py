"""What the authors' scripts say beside their papers: the ends of the schedules, and what decays."""

from __future__ import annotations

import pytest

from pipeline.config import load_config
from pipeline.config.loading import shipped_names


@pytest.mark.parametrize(
    ("run", "warmup_lr", "min_lr", "cooldown"),
    [
        ("pervit_m", 1e-6, 1e-5, 0),
        ("lsat_t_224", 5e-7 * 736 / 512, 5e-6 * 736 / 512, 0),  # main_tiny_imagenet.py alone scales them
        ("lsat_s_224", 1e-6, 1e-5, 0),
        ("lsat_t_32_cifar10", 1e-6, 1e-5, 0),
        ("posmlp_t", 1e-5, 1e-6, 0),
        ("posmlp_s", 1e-5, 1e-6, 10),
        ("gmlp_s", 1e-5, 1e-6, 0),
    ],
)
def test_the_ends_of_the_schedule_are_the_published_ones(run: str, warmup_lr: float, min_lr: float, cooldown: float) -> None:
    """Guards against a first or last learning rate that another model's script has."""
    optim = load_config(run).optim
    assert (optim.warmup_lr, optim.min_lr, optim.cooldown_epochs) == (pytest.approx(warmup_lr), pytest.approx(min_lr), cooldown)
    assert not optim.warmup_prefix


def test_convit_alone_decays_its_embeddings() -> None:
    """Guards against a ConViT without its published weight decay, and against DeiTs with it."""
    configs = {name: load_config(name) for name in shipped_names() if not name.startswith("base/")}
    decaying = {name for name, config in configs.items() if config.optim.decay_embeddings}
    assert decaying == {name for name, config in configs.items() if config.model.name.startswith("convit")} != set()
