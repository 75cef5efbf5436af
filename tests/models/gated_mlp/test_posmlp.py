"""PosMLP computes what the authors' code computes, and its ablations change what they say."""

from __future__ import annotations

import math
import re

import numpy as np
import pytest
import torch
from torch import nn

from pipeline.config import section_from_dict
from pipeline.errors import UserError
from pipeline.models import create_model, load_reference_state_dict
from pipeline.models.common.layers import drop_elements
from pipeline.models.common.probe import recorded
from pipeline.models.flops import count
from pipeline.models.gated_mlp.posmlp import PosMLP, PosMLPSwitches
from pipeline.models.gated_mlp.token_mixing import GaussianMap
from support.golden import RULES, Golden, assert_close, make_input
from support.two_steps import two_steps

GOLDEN = Golden("posmlp_t")


def small(image_size: int = 64, **options) -> PosMLP:
    """The whole pyramid, narrow enough for a test; ``switches`` as a config gives them."""
    switches = section_from_dict(PosMLPSwitches, options.pop("switches", {}), key="model.switches")
    return PosMLP(16, num_classes=5, image_size=image_size, switches=switches, **options)


@pytest.mark.parametrize("rule", RULES)
def test_logits_and_maps_reproduce_the_authors_code(rule: str) -> None:
    """Guards against any detail that shifts published weights: axis signs, strided groups, which half is mixed, epsilons."""
    model = load_reference_state_dict(create_model("posmlp_t").double(), GOLDEN.weights(rule)).eval()
    with torch.no_grad(), recorded("position") as values:
        logits = model(make_input(224).double())
    assert_close(logits, GOLDEN.arrays[f"logits_f64_{rule}"], 1e-6)
    assert len(values["position"]) == 24
    for name, layer in (("first", 0), ("last", -1)):
        position = values["position"][layer].permute(1, 2, 0).numpy()  # (query, key, groups), as the golden arrays
        side = math.isqrt(len(position))
        centre = side // 2 * side + side // 2
        np.testing.assert_allclose(position[centre], GOLDEN.arrays[f"posmap_{name}_rowqc_{rule}"], atol=1e-6)
        np.testing.assert_allclose(position[:5, :5], GOLDEN.arrays[f"posmap_{name}_corner_{rule}"], atol=1e-6)
        np.testing.assert_allclose((position**2).sum((0, 1)), GOLDEN.arrays[f"posmap_{name}_sumsq_{rule}"], rtol=1e-6)

    with torch.no_grad():
        logits = model.float()(make_input(224))
    assert_close(logits, GOLDEN.arrays[f"logits_f32_{rule}"], 1e-4)


@pytest.mark.parametrize(
    ("name", "switches", "parameters"),
    [
        ("posmlp_t", {}, 20_925_538),
        ("posmlp_s", {}, 36_816_450),
        ("posmlp_b", {}, 81_976_834),
        ("posmlp_t", {"mixing": "sgu"}, 21_804_004),  # Tables 3 and 10: 21.8 M
        ("posmlp_t", {"mixing": "sgu", "patch_merging": "linear"}, 23_341_540),  # Table 10: 23.3 M
        # SGU's norms, and per group and layer (2 * 14 - 1)² = 729 or 13² = 169 numbers instead of 6
        ("posmlp_t", {"mixing": "glrpe"}, 20_925_538 + 33_024 + (2 * 8 + 2 * 16 + 18 * 32) * 723 + 2 * 64 * 163),
    ],
)
def test_parameter_counts_are_exact(name: str, switches: dict, parameters: int) -> None:
    """Guards against a layout that is not Table 11's, and against ablations that are not those of Tables 3 and 10."""
    with torch.device("meta"):
        model = create_model(name, switches=switches)
    assert sum(p.numel() for p in model.parameters()) == parameters


@pytest.mark.parametrize(("switches", "gmacs"), [({}, 5.21), ({"windows": [28, 14, 14, 7]}, 5.95)])
def test_multiply_accumulates_are_those_of_table_5(switches: dict, gmacs: float) -> None:
    """Guards against token mixing that goes uncounted or runs on other windows than the paper's."""
    row = count("posmlp_t", switches=switches)
    assert row.gmacs == pytest.approx(gmacs, rel=4e-3)


