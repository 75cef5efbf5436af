"""What the authors' scripts say beside their papers: the ends of the schedules, and what decays."""

from __future__ import annotations

import pytest
import torch

from pipeline.config import load_config
from pipeline.config.loading import shipped_names
from pipeline.models import create_model
from pipeline.optim.build import parameter_groups


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


def test_all_that_convit_trained_decays_its_embeddings() -> None:
    """Guards against a row of ConViT's code without its weight decay: 52 tensors of a DeiT and not 50. Those that it quotes from
    Touvron et al. (Table 1: "The results for DeiT-Ti, DeiT-S and DeiT-B are reported"), and all others, do not."""
    configs = {name: load_config(name) for name in shipped_names() if not name.startswith("base/")}
    decaying = {name for name, config in configs.items() if config.optim.decay_embeddings}
    models = {name for name, config in configs.items() if config.model.name.startswith("convit")}
    rows = {name for name in configs if name.startswith("ablations/convit_")}
    deits = {f"deit_{size}_plus{data}" for size in ("ti", "s", "b") for data in ("", "_cifar100")}
    assert decaying == models | rows | deits
    with torch.device("meta"):
        model = create_model("deit_s_plus", 1000)
    groups = {name: parameter_groups(model, configs[name].optim) for name in ("deit_s_plus", "deit_s")}
    decayed = {name: set(groups[name][0]["names"]) for name in groups}
    assert len(decayed["deit_s_plus"]) == 52 and len(decayed["deit_s"]) == 50
    assert decayed["deit_s_plus"] - decayed["deit_s"] == {"class_token", "position_embedding.weight"}
