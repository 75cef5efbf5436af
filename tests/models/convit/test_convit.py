"""ConViT computes what the authors' code computes."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from pipeline.errors import UserError
from pipeline.models import create_model, flops, load_reference_state_dict
from pipeline.models.common.probe import recorded
from pipeline.models.common.vit import merge_heads, split_heads
from pipeline.models.convit import GatedPositionalSelfAttention, PositionalSelfAttention, relative_positions
from support.golden import RULES, Golden, assert_close, make_input

GOLDEN = Golden("convit_tiny")

CENTRE = 7 * 14 + 7  # the query whose attention was measured


def small(**options) -> nn.Module:
    """ConViT-Ti on 3 x 3 patches."""
    torch.manual_seed(0)
    return create_model("convit_ti", num_classes=5, image_size=48, **options)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize(("dtype", "suffix", "tolerance"), [(torch.float64, "f64", 1e-5), (torch.float32, "f32", 1e-4)])
def test_logits_reproduce_the_authors_code(rule: str, dtype: torch.dtype, suffix: str, tolerance: float) -> None:
    """Guards against any of the details that shift the published weights: offsets, gates, the class token's place, norms."""
    model = load_reference_state_dict(create_model("convit_ti").to(dtype), GOLDEN.weights(rule)).eval()
    with torch.no_grad():
        logits = model(make_input(224).to(dtype))
    assert_close(logits, GOLDEN.arrays[f"logits_{suffix}_{rule}"], tolerance)


@pytest.mark.parametrize("rule", RULES)
def test_layers_and_attention_reproduce_the_authors_code(rule: str) -> None:
    """Guards against probes that show other attention than the one that is applied, and against errors that cancel out."""
    model = load_reference_state_dict(create_model("convit_ti").double(), GOLDEN.weights(rule)).eval()
    outputs = {}
    for name in GOLDEN.meta["trace_names"][1:-1]:  # the blocks
        model.get_submodule(name).register_forward_hook(lambda _, __, out, name=name: outputs.update({name: out}))
    with torch.no_grad(), recorded("attention", "position", "gate") as values:
        model(make_input(224).double())

    trace = torch.stack(list(outputs[name].flatten()[:8] for name in GOLDEN.meta["trace_names"][1:-1]))  # (12, 8)
    np.testing.assert_allclose(trace, GOLDEN.arrays[f"trace_first8_{rule}"][1:-1], rtol=1e-9, atol=1e-12)
    assert [len(values[name]) for name in ("attention", "position", "gate")] == [12, 10, 10]
    attention, position = values["attention"][0], values["position"][0]  # (2, 4, 196, 196), (4, 196, 196)
    np.testing.assert_allclose(attention[:, :, CENTRE], GOLDEN.arrays[f"gpsa0_attn_rowq77_{rule}"], rtol=1e-9)
    np.testing.assert_allclose(attention[:, :, :5, :5], GOLDEN.arrays[f"gpsa0_attn_corner_{rule}"], rtol=1e-9)
    np.testing.assert_allclose(attention.square().sum((2, 3)), GOLDEN.arrays[f"gpsa0_attn_sumsq_{rule}"], rtol=1e-9)
    np.testing.assert_allclose(position[:, CENTRE], GOLDEN.arrays[f"gpsa0_pos_rowq77_{rule}"], rtol=1e-9)
    assert values["attention"][-1].shape == (2, 4, 197, 197), "with the class token"


def test_convolutional_initialization() -> None:
    """Guards against heads that start at other offsets, another locality strength, and gates that do not start at 1."""
    model = create_model("convit_ti").double().eval()
    attention = model.blocks[0].attn
    np.testing.assert_array_equal(attention.position_projection.weight.detach(), GOLDEN.meta["init_pos_proj_weight"])
    assert torch.equal(attention.v.weight, torch.eye(192, dtype=torch.float64))
    nn.init.zeros_(attention.qk.weight)  # uniform content attention
    with torch.no_grad(), recorded("attention", "position", "gate") as values:
        model(torch.zeros(1, 3, 224, 224, dtype=torch.float64))
    np.testing.assert_allclose(values["position"][0][:, CENTRE], GOLDEN.arrays["init_gpsa0_pos_rowq77_f64"], rtol=1e-9)
    uniform = GOLDEN.arrays["init_gpsa0_attn_uniformcontent_rowq77_f64"]
    np.testing.assert_allclose(values["attention"][0][0, :, CENTRE], uniform, rtol=1e-9)
    np.testing.assert_allclose(torch.stack(values["gate"]), np.full((10, 4), 1 / (1 + np.exp(-1))), rtol=1e-12)


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("convit_ti", 5_710_512),
        ("convit_ti_plus", 9_972_912),
        ("convit_s", 27_777_322),
        ("convit_s_plus", 48_979_882),
        ("convit_b", 86_540_040),
        ("convit_b_plus", 153_134_856),
    ],
)
def test_parameter_counts_are_exact(name: str, parameters: int) -> None:
    """Guards against a layout that is not Table 1's."""
    with torch.device("meta"):
        model = create_model(name)
    assert sum(p.numel() for p in model.parameters()) == parameters


