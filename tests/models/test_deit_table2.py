"""DeiT with the position encodings that PerViT's Table 2 compares with Φp: CPVT's generators and iRPE."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from pipeline.config import OptimConfig
from pipeline.errors import UserError
from pipeline.models import create_model, flops
from pipeline.models.common.irpe import BUCKETS, RelativeSelfAttention, bucket_table, piecewise_index
from pipeline.models.common.probe import recorded
from pipeline.models.common.vit import ViTLayout
from pipeline.models.deit import DeiT, DeiTSwitches, PositionGenerator
from pipeline.optim.build import build_optimizer
from support.two_steps import two_steps

SMALL = ViTLayout(heads=2, width=12, depth=3, mlp_ratio=2)
CPVT, IRPE = {"conditional_position": 2}, {"relative_position": True}
both = pytest.mark.parametrize("switches", [CPVT, IRPE], ids=["cpvt", "irpe"])


def small_model(switches: dict, **options) -> DeiT:
    """Three blocks on 4 x 4 patches, with encodings that do something."""
    torch.manual_seed(0)
    model = DeiT(SMALL, num_classes=5, image_size=64, switches=DeiTSwitches(**switches), **options)
    for name, parameter in model.named_parameters():
        if "relative_position" in name:
            nn.init.normal_(parameter)
    return model


@pytest.mark.parametrize(
    ("switches", "parameters", "added_gmacs"),
    [
        ({"conditional_position": 5}, 5_689_192, 0.0017),  # CPVT-Ti (0-5) in iRPE's Table 5: 6 M, 1262 M of DeiT's 1261
        ({"relative_position": True}, 5_755_816, 0.0227),  # iRPE's model zoo: 5.76 M, 1284 M
    ],
)
def test_parameters_and_multiply_accumulates_are_the_papers(switches: dict, parameters: int, added_gmacs: float) -> None:
    """Guards against an encoding of another size, and against products that go uncounted."""
    row = flops.count("deit_t", switches=switches)
    assert row.params == parameters
    assert row.gmacs - 1.2582 == pytest.approx(added_gmacs, abs=1e-4)


@pytest.mark.parametrize(("name", "millions"), [("deit_t", 5.76), ("deit_s", 22.09), ("deit_b", 86.61)])
def test_irpe_fits_all_sizes(name: str, millions: float) -> None:
    """Guards against tables of another width: the figures are those of the model zoo of iRPE's code."""
    with torch.device("meta"):
        model = create_model(name, switches=IRPE)
    assert sum(p.numel() for p in model.parameters()) / 1e6 == pytest.approx(millions, abs=0.005)


def test_the_switches_change_no_other_parameter() -> None:
    """Guards against DeiT's parameters under other names, or of other shapes, because of an encoding."""
    with torch.device("meta"):
        plain, cpvt, irpe = (
            {name: p.shape for name, p in create_model("deit_t", switches=s).named_parameters()} for s in ({}, CPVT, IRPE)
        )
    tables = {f"blocks.{i}.attn.relative_position.weight" for i in range(12)}
    assert {name: irpe[name] for name in irpe.keys() - tables} == plain and irpe.keys() - plain.keys() == tables
    generators = {f"position_generators.{i}.{kind}" for i in range(2) for kind in ("weight", "bias")}
    assert cpvt.keys() ^ plain.keys() == generators | {"position_embedding.weight"}


def test_offsets_share_an_index_as_in_the_authors_code() -> None:
    """Guards against another piecewise function (Eq. 18): these are the values of the authors' ``piecewise_index``."""
    expected = [0, 1, 2, 2, *[3] * 60]
    offsets = torch.arange(64)
    assert piecewise_index(offsets).tolist() == expected
    assert piecewise_index(-offsets).tolist() == [-index for index in expected]


def test_a_bucket_is_a_pair_of_signed_offsets() -> None:
    """Guards against offsets that are swapped or turned round, and against a class token that shares the patches' buckets."""
    table = bucket_table(3, 5, torch.device("cpu"))
    assert table.shape == (16, 16) and (table[0] == 49).all() and (table[:, 0] == 49).all() and BUCKETS == 50
    query, key = 1 + 2 * 5 + 0, 1 + 1 * 5 + 4  # row 2, column 0; row 1, column 4
    assert table[query, key] == 7 * (3 + 1) + (3 - 3) and table[key, query] == 7 * (3 - 1) + (3 + 3)


def test_irpe_adds_the_product_of_query_and_bucket() -> None:
    """Guards against scores without the scale, of keys instead of queries, or of another head; on a grid that is not square."""
    torch.manual_seed(0)
    attention = RelativeSelfAttention(12, 2, qkv_bias=True).double()
    nn.init.normal_(attention.relative_position.weight)
    x = torch.randn(2, 7, 12, dtype=torch.float64)
    with recorded("attention") as values:
        out = attention(x, (2, 3))
    q, k, v = attention.qkv(x).view(2, 7, 3, 2, 6).permute(2, 0, 3, 1, 4)
    vectors = attention.relative_position.weight[0].T[bucket_table(2, 3, x.device)]  # (7, 7, 6)
    scores = torch.einsum("bhqd,bhkd->bhqk", q, k) + torch.einsum("bhqd,qkd->bhqk", q, vectors)
    weights = (scores * 6**-0.5).softmax(-1)
    torch.testing.assert_close(values["attention"][0], weights.detach())
    torch.testing.assert_close(out, attention.proj((weights @ v).transpose(1, 2).flatten(2)), rtol=1e-12, atol=1e-12)