def test_ablations_can_be_counted() -> None:
    """Guards against an ablation that cannot be trained because its operators go uncounted."""
    plain = count("posmlp_t", 64, 10)
    for switches in ({"covariance": "isotropic"}, {"shift_windows": True, "mixing": "lrpe_m"}):
        assert count("posmlp_t", 64, 10, switches).gmacs == pytest.approx(plain.gmacs, rel=0.05)


def test_reference_loading_is_strict_in_both_directions() -> None:
    """Guards against weights that are quietly left out or quietly ignored."""
    weights = GOLDEN.weights("A")
    with torch.device("meta"):
        model = create_model("posmlp_t")
    missing = {k: v for k, v in weights.items() if k != "levels.3.encoder.1.gate_unit.pos.attention_spreads"}
    with pytest.raises(UserError, match=r"1 missing \(stages.3.blocks.1.gate.mixing.spreads\), 0 unknown"):
        load_reference_state_dict(model, missing)
    with pytest.raises(UserError, match=r"0 missing, 1 unknown \(absolute_pos_embed\)"):
        load_reference_state_dict(model, {**weights, "absolute_pos_embed": torch.zeros(1)})


COVARIANCE = {"stages.*.blocks.*.gate.mixing.spreads", "stages.*.blocks.*.gate.mixing.centers"}
CENTERS = {"stages.*.blocks.*.gate.mixing.centers"}
WEIGHT, TABLE = {"stages.*.blocks.*.gate.mixing.weight"}, {"stages.*.blocks.*.gate.mixing.table"}
NORM = {"stages.*.blocks.*.gate.norm.weight", "stages.*.blocks.*.gate.norm.bias"}
LINEAR_STEM = {"stem.projection.weight", "stem.projection.bias", "stem.norm.weight", "stem.norm.bias"}
CONV_STEM = {f"stem.{kind}.*.{leaf}" for kind in ("convolutions", "norms") for leaf in ("weight", "bias")}
CONV_MERGING = {"stages.*.merging.conv.weight", "stages.*.merging.conv.bias"}
SWITCHES = [  # switches, kinds of parameters that come, kinds that go
    ({}, set(), set()),
    ({"mixing": "sgu"}, WEIGHT | NORM, COVARIANCE),
    ({"mixing": "lrpe_m"}, WEIGHT | TABLE | NORM, COVARIANCE),
    ({"mixing": "lrpe"}, TABLE | NORM, COVARIANCE),
    ({"mixing": "glrpe", "groups": [4, 4, 4, 4]}, TABLE | NORM, COVARIANCE),
    ({"mixing": "glrpe", "norm": False}, TABLE, COVARIANCE),
    ({"covariance": "isotropic"}, set(), set()),
    ({"covariance": "free"}, set(), set()),
    ({"learned_centers": False}, set(), CENTERS),
    ({"token_bias": False}, set(), {"stages.*.blocks.*.gate.bias"}),
    ({"token_bias": False, "absolute_position": True}, {"absolute_position.embedding"}, {"stages.*.blocks.*.gate.bias"}),
    ({"norm": True}, NORM, set()),
    ({"combine": "add"}, set(), set()),
    ({"combine": "concatenate"}, set(), set()),
    ({"split": False}, set(), set()),
    ({"groups": [1, 1, 1, 1]}, set(), set()),
    ({"windows": [8, 2, 2, 1]}, set(), set()),
    ({"shift_windows": True}, set(), set()),
    ({"shift_windows": True, "mixing": "sgu"}, WEIGHT | NORM, COVARIANCE),
    ({"patch_embedding": "linear"}, LINEAR_STEM, CONV_STEM),
    ({"patch_merging": "linear"}, {"stages.*.merging.reduction.weight"}, CONV_MERGING),
    ({"head_dropout": 0.0}, set(), set()),
    ({"block_dropout": 0.5}, set(), set()),
]


def kinds(model: nn.Module) -> set[str]:
    """Parameter names without their numbers."""
    return {re.sub(r"\d+", "*", name) for name, _ in model.named_parameters()}


@pytest.fixture(scope="module")
def default_model() -> PosMLP:
    return small()


