"""Learning rates and parameter groups beside those of the papers' code."""

from __future__ import annotations

import math

import pytest
import torch

from pipeline.config import OptimConfig, load_config
from pipeline.models import create_model
from pipeline.optim.build import build_optimizer, learning_rate
from support.launching import REPOSITORY

# The mean learning rate over all epochs, as timm's CosineLRScheduler gives it (0.3.2 for PerViT, ConViT and DeiT, 0.4.12 for LSAT
# and PosMLP) with the arguments of the authors' scripts, and stepped as in their loops: once an epoch, one epoch late but for
# PosMLP. Not from these configs.
MEANS = {
    "pervit_t": 4.966326e-04,
    "pervit_s": 4.966326e-04,
    "pervit_m": 4.718779e-04,
    "convit_ti": 4.966326e-04,
    "deit_t": 4.966326e-04,
    "convit_ti_plus": 2.016310e-04,
    "deit_b_plus": 2.016310e-04,
    "convit_s_plus_cifar100": 2.046630e-04,
    "lsat_t_224": 3.391622e-04,
    "lsat_s_224": 1.278806e-04,
    "lsat_t_32_cifar10": 3.583506e-04,
    "lsat_s_32_cifar10": 1.586100e-04,
    "lsat_b_32_cifar10": 8.178664e-05,
    "posmlp_t": 9.674004e-04,
    "posmlp_s": 4.684590e-04,
    "gmlp_s": 4.840410e-04,
    "pervit_m_inat19": 4.194871e-05,
}


@pytest.mark.parametrize("run", MEANS)
def test_the_learning_rates_add_up_to_those_of_the_papers_code(run: str) -> None:
    """Guards against a schedule that is the papers' by its keys alone: with the cosine after the warm-up it was 1.6 to 7 % more."""
    config, per_epoch = load_config(REPOSITORY / "configs" / f"{run}.yaml"), 20
    train, optim = config.train, config.optim
    steps = int((train.epochs + optim.cooldown_epochs) * per_epoch)
    rates = [learning_rate(step, per_epoch, train.epochs, train.global_batch_size, optim) for step in range(steps)]
    assert math.fsum(rates) / steps == pytest.approx(MEANS[run], rel=1e-3)


def test_the_cosine_counts_from_the_first_step_unless_the_warm_up_is_a_prefix() -> None:
    """Guards against a warm-up that delays the cosine, which timm's default does not."""
    shared = {"lr": 1.0, "lr_batch_size": 8, "min_lr": 0.1, "warmup_lr": 0.01, "warmup_epochs": 20}
    counted = OptimConfig(**shared)
    prefixed = OptimConfig(**shared, warmup_prefix=True)
    rates = [[learning_rate(step, 3.0, 100, 8, config) for step in range(331)] for config in (counted, prefixed)]
    assert rates[0][:60] == rates[1][:60]  # the warm-up
    assert rates[0][60:] == pytest.approx(
        [0.1 + 0.45 * (1 + math.cos(math.pi * min(1, step / 300))) for step in range(60, 331)]
    )
    assert rates[1][60] == 1 and rates[0][60] == pytest.approx(0.1 + 0.45 * (1 + math.cos(0.2 * math.pi)))
    assert all(rate == 0.1 for rate in rates[0][300:] + rates[1][300:])  # the cooldown


@pytest.mark.parametrize(("keys", "decayed"), [({}, 70), ({"decay_embeddings": True}, 72)])
def test_convits_embeddings_decay_where_the_config_says_so(keys: dict, decayed: int) -> None:
    """Guards against another set of decayed parameters than that of the published runs, which is 72 tensors, or of former runs."""
    with torch.device("meta"):
        model = create_model("convit_ti", 1000)
    groups = build_optimizer(model, OptimConfig(**keys)).param_groups
    names = {parameter: name for name, parameter in model.named_parameters()}
    found = [{names[parameter] for parameter in group["params"]} for group in groups]
    assert [group["weight_decay"] for group in groups] == [0.05, 0.0] and len(found[0]) == decayed
    assert {"class_token", "position_embedding.weight"} <= found[0 if keys else 1]
    assert all("weight" in name for name in found[0] - {"class_token"})
