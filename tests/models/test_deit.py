"""DeiT is the plain vision transformer, and hard distillation is DeiT's."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from pipeline.config import OptimConfig
from pipeline.errors import UserError
from pipeline.models import create_model, flops, load_reference_state_dict
from pipeline.models.common.probe import recorded
from pipeline.optim.build import build_optimizer
from pipeline.step.loss import hard_distillation_loss
from support.deit_weights import published_weights
from support.two_steps import two_steps


def small(**options) -> nn.Module:
    """DeiT-T on 3 x 3 patches."""
    torch.manual_seed(0)
    return create_model("deit_t", num_classes=5, image_size=48, **options)


def test_deit_is_pytorchs_transformer_on_patches() -> None:
    """Guards against another order of norms, residuals and tokens than in the weights that DeiT's authors published."""
    weights = {name: value.double() for name, value in published_weights().items()}
    model = load_reference_state_dict(small().double(), weights).eval()
    images = torch.randn(2, 3, 48, 48, dtype=torch.float64)

    x = (
        F.conv2d(images, weights["patch_embed.proj.weight"], weights["patch_embed.proj.bias"], stride=16).flatten(2).mT
    )  # (2, 9, 192)
    x = torch.cat([weights["cls_token"].expand(2, -1, -1), x], dim=1) + weights["pos_embed"]
    for layer in range(12):
        block = nn.TransformerEncoderLayer(192, 3, 768, 0.0, "gelu", 1e-6, batch_first=True, norm_first=True).double()
        names = {
            "self_attn.in_proj_": "attn.qkv.",
            "self_attn.out_proj.": "attn.proj.",
            "linear1.": "mlp.fc1.",
            "linear2.": "mlp.fc2.",
        }
        names |= {"norm1.": "norm1.", "norm2.": "norm2."}
        for theirs, ours in names.items():
            for kind in ("weight", "bias"):
                block.get_parameter(theirs + kind).data.copy_(weights[f"blocks.{layer}.{ours}{kind}"])
        x = block(x)
    x = F.layer_norm(x, (192,), weights["norm.weight"], weights["norm.bias"], 1e-6)[:, 0]
    expected = F.linear(x, weights["head.weight"], weights["head.bias"])
    torch.testing.assert_close(model(images), expected, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("deit_t", 5_717_416),
        ("deit_s", 22_050_664),
        ("deit_b", 86_567_656),
        ("deit_ti_plus", 9_982_184),
        ("deit_s_plus", 49_000_744),
        ("deit_b_plus", 153_171_944),
    ],
)
def test_parameter_counts_are_exact(name: str, parameters: int) -> None:
    """Guards against a layout that is not the papers'."""
    with torch.device("meta"):
        model = create_model(name)
    assert sum(p.numel() for p in model.parameters()) == parameters


def test_counts_of_multiply_accumulates() -> None:
    """Guards against attention that goes uncounted: PerViT's Table 2 has 1.3 G with it, ConViT's Table 1 1 G without."""
    row = flops.count("deit_t")
    assert row.gmacs_modules == pytest.approx(1.077, abs=5e-4) and row.gmacs == pytest.approx(1.258, abs=5e-4)


def test_reference_loading_is_strict_in_both_directions() -> None:
    """Guards against weights that are quietly left out or quietly ignored, such as a distilled model's second token."""
    weights = published_weights()
    with pytest.raises(UserError, match=r"1 missing \(class_token\)"):
        load_reference_state_dict(small(), {k: v for k, v in weights.items() if k != "cls_token"})
    with pytest.raises(UserError, match=r"1 unknown \(dist_token\)"):
        load_reference_state_dict(small(), {**weights, "dist_token": torch.zeros(1, 1, 192)})


