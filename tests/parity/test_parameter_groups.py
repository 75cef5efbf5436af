"""The parameters that decay beside those of the authors' optimizers."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from pipeline.config import load_config
from pipeline.models import create_model
from pipeline.models.weights.reference_names import authors_names
from pipeline.optim.build import build_optimizer
from support import parity

CONFIGS = Path(__file__).parents[2] / "configs"
FAMILIES = ("pervit", "convit", "deit", "lsat", "posmlp")
GROUPS = {name: its for family in FAMILIES for name, its in parity.load(family)["groups"].items()}


@pytest.mark.parametrize("name", GROUPS)
def test_the_same_parameters_decay(name: str) -> None:
    """Guards against a parameter in the other group: by the authors' names, as many of each form as there."""
    recipe = CONFIGS / f"{name}.yaml"
    config = load_config(recipe if recipe.exists() else CONFIGS / f"{name}_cifar10.yaml")
    with torch.device("meta"):
        model = create_model(name, config.model.num_classes, config.model.image_size)
    model.to_empty(device="cpu")  # the values do not matter; a fused optimizer takes no meta tensors
    own = dict(model.named_parameters())
    theirs = {id(own[name]): authors for authors, name in authors_names(model).items() if name in own}
    decayed, not_decayed = build_optimizer(model, config.optim).param_groups
    assert decayed["weight_decay"] == config.optim.weight_decay > 0 == not_decayed["weight_decay"]
    ours = {
        key: parity.folded([theirs[id(parameter)] for parameter in group["params"]])
        for key, group in (("decayed", decayed), ("not_decayed", not_decayed))
    }
    assert ours == {key: GROUPS[name][key] for key in ours}
