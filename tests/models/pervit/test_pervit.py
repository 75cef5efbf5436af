"""PerViT computes what the authors' code computes."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from pipeline.errors import UserError
from pipeline.kernels.peripheral import biased_attention
from pipeline.models import create_model, list_models, load_reference_state_dict
from pipeline.models.pervit.position import position_distances
from support.golden import RULES, Golden, assert_close, make_input

GOLDEN = Golden("pervit_tiny")


@pytest.mark.parametrize("rule", RULES)
def test_the_golden_weights_are_filled_as_when_they_were_measured(rule: str) -> None:
    """Guards against a changed random stream being taken for a changed model."""
    weights = GOLDEN.weights(rule)
    for key, total in GOLDEN.meta[f"fill_sums_{rule}"].items():
        assert float(weights[key].double().sum()) == pytest.approx(total, rel=1e-9, abs=1e-9), key


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize(("dtype", "suffix", "tolerance"), [(torch.float64, "f64", 1e-5), (torch.float32, "f32", 1e-4)])
def test_logits_reproduce_the_authors_code(rule: str, dtype: torch.dtype, suffix: str, tolerance: float) -> None:
    """Guards against any of the details that shift the published weights: grid, norms, order of kernels, residuals."""
    model = load_reference_state_dict(create_model("pervit_t").to(dtype), GOLDEN.weights(rule)).eval()
    with torch.no_grad():
        logits = model(make_input(224).to(dtype))
    assert_close(logits, GOLDEN.arrays[f"logits_{suffix}_{rule}"], tolerance)


@pytest.mark.parametrize("rule", RULES)
def test_phi_with_the_golden_weights(rule: str) -> None:
    """Guards against a folded first convolution that is not the convolution it replaces."""
    model = load_reference_state_dict(create_model("pervit_t").double(), GOLDEN.weights(rule)).eval()
    with torch.no_grad():
        phi = torch.stack(model.log_phi((14, 14))).exp().numpy()  # (12, heads, 196, 196)
    np.testing.assert_allclose(phi.sum((2, 3)), GOLDEN.arrays[f"phi_sum_{rule}"], rtol=1e-10)
    np.testing.assert_allclose((phi**2).sum((2, 3)), GOLDEN.arrays[f"phi_sumsq_{rule}"], rtol=1e-10)
    for layer in (0, 5, 11):
        np.testing.assert_allclose(phi[layer][:, :5, :5], GOLDEN.arrays[f"phi_corner_L{layer}_{rule}"], rtol=1e-9)
        np.testing.assert_allclose(phi[layer][:, 105], GOLDEN.arrays[f"phi_rowq77_L{layer}_{rule}"], rtol=1e-9)
        np.testing.assert_allclose(phi[layer][:, 0], GOLDEN.arrays[f"phi_rowq00_L{layer}_{rule}"], rtol=1e-9)


def test_phi_at_initialization() -> None:
    """Guards against another peripheral initialization (Supplement Eq. 3): early layers local, late ones global."""
    model = create_model("pervit_t").double().eval()
    with torch.no_grad():
        phi = torch.stack(model.log_phi((14, 14))).exp()  # (12, heads, 196, 196)
    statistics = torch.stack([phi.mean((1, 2, 3)), phi.amin((1, 2, 3)), phi.amax((1, 2, 3))], dim=1).numpy()
    np.testing.assert_allclose(statistics, GOLDEN.arrays["init_phi_meanminmax_f64"], atol=1e-6)
    np.testing.assert_allclose(phi[0, 0, 105].numpy(), GOLDEN.arrays["init_phi_rowq77_head0_L0_f64"], atol=1e-6)
    assert torch.equal(phi, phi[:, :1].expand_as(phi)), "all heads start alike"
    distance = position_distances(14, 14, torch.device("cpu"), torch.float64)[:, 0, 2:-2, 2:-2].flatten(1)
    np.testing.assert_allclose((phi[:, 0] * distance).mean((1, 2)), GOLDEN.meta["init_nonlocality_f64"], rtol=1e-5)


@pytest.mark.parametrize(("name", "parameters"), [("pervit_t", 7_591_000), ("pervit_s", 21_317_672), ("pervit_m", 43_723_936)])
def test_parameter_counts_are_exact(name: str, parameters: int) -> None:
    """Guards against a layout that is not Table S5's."""
    assert name in list_models()
    assert sum(p.numel() for p in create_model(name).parameters()) == parameters


def test_reference_loading_is_strict_in_both_directions() -> None:
    """Guards against weights that are quietly left out or quietly ignored."""
    model, weights = create_model("pervit_t"), GOLDEN.weights("A")
    renamed = model.state_dict().keys()
    assert len(renamed) == len(weights)
    missing = {k: v for k, v in weights.items() if k != "blocks.3.res_path.weight"}
    with pytest.raises(UserError, match=r"1 missing \(blocks.3.residual.weight\), 0 unknown"):
        load_reference_state_dict(model, missing)
    with pytest.raises(UserError, match=r"0 missing, 1 unknown \(pos_embed\)"):
        load_reference_state_dict(model, {**weights, "pos_embed": torch.zeros(1)})
    with pytest.raises(UserError, match=r"head.weight \(1000, 280\) instead of \(10, 280\)"):
        load_reference_state_dict(create_model("pervit_t", num_classes=10), weights)