@pytest.mark.parametrize(
    ("switches", "added", "removed"), SWITCHES, ids=lambda value: str(value) if isinstance(value, dict) else ""
)
def test_every_switch_builds_and_trains_the_parameters_it_has(
    default_model: PosMLP, switches: dict, added: set[str], removed: set[str]
) -> None:
    """Guards against an ablation that is not wired up, leaves dead parameters behind or moves what it says is frozen."""
    torch.manual_seed(0)
    model = small(switches=switches)
    assert kinds(model) - kinds(default_model) == added and kinds(default_model) - kinds(model) == removed
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.0)
    two_steps(model, optimizer, [torch.randn(4, 3, 64, 64)] * 2, labels=[0, 1, 2, 3])
    windows_of_one = {"stages.3"} if switches.get("windows", [0])[-1] == 1 else set()  # a softmax over one key is 1
    for name, parameter in model.named_parameters():
        gaussian_of_one = name[:8] in windows_of_one and name.endswith(("centers", "spreads"))
        assert torch.equal(parameter, before[name]) == gaussian_of_one, name
    for block in model.stages[0].blocks:
        if not switches.get("learned_centers", True):
            assert (block.gate.mixing.centers == 0).all()


@pytest.mark.parametrize(
    ("switches", "message"),
    [
        ({"mixing": "gqpe"}, "model.switches.mixing must be .*'ggqpe', got 'gqpe'"),
        ({"mixing": "lrpe", "groups": [8, 16, 32, 64]}, "must leave groups alone unless mixing is one of glrpe, ggqpe"),
        ({"mixing": "sgu", "covariance": "free"}, "must leave covariance and learned_centers alone"),
        (
            {"windows": [14, 14, 14, 7]},
            "64x64 pixels does not divide into the windows of stage 1, whose side is 14 .* 56 pixels",
        ),
        ({"groups": [5, 5, 5, 5]}, "model.switches.groups must divide the 32 mixed channels, got 5"),
        ({"window": [2, 2, 2, 2]}, "unknown switch 'window': did you mean 'windows'"),
    ],
)
def test_switches_that_do_not_fit_are_refused(switches: dict, message: str) -> None:
    """Guards against an ablation that is silently another one, and against a traceback from inside a view."""
    with pytest.raises(UserError, match=message):
        small(switches=switches)


def test_image_sizes() -> None:
    """Guards against a model tied to 224 pixels, and against windows that do not fill the image."""
    model = small(image_size=64).eval()
    with torch.no_grad():
        assert model(torch.randn(2, 3, 64, 128)).shape == (2, 5)
        assert small(image_size=32).eval()(torch.randn(1, 3, 32, 32)).shape == (1, 5)
        with pytest.raises(
            UserError, match="96x64 pixels does not divide into the windows of stage 3, .* multiples of 64 pixels"
        ):
            model(torch.randn(1, 3, 96, 64))
        with pytest.raises(UserError, match="an image has 128 x 128 pixels, but the model was built for 64 x 64"):
            small(switches={"absolute_position": True})(torch.randn(1, 3, 128, 128))
    with pytest.raises(UserError, match="model.image_size must be a multiple of 32 .* got 100: set it to 96"):
        create_model("posmlp_t", image_size=100)


def test_one_map_per_layer_and_step_whatever_the_batch() -> None:
    """Guards against paying for the map per image or per window, and against images of a batch that see each other."""
    model = small().eval()
    calls = []
    for stage in model.stages:
        for block in stage.blocks:
            block.gate.mixing.register_forward_hook(lambda *_: calls.append(1))
    images = torch.randn(2, 3, 64, 128)
    both = model(images)
    assert len(calls) == 24
    torch.testing.assert_close(both[:1], model(images[:1]), rtol=1e-4, atol=1e-5)


def test_activation_checkpointing_changes_no_gradient() -> None:
    """Guards against recomputation with other random numbers, and against BatchNorm seeing a batch twice."""
    results = []
    for checkpointing in (False, True):
        torch.manual_seed(0)
        model = small(
            drop_path=0.3,
            activation_checkpointing=checkpointing,
            switches={"head_dropout": 0.5, "block_dropout": 0.25, "shift_windows": True},
        )
        images, noise = torch.randn(4, 3, 64, 64), torch.rand(4, model.noise_per_sample)
        model(images, noise).square().sum().backward()
        results.append({n: p.grad for n, p in model.named_parameters()})
        assert int(model.stem.norms[0].num_batches_tracked) == 1
    plain, recomputed = results
    assert all(torch.equal(plain[name], recomputed[name]) for name in plain)


