"""Each of ConViT's switches changes what it should and nothing else."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from pipeline.config import OptimConfig
from pipeline.errors import UserError
from pipeline.models import create_model
from pipeline.models.common.probe import recorded
from pipeline.optim.build import build_optimizer
from support.two_steps import two_steps

GPSA_NAMES = {
    "gating",
    "qk.weight",
    "v.weight",
    "proj.weight",
    "proj.bias",
    "position_projection.weight",
    "position_projection.bias",
}


def small(**options) -> nn.Module:
    """ConViT-Ti on 3 x 3 patches."""
    torch.manual_seed(0)
    return create_model("convit_ti", num_classes=5, image_size=48, **options)


@pytest.mark.parametrize(
    ("switches", "frozen", "other_start", "gone"),
    [
        ({}, set(), set(), set()),
        ({"gpsa_layers": 4}, set(), set(), set()),
        ({"gpsa_layers": 0}, set(), set(), set()),
        ({"conv_init": False}, set(), {"v.weight", "position_projection.weight"}, set()),
        ({"locality_strength": 2.0}, set(), {"position_projection.weight"}, set()),
        ({"train_gating": False}, {"gating"}, {"gating"}, set()),
        ({"train_gpsa": False}, GPSA_NAMES, set(), set()),
        ({"positional_gating": False}, set(), set(), {"gating"}),
        ({"mask_content_layers": 3}, set(), set(), set()),
        ({"mask_position_layers": 3}, set(), set(), set()),
        ({"mask_position_embedding": True}, set(), set(), set()),
    ],
)
def test_a_switch_changes_the_parameters_it_should(switches: dict, frozen: set, other_start: set, gone: set) -> None:
    """Guards against a switch without effect, one that freezes or starts more than it says, and one that does not train.

    Of the GPSA layers' parameters ``frozen`` are those that two steps must leave alone, ``other_start`` those that start
    otherwise than without the switch and ``gone`` those that do not exist; all others are as ever.
    """
    plain, model = small(), small(switches=switches)
    gpsa_layers = switches.get("gpsa_layers", 10)
    own_start = {name: p.detach().clone() for name, p in model.named_parameters()}
    for layer, block in enumerate(model.blocks):
        names = {name for name, _ in block.attn.named_parameters()}
        assert names == (GPSA_NAMES - gone if layer < gpsa_layers else {"qkv.weight", "proj.weight", "proj.bias"})
        if layer < gpsa_layers:
            for name in names - {"qk.weight", "proj.weight"}:  # random
                same = torch.equal(own_start[f"blocks.{layer}.attn.{name}"], plain.state_dict()[f"blocks.{layer}.attn.{name}"])
                assert same == (name not in other_start), name

    optimizer = build_optimizer(model, OptimConfig(lr=1e-3, warmup_lr=1e-3))
    two_steps(model, optimizer, (torch.randn(4, 3, 48, 48) for _ in range(2)), labels=[0, 1, 2, 3])
    for name, parameter in model.named_parameters():
        _, _, leaf = name.partition(".attn.")
        is_gpsa = bool(leaf) and int(name.split(".")[1]) < gpsa_layers
        if leaf == "position_projection.bias" and leaf not in frozen:
            continue  # softmax takes it out: its gradient is rounding
        assert torch.equal(parameter, own_start[name]) == (is_gpsa and leaf in frozen), name


def test_frozen_gates_are_half_open() -> None:
    """Guards against gates that are frozen at their usual start: Table 3's ablation has λ = 0."""
    with torch.no_grad(), recorded("gate") as values:
        small(switches={"train_gating": False})(torch.randn(1, 3, 48, 48))
    assert torch.equal(torch.stack(values["gate"]), torch.full((10, 4), 0.5))


def test_masks_act_at_test_time_only_and_on_the_first_layers() -> None:
    """Guards against masks that leak into training, need other weights, or mask the wrong term (Tables 5 and 6)."""
    images = torch.randn(2, 3, 48, 48)
    plain = small()
    scores = {}
    for switch, gate in (("mask_content_layers", 1.0), ("mask_position_layers", 0.0)):
        model = small(switches={switch: 3})
        model.load_state_dict(plain.state_dict())  # the same weights
        assert torch.equal(model.train()(images), plain.train()(images))
        with torch.no_grad(), recorded("gate", "attention", "position") as values:
            scores[switch] = model.eval()(images)
        gates = torch.stack(values["gate"])  # (10, 4)
        assert (gates[:3] == gate).all() and torch.equal(gates[3:], plain.blocks[0].attn.gating.sigmoid().expand(7, 4))
        position = values["position"][2].expand(2, -1, -1, -1)
        assert torch.equal(values["attention"][2], position) == (gate == 1.0)
        assert not torch.allclose(plain.eval()(images), scores[switch])
    assert not torch.allclose(*scores.values())

    masked = small(switches={"mask_position_embedding": True})
    assert torch.equal(masked.train()(images), plain.train()(images))
    before = masked.eval()(images)
    assert not torch.allclose(before, plain.eval()(images))
    nn.init.zeros_(plain.position_embedding.weight)
    assert torch.equal(before, plain(images))


@pytest.mark.parametrize(
    ("switches", "message"),
    [
        ({"gpsa_layers": 12}, "model.switches.gpsa_layers must be at most 11, got 12"),
        ({"mask_content_layers": 2, "mask_position_layers": 2}, "content and position at once"),
        ({"gpsa_layers": 4, "mask_content_layers": 5}, "must mask at most gpsa_layers = 4 layers, got 5"),
        ({"positional_gating": False, "train_gating": False}, "no gate to mask or to freeze"),
        ({"positional_gating": False, "mask_content_layers": 3}, "no gate to mask or to freeze"),
        ({"conv_init": False, "locality_strength": 2}, "requires conv_init=true"),
    ],
)
def test_contradictory_switches_are_refused(switches: dict, message: str) -> None:
    """Guards against a switch that is silently without effect."""
    with pytest.raises(UserError, match=message):
        create_model("convit_ti", switches=switches)