def test_sizes() -> None:
    """Guards against a traceback for images that the position embedding or the patches do not fit."""
    model = create_model("deit_t", num_classes=3, image_size=32).eval()
    with torch.no_grad(), recorded("attention") as values:
        assert model(torch.randn(2, 3, 32, 32)).shape == (2, 3)
    assert [attention.shape for attention in values["attention"]] == [(2, 3, 5, 5)] * 12
    with pytest.raises(UserError, match="an image has 64 x 32 pixels, .* built for 32 x 32"):
        model(torch.randn(1, 3, 64, 32))
    with pytest.raises(UserError, match="model.image_size must be a multiple of 16 and at least 16, got 40: set it to 32"):
        create_model("deit_t", image_size=40)


def test_an_image_is_judged_alone_and_recomputation_changes_nothing() -> None:
    """Guards against a batch that leaks between images, and against recomputation with other random numbers."""
    images = torch.randn(2, 3, 48, 48)
    with torch.no_grad():
        model = small().eval()
        torch.testing.assert_close(model(images)[:1], model(images[:1]), rtol=1e-5, atol=1e-6)
    gradients = []
    for checkpointing in (False, True):
        model = small(drop_path=0.3, activation_checkpointing=checkpointing)
        noise = torch.rand(2, model.noise_per_sample, generator=torch.Generator().manual_seed(1))
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(images, noise).float().square().sum()
        loss.backward()
        gradients.append({name: p.grad for name, p in model.named_parameters()})
    assert all(torch.equal(gradients[0][name], gradients[1][name]) for name in gradients[0])


def test_the_position_embedding_is_masked_at_test_time_only() -> None:
    """Guards against a mask that leaks into training or masks nothing (ConViT, Table 5)."""
    images, plain, masked = torch.randn(2, 3, 48, 48), small(), small(switches={"mask_position_embedding": True})
    assert torch.equal(masked.train()(images), plain.train()(images))
    scores = masked.eval()(images)
    assert not torch.allclose(scores, plain.eval()(images))
    nn.init.zeros_(plain.position_embedding.weight)
    assert torch.equal(scores, plain(images))


def test_all_parameters_learn_and_those_named_do_not_decay() -> None:
    """Guards against a parameter that nothing reaches, and against decay of class token and position embedding."""
    model = small()
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    optimizer = build_optimizer(model, OptimConfig(lr=1e-3, warmup_lr=1e-3))
    decayed = {id(p) for p in optimizer.param_groups[0]["params"]}
    assert not decayed & {id(model.class_token), id(model.position_embedding.weight)}
    two_steps(model, optimizer, (torch.randn(4, 3, 48, 48) for _ in range(2)), labels=[0, 1, 2, 3])
    assert not [name for name, p in model.named_parameters() if torch.equal(p, before[name])]


def test_hard_distillation_learns_the_teachers_decision() -> None:
    """Guards against gradients into soft targets, a teacher's share that is not DeiT's half, and classes that do not match."""
    scores = torch.tensor([[2.0, 0.0, -1.0], [0.5, 0.5, 0.0]], requires_grad=True)
    teacher = torch.tensor([[0.0, 9.0, 1.0], [0.3, 0.1, 0.2]], requires_grad=True)  # decides for 1 and 0
    log_p = scores.detach().log_softmax(-1)
    expected = 0.5 * 3.0 + 0.5 * -(log_p[0, 1] + log_p[1, 0]) / 2
    loss = hard_distillation_loss(torch.tensor(3.0), scores, teacher)
    torch.testing.assert_close(loss, expected)
    loss.backward()
    assert teacher.grad is None and scores.grad.abs().sum() > 0
    assert hard_distillation_loss(torch.tensor(3.0), scores, teacher, teacher_share=0.0) == 3.0
    assert hard_distillation_loss(torch.tensor(3.0), scores.bfloat16(), teacher).dtype == torch.float32
    with pytest.raises(UserError, match="score the model's 3 classes for each of 2 images, got 10 for 2"):
        hard_distillation_loss(torch.tensor(3.0), scores, torch.zeros(2, 10))