def test_noise_decides_what_is_dropped() -> None:
    """Guards against dropout that draws its own numbers, which a resumed run could not repeat, or that shifts the mean."""
    torch.manual_seed(0)
    model = small(drop_path=0.5, switches={"head_dropout": 0.25})
    assert model.noise_per_sample == 24 + 24 + 128 and model.drop_path_rates[0] == 0 and model.drop_path_rates[-1] == 0.5
    assert small(switches={"head_dropout": 0.0, "block_dropout": 0.0}).noise_per_sample == 0
    images, noise = torch.randn(4, 3, 64, 64), torch.rand(4, model.noise_per_sample)
    assert torch.equal(model(images, noise), model(images, noise))
    for part in (slice(24), slice(24, 48), slice(48, None)):
        other = noise.clone()
        other[:, part] = 1 - other[:, part]
        assert not torch.equal(model(images, noise), model(images, other))
    kept = model._dropout(torch.ones(2000, 128), torch.rand(2000, 128))
    torch.testing.assert_close(kept.mean(), torch.tensor(1.0), atol=0.01, rtol=0)
    torch.testing.assert_close((kept == 0).float().mean(), torch.tensor(0.25), atol=0.01, rtol=0)
    assert torch.equal(model.eval()(images, noise), model(images))


def test_dropped_elements_are_as_good_as_random_and_depend_on_their_sample_alone() -> None:
    """Guards against a hash that drops too many, the same in every sample, or in patterns, and against other decisions on resume."""
    torch.manual_seed(0)
    rate, (samples, elements) = 0.2, (64, 40_000)
    noise = torch.rand(samples)
    kept = drop_elements(torch.ones(samples, 4, elements // 4), rate, noise).flatten(1)  # (samples, elements)
    assert kept.unique().tolist() == [0.0, 1 / (1 - rate)]
    dropped = (kept == 0).double()
    error = (rate * (1 - rate)) ** 0.5  # of one decision
    assert dropped.mean() == pytest.approx(rate, abs=5 * error / (samples * elements) ** 0.5)
    assert dropped.mean(1).std() == pytest.approx(error / elements**0.5, rel=0.4)  # of the samples' shares
    assert dropped.mean(0).std() == pytest.approx(error / samples**0.5, rel=0.05)  # of the places' shares
    centred = dropped - rate
    neighbours = {"elements": centred[:, 1:] * centred[:, :-1], "samples": centred[1:] * centred[:-1]}
    for pairs in neighbours.values():
        assert abs(pairs.mean()) < 5 * error**2 / (samples * elements) ** 0.5

    x = torch.randn(samples, 6, 7, dtype=torch.bfloat16, requires_grad=True)
    together = drop_elements(x, rate, noise)
    assert together.dtype == torch.bfloat16 and torch.equal(together[5:6], drop_elements(x[5:6], rate, noise[5:6]))
    together.float().sum().backward()
    assert torch.equal(x.grad == 0, together == 0)


def test_maps_stay_in_single_precision_under_autocast() -> None:
    """Guards against a Gaussian of squared distances in bfloat16, whose 8 bits cannot tell far keys apart."""
    for switches in ({}, {"mixing": "lrpe_m"}, {"shift_windows": True}):
        model = small(switches=switches)
        images = torch.randn(2, 3, 64, 64)
        noise = torch.rand(2, model.noise_per_sample)
        with recorded("position", "covariance") as exact:
            model(images, noise)
        with recorded("position", "covariance") as autocast, torch.autocast("cpu", torch.bfloat16):
            scores = model(images, noise)
        scores.float().square().sum().backward()
        assert scores.dtype == torch.bfloat16 and torch.isfinite(model.stem.convolutions[0].weight.grad).all()
        assert len(exact["covariance"]) == (24 if model.stages[0].blocks[0].gate.mixing.__class__ is GaussianMap else 0)
        for name in exact:
            assert all(torch.equal(a, b) and b.dtype == torch.float32 for a, b in zip(exact[name], autocast[name]))