def test_the_gradient_of_irpe_is_exact() -> None:
    """Guards against a backward pass of our own that adds gradients to other buckets."""
    torch.manual_seed(0)
    attention = RelativeSelfAttention(4, 2, qkv_bias=False).double()
    nn.init.normal_(attention.relative_position.weight)
    x = torch.randn(2, 7, 4, dtype=torch.float64, requires_grad=True)

    def scores(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return torch.func.functional_call(attention, {"relative_position.weight": weight}, (x, (2, 3)))

    assert torch.autograd.gradcheck(scores, (x, attention.relative_position.weight))


def test_irpe_begins_as_deit() -> None:
    """Guards against an initialization that is not the authors', zero."""
    torch.manual_seed(0)
    model, images = create_model("deit_t", 5, 48, switches=IRPE).eval(), torch.randn(2, 3, 48, 48)
    plain = create_model("deit_t", 5, 48).eval()
    plain.load_state_dict({name: value for name, value in model.state_dict().items() if "relative_position" not in name})
    with torch.no_grad():
        torch.testing.assert_close(model(images), plain(images))


def test_a_generator_convolves_the_patches_and_passes_the_class_token_by() -> None:
    """Guards against a class token among the patches, rows taken for columns, and a residual connection that is missing."""
    torch.manual_seed(0)
    generator, x = PositionGenerator(4).double(), torch.randn(2, 7, 4, dtype=torch.float64)
    nn.init.normal_(generator.bias)
    out = generator(x, (2, 3))
    assert torch.equal(out[:, 0], x[:, 0])
    padded = F.pad(x[:, 1:].view(2, 2, 3, 4), (0, 0, 1, 1, 1, 1))  # (2, 4, 5, 4)
    for row in range(2):
        for column in range(3):
            window = padded[:, row : row + 3, column : column + 3]  # (2, 3, 3, 4)
            expected = (window * generator.weight[:, 0].permute(1, 2, 0)).sum((1, 2)) + generator.bias
            torch.testing.assert_close(out[:, 1 + 3 * row + column], expected + x[:, 1 + 3 * row + column])


def test_generators_follow_the_first_blocks() -> None:
    """Guards against a generator before its block, or after a later one."""
    model, calls = small_model(CPVT), []
    for kind in ("blocks", "position_generators"):
        for i, module in enumerate(getattr(model, kind)):
            module.register_forward_hook(lambda *_, call=(kind, i): calls.append(call))
    model(torch.randn(1, 3, 64, 64))
    blocks, generators = ([(kind, i) for i in range(3)] for kind in ("blocks", "position_generators"))
    assert calls == [blocks[0], generators[0], blocks[1], generators[1], blocks[2]]


def test_cpvt_takes_images_of_any_size() -> None:
    """Guards against a position embedding that stays, and against a grid other than the image's."""
    model = small_model(CPVT).eval()
    with torch.no_grad(), recorded("attention") as values:
        assert model(torch.randn(2, 3, 48, 80)).shape == (2, 5)
    assert values["attention"][0].shape == (2, 2, 16, 16)
    with pytest.raises(UserError, match="multiple of 16"):
        model(torch.randn(1, 3, 40, 64))
    with pytest.raises(UserError, match="model.image_size must be .* got 40"):
        create_model("deit_t", image_size=40, switches=CPVT)
    with pytest.raises(UserError, match="an image has 48 x 80 pixels"):
        small_model(IRPE)(torch.randn(1, 3, 48, 80))


@both
def test_recomputation_and_other_images_change_nothing(switches: dict) -> None:
    """Guards against a batch that leaks between images, and against other gradients under activation checkpointing in bf16."""
    images = torch.randn(2, 3, 64, 64)
    gradients = []
    for checkpointing in (False, True):
        model = small_model(switches, activation_checkpointing=checkpointing)
        with torch.autocast("cpu", torch.bfloat16):
            model(images).float().square().sum().backward()
        gradients.append({name: p.grad for name, p in model.named_parameters()})
    assert all(torch.equal(gradients[0][name], gradients[1][name]) for name in gradients[0])
    with torch.no_grad():
        torch.testing.assert_close(model.eval()(images)[:1], model(images[:1]), rtol=1e-5, atol=1e-6)


@both
def test_all_parameters_learn_and_decay_as_the_authors(switches: dict) -> None:
    """Guards against a parameter that nothing reaches, and against decay that the authors' code does not have."""
    model = small_model(switches)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    optimizer = build_optimizer(model, OptimConfig(lr=1e-3, warmup_lr=1e-3))
    decayed = {id(p) for p in optimizer.param_groups[0]["params"]}
    encodings = {name: id(p) in decayed for name, p in model.named_parameters() if "generators" in name or "relative" in name}
    assert set(encodings.values()) == {switches is IRPE} and len(encodings) > 2
    two_steps(model, optimizer, (torch.randn(4, 3, 64, 64) for _ in range(2)), labels=[0, 1, 2, 3])
    assert not [name for name, p in model.named_parameters() if torch.equal(p, before[name])]


@pytest.mark.parametrize(
    ("switches", "sentence"),
    [
        (CPVT | IRPE, "must have at most one of .*, got conditional_position and relative_position"),
        (IRPE | {"peripheral_position": True}, "must have at most one of .*, got peripheral_position and relative_position"),
        (CPVT | {"mask_position_embedding": True}, "has conditional_position, which leaves no position embedding to mask"),
        ({"conditional_position": 13}, "model.switches.conditional_position must be at most 12, got 13"),
        ({"conditional_position": -1}, "model.switches.conditional_position must be at least 0, got -1"),
    ],
)
def test_what_does_not_combine_is_refused(switches: dict, sentence: str) -> None:
    """Guards against a row of a table that silently is another one, and against generators after blocks that there are not."""
    with pytest.raises(UserError, match=sentence):
        create_model("deit_t", switches=switches)