def test_attention_is_the_papers_formula() -> None:
    """Guards against the additive form drifting from Normalize[exp(τ Q Kᵀ) ⊙ Φp] V (Eq. 3), also when heads are padded."""
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 2, 4, 9, 26, dtype=torch.float64)  # (B, heads, N, head_dim)
    score = torch.randn(4, 9, 9, dtype=torch.float64) * 3
    weights = (q @ k.transpose(-1, -2) * 26**-0.5).exp() * score.sigmoid()
    expected = F.normalize(weights, p=1, dim=-1) @ v
    for alignment in (1, 8):
        torch.testing.assert_close(biased_attention(q, k, v, F.logsigmoid(score), alignment), expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("size", [32, 48, 160, 256])
def test_any_size_the_stem_divides(size: int) -> None:
    """Guards against a model that is tied to 224 pixels: the position grid follows the image."""
    model = create_model("pervit_t", num_classes=3, image_size=size).eval()
    with torch.no_grad():
        assert model(torch.randn(2, 3, size, size)).shape == (2, 3)
        assert model(torch.randn(1, 3, 64, 96)).shape == (1, 3)


def test_the_stem_works_in_channels_last() -> None:
    """Guards against convolutions in the slower layout: the images' own decides without a word from the stem."""
    stem = create_model("pervit_t", num_classes=3, image_size=32).stem
    images = torch.randn(2, 3, 32, 32)
    out = stem(images)
    assert out.is_contiguous(memory_format=torch.channels_last)
    torch.testing.assert_close(stem(images.to(memory_format=torch.channels_last)), out)


@pytest.mark.parametrize("size", [16, 100, 0])
def test_a_size_the_stem_does_not_divide_is_refused(size: int) -> None:
    """Guards against a traceback from inside a convolution."""
    with pytest.raises(UserError, match=f"model.image_size must be a multiple of 16 .* got {size}"):
        create_model("pervit_t", image_size=size)


def test_phi_is_computed_once_per_step_and_cached_in_eval() -> None:
    """Guards against paying for Φp per image, and against a stale cache after the weights have changed."""
    model = create_model("pervit_t", num_classes=2, image_size=32)
    calls = []
    for block in model.blocks:
        block.position.register_forward_hook(lambda *_: calls.append(1))
    images = torch.randn(5, 3, 32, 32)
    model(images).sum().backward()
    assert len(calls) == 12, "one call per layer, whatever the batch"

    model.eval()
    with torch.no_grad():
        before = model(images)
        model(images)
        assert len(calls) == 24, "the second evaluation uses the cache"
        model.blocks[0].position.norm2.bias += 3.0
        assert not torch.equal(model(images), before), "a changed weight must be seen"
        model.load_state_dict(create_model("pervit_t", num_classes=2, image_size=32).state_dict())
        assert not torch.equal(model(images), before), "loaded weights must be seen"


def test_log_phi_stays_finite_where_a_sigmoid_rounds_to_zero() -> None:
    """Guards against log(0) = -inf for far keys, whose gradient is lost for good."""
    model = create_model("pervit_t", num_classes=2)
    with torch.no_grad():
        model.blocks[0].position.norm2.bias -= 200.0
    maps = model.log_phi((14, 14))[0]
    assert torch.isfinite(maps).all() and maps.max() < -190
    maps.sum().backward()
    assert model.blocks[0].position.norm2.bias.grad.abs().min() > 0


def test_activation_checkpointing_changes_no_gradient_and_no_batchnorm_statistic() -> None:
    """Guards against recomputation with other random numbers, and against BatchNorm seeing a batch twice."""
    results = []
    for checkpointing in (False, True):
        torch.manual_seed(0)
        model = create_model("pervit_t", num_classes=5, image_size=48, drop_path=0.3, activation_checkpointing=checkpointing)
        images, noise = torch.randn(4, 3, 48, 48), torch.rand(4, model.noise_per_sample)
        model(images, noise).square().sum().backward()
        gradients = {n: p.grad for n, p in model.named_parameters()}
        results.append((gradients, dict(model.named_buffers())))
    (plain, plain_buffers), (recomputed, buffers) = results
    assert all(torch.equal(plain[name], recomputed[name]) for name in plain)
    assert all(torch.equal(plain_buffers[name], buffers[name]) for name in plain_buffers)
    assert int(buffers["stem.layers.0.1.num_batches_tracked"]) == 1


def test_stochastic_depth_drops_branches_and_keeps_the_mean() -> None:
    """Guards against a rate that does nothing or that shifts activations; and against dependence on the other samples."""
    torch.manual_seed(0)
    model = create_model("pervit_t", num_classes=2, image_size=32, drop_path=0.5)
    rates = model.drop_path_rates
    assert rates[0] == 0 and rates[-1] == 0.5
    noise = torch.rand(4000, model.noise_per_sample)
    scales = model.branch_scales(4000, noise)  # (4000, 24)
    torch.testing.assert_close((scales == 0).float().mean(0), rates, atol=0.03, rtol=0)
    torch.testing.assert_close(scales.mean(0), torch.ones(24), atol=0.05, rtol=0)
    assert torch.equal(model.branch_scales(1, noise[7:8]), model.branch_scales(4000, noise)[7:8])
