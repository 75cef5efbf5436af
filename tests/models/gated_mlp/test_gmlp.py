"""gMLP computes what timm's gmlp_s16_224 computes, and takes PosMLP's gating units."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from pipeline.config import section_from_dict
from pipeline.errors import UserError
from pipeline.models import create_model, load_reference_state_dict
from pipeline.models.common.probe import recorded
from pipeline.models.flops import count
from pipeline.models.gated_mlp.gmlp import GMLP, GMLPSwitches
from support.golden import RULES, Golden, assert_close, make_input
from support.two_steps import two_steps

GOLDEN = Golden("gmlp_s")


def small(**options) -> GMLP:
    switches = section_from_dict(GMLPSwitches, options.pop("switches", {}), key="model.switches")
    return GMLP(16, 4, 6, num_classes=5, image_size=64, switches=switches, **options)


@pytest.mark.parametrize("rule", RULES)
def test_logits_reproduce_timm(rule: str) -> None:
    """Guards against the other half being mixed and against another epsilon in the gate's norm."""
    model = load_reference_state_dict(create_model("gmlp_s").double(), GOLDEN.weights(rule)).eval()
    for dtype, suffix, tolerance in ((torch.float64, "f64", 1e-10), (torch.float32, "f32", 1e-4)):
        with torch.no_grad():
            logits = model.to(dtype)(make_input(224).to(dtype))
        assert_close(logits, GOLDEN.arrays[f"logits_{suffix}_{rule}"], tolerance)


@pytest.mark.parametrize(
    ("switches", "parameters", "gmacs"), [({}, 19_422_656, 4.42), ({"mixing": "ggqpe"}, 18_225_536, 4.45)], ids=["sgu", "ggqpe"]
)
def test_parameters_and_multiply_accumulates_of_table_3(switches: dict, parameters: int, gmacs: float) -> None:
    """Guards against another layout than the paper's: 19.4 M and 4.42 G with SGU, 18.2 M and 4.45 G with GGQPE."""
    row = count("gmlp_s", switches=switches)
    assert row.params == parameters
    assert row.gmacs == pytest.approx(gmacs, abs=6e-3)


def test_reference_loading_is_strict_in_both_directions() -> None:
    """Guards against weights that are quietly left out or quietly ignored."""
    weights = GOLDEN.weights("A")
    with torch.device("meta"):
        model = create_model("gmlp_s")
    with pytest.raises(UserError, match=r"1 missing \(blocks.3.gate.bias\), 0 unknown"):
        load_reference_state_dict(model, {k: v for k, v in weights.items() if k != "blocks.3.mlp_channels.gate.proj.bias"})
    with pytest.raises(UserError, match=r"0 missing, 1 unknown \(pos_embed\)"):
        load_reference_state_dict(model, {**weights, "pos_embed": torch.zeros(1)})


def test_a_fresh_gate_is_the_identity() -> None:
    """Guards against a gate that starts at zero and passes nothing on (gMLP, Sec. 2.1: W near 0, b = 1)."""
    gate = small().blocks[0].gate
    x = torch.randn(2, 1, 16, 96)  # (B, windows, N, width)
    torch.testing.assert_close(gate(x, None), x[..., :48], rtol=0, atol=1e-3)


GATE = "blocks.0.gate."


@pytest.mark.parametrize(
    ("switches", "names"),
    [
        ({}, {"mixing.weight", "bias", "norm.weight", "norm.bias"}),
        ({"mixing": "lrpe_m"}, {"mixing.weight", "mixing.table", "bias", "norm.weight", "norm.bias"}),
        ({"mixing": "lrpe"}, {"mixing.table", "bias", "norm.weight", "norm.bias"}),
        ({"mixing": "glrpe"}, {"mixing.table", "bias", "norm.weight", "norm.bias"}),
        ({"mixing": "ggqpe", "groups": 4}, {"mixing.centers", "mixing.spreads", "bias"}),
        ({"token_bias": False, "norm": False, "combine": "concatenate"}, {"mixing.weight"}),
    ],
)
def test_every_map_builds_and_trains(switches: dict, names: set[str]) -> None:
    """Guards against a gating unit that only works in PosMLP, and against dead parameters."""
    torch.manual_seed(0)
    model = small(switches=switches)
    assert {n.removeprefix(GATE) for n, _ in model.named_parameters() if n.startswith(GATE)} == names
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.0)
    two_steps(model, optimizer, [torch.randn(4, 3, 64, 64)] * 2, labels=[0, 1, 2, 3])
    still = [name for name, p in model.named_parameters() if torch.equal(p, before[name])]
    assert still == [], "the classifier starts at zero, so all others move in the second step"


def test_sizes_and_groups_that_do_not_fit_are_refused() -> None:
    """Guards against a traceback where tokens and their weights do not match."""
    with pytest.raises(UserError, match="an image has 64 x 128 pixels, but the model was built for 64 x 64"):
        small()(torch.randn(1, 3, 64, 128))
    with pytest.raises(UserError, match="model.image_size must be a multiple of 16 .* got 100: set it to 96"):
        create_model("gmlp_s", image_size=100)
    with pytest.raises(
        UserError,
        match="model.switches.groups must divide the 48 mixed channels, got 5: set it to a power of two, for example 8",
    ):
        small(switches={"mixing": "ggqpe", "groups": 5})
    with pytest.raises(UserError, match="must leave groups alone unless mixing is one of glrpe, ggqpe"):
        small(switches={"groups": 4})


def test_checkpointing_stochastic_depth_batch_and_autocast() -> None:
    """Guards against gradients that recomputation changes, images of a batch that see each other, and maps in bfloat16."""
    gradients, switches = [], {"mixing": "ggqpe"}
    for checkpointing in (False, True):
        torch.manual_seed(0)
        model = small(drop_path=0.4, activation_checkpointing=checkpointing, switches=switches)
        nn.init.normal_(model.head.weight)
        images, noise = torch.randn(4, 3, 64, 64), torch.rand(4, model.noise_per_sample)
        model(images, noise).square().sum().backward()
        gradients.append({n: p.grad for n, p in model.named_parameters()})
    assert all(torch.equal(gradients[0][name], gradients[1][name]) for name in gradients[0])
    assert noise.shape == (4, 4) and (model.drop_path_rates == 0.4).all()

    model.eval()
    torch.testing.assert_close(model(images)[:1], model(images[:1]))
    with recorded("position", "covariance") as values, torch.autocast("cpu", torch.bfloat16):
        assert torch.isfinite(model(images)).all()
    assert [v.shape for v in values["position"]] == [(8, 16, 16)] * 4
    assert all(v.dtype == torch.float32 for v in values["position"] + values["covariance"])