def test_reference_loading_is_strict_in_both_directions() -> None:
    """Guards against weights that are quietly left out or quietly ignored."""
    model, weights = create_model("convit_ti"), GOLDEN.weights("A")
    missing = {k: v for k, v in weights.items() if k != "blocks.3.attn.gating_param"}
    with pytest.raises(UserError, match=r"1 missing \(blocks.3.attn.gating\), 0 unknown"):
        load_reference_state_dict(model, missing)
    with pytest.raises(UserError, match=r"0 missing, 1 unknown \(dist_token\)"):
        load_reference_state_dict(model, {**weights, "dist_token": torch.zeros(1)})
    with pytest.raises(UserError, match=r"position_embedding.weight \(1, 196, 192\) instead of \(1, 4, 192\)"):
        load_reference_state_dict(create_model("convit_ti", image_size=32), weights)


def test_attention_is_the_papers_formula() -> None:
    """Guards against the two fused terms drifting from Eq. 6 and 7, and the ungated layer from Eq. 4."""
    torch.manual_seed(0)
    x = torch.randn(2, 12, 32, dtype=torch.float64)  # 3 rows of 4 patches
    offsets = relative_positions(3, 4, x.device, x.dtype)
    assert offsets[0, 11].tolist() == [3, 2, 13] and offsets[5, 2].tolist() == [1, -1, 2]
    gated, summed = GatedPositionalSelfAttention(32, 4).double(), PositionalSelfAttention(32, 4).double()
    nn.init.normal_(gated.gating)
    for layer in (gated, summed):
        q, k = split_heads(layer.qk(x), 2, 4)
        content, position = q @ k.mT * 8**-0.5, layer.position_projection(offsets).permute(2, 0, 1)
        if layer is gated:
            s = gated.gating.sigmoid().view(4, 1, 1)
            attention = (1 - s) * content.softmax(-1) + s * position.softmax(-1)
            attention = attention / attention.sum(-1, keepdim=True)
        else:
            attention = (content + position).softmax(-1)
        with recorded("attention") as values:
            out = layer(x, offsets)
        expected = layer.proj(merge_heads(attention @ split_heads(layer.v(x), 1, 4)[0]))
        torch.testing.assert_close(out, expected, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(values["attention"][0], attention.detach(), rtol=1e-12, atol=1e-12)


def test_counts_of_multiply_accumulates() -> None:
    """Guards against attention that goes uncounted, and against more work than the one product that the fused form adds."""
    row = flops.count("convit_ti")
    assert row.gmacs_modules == pytest.approx(1.077, abs=5e-4)  # the paper's 1G
    second_product_with_v = 10 * 196**2 * 192 / 1e9
    assert row.gmacs - second_product_with_v == pytest.approx(1.257, abs=5e-4)  # the authors' code


@pytest.mark.parametrize("size", [16, 32, 160])
def test_any_size_the_patches_divide(size: int) -> None:
    """Guards against a model that is tied to 224 pixels."""
    model = create_model("convit_ti", num_classes=3, image_size=size).eval()
    with torch.no_grad():
        assert model(torch.randn(2, 3, size, size)).shape == (2, 3)
    with pytest.raises(UserError, match=f"an image has 48 x 64 pixels, .* for {size} x {size} .*: set model.image_size"):
        model(torch.randn(1, 3, 48, 64))


@pytest.mark.parametrize("size", [8, 100])
def test_a_size_the_patches_do_not_divide_is_refused(size: int) -> None:
    """Guards against a traceback from inside a convolution."""
    with pytest.raises(UserError, match=f"model.image_size must be a multiple of 16 .* got {size}"):
        create_model("convit_ti", image_size=size)


def test_an_image_is_judged_alone_and_recomputation_changes_nothing() -> None:
    """Guards against a batch that leaks between images, and against recomputation with other random numbers."""
    model = small().eval()
    images = torch.randn(2, 3, 48, 48)
    with torch.no_grad():
        torch.testing.assert_close(model(images)[:1], model(images[:1]), rtol=1e-5, atol=1e-6)
    gradients = []
    for checkpointing in (False, True):
        model = small(drop_path=0.3, activation_checkpointing=checkpointing)
        model(
            images, torch.rand(2, model.noise_per_sample, generator=torch.Generator().manual_seed(1))
        ).square().sum().backward()
        gradients.append({name: p.grad for name, p in model.named_parameters()})
    assert model.drop_path_rates[-1] == pytest.approx(0.3)
    assert all(torch.equal(gradients[0][name], gradients[1][name]) for name in gradients[0])


def test_position_maps_keep_full_precision_under_autocast() -> None:
    """Guards against bfloat16 scores, which count in ones where far keys' scores are in the hundreds."""
    model = create_model("convit_ti", num_classes=5)
    images = torch.randn(2, 3, 224, 224)
    with torch.no_grad(), recorded("position") as exact:
        expected = model(images)
    with torch.autocast("cpu", torch.bfloat16), recorded("position") as values:
        scores = model(images)
    scores.float().square().sum().backward()
    assert torch.equal(values["position"][0], exact["position"][0]) and values["position"][0].dtype == torch.float32
    torch.testing.assert_close(scores.float(), expected, rtol=0.05, atol=0.02)
    assert all(torch.isfinite(p.grad).all() for p in model.parameters())
