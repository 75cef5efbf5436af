"""Variants I and II of LSAT's Table 6: Swin's block and CvT's attention are the authors', in a model that trains as LSAT does."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch._dynamo
from torch import Tensor, nn
from torch._dynamo.utils import counters

from pipeline.errors import UserError
from pipeline.models import create_model, reference_state_dict
from pipeline.models.common.layers import compile_tables_as_constants
from pipeline.models.common.probe import recorded
from pipeline.models.flops import count
from pipeline.models.lsat.blocks import SHIFTS_32
from pipeline.models.lsat.model import LSAT, LSATLayout, LSATSwitches
from pipeline.models.lsat.table6 import ConvolutionalProjection, ProjectedAttention, SwinBlock, TokenEmbedding, overlapping
from support.golden import Golden, _fill_rule, assert_close, make_input
from support.two_steps import two_steps

LOCALS = ("swin", "swin_pair", "cvt")
GOLDEN = Golden("lsat_table6")


def small_model(local: str, size: int = 12, **options) -> LSAT:
    """LSAT as at 32 pixels, but narrow and on two levels."""
    layout = LSATLayout((24, 24), (4, 4), (2, 2), 3, 1, 1, SHIFTS_32, kv_heads="shared")
    return LSAT(layout, num_classes=3, image_size=size, switches=LSATSwitches(local=local), **options)


def filled(module: nn.Module, part: str, *names: tuple[str, str]) -> nn.Module:
    """``module`` in float64 with the golden weights of ``part``, whose names become ours by replacement."""
    weights = {}
    for theirs, shape in GOLDEN.meta["keys"][part]:
        ours = theirs
        for before, after in names:
            ours = ours.replace(before, after)
        if ours in module.state_dict():
            weights[ours] = _fill_rule.fill(theirs, shape, "B")
    module.load_state_dict(weights, strict=True)
    return module.double()


def tokens(number: int) -> Tensor:
    """The golden input: (2, number, 12)."""
    generator = torch.Generator().manual_seed(1234)
    return torch.randn(2, number, 12, generator=generator).double().requires_grad_()


@pytest.mark.parametrize("shift", [0, 4])
def test_the_block_is_swins(shift: int) -> None:
    """Guards against another order of windows or relative positions, another mask of shifted windows, or another epsilon: output
    and gradients of Swin's published block."""
    block = SwinBlock(12, 3, side=16, shifted=shift > 0)
    filled(block, "swin", ("attn.relative_position_bias_table", "attention.bias.table"), ("attn.", "attention."))
    x = tokens(256)
    out = block(x[:, :, None], (16, 16), None)[:, :, 0]
    out.square().sum().backward()
    assert_close(out[:, ::5].detach(), GOLDEN.arrays[f"swin_{shift}"], 1e-12)
    assert_close(x.grad[:, ::5], GOLDEN.arrays[f"swin_{shift}_grad"], 1e-12)
    assert_close(block.attention.bias.table.grad, GOLDEN.arrays[f"swin_{shift}_grad_table"], 1e-12)


def test_embedding_and_attention_are_cvts() -> None:
    """Guards against another stride, scale or norm: output, gradients and BatchNorm statistics of CvT's published modules, on a
    grid with an odd side."""
    embedding = filled(TokenEmbedding(nn.Conv2d(3, 12, 3, 1, 1)), "cvt_embed", ("proj.", "conv."))
    assert_close(embedding(make_input(9).double()).detach()[:, :, 0], GOLDEN.arrays["cvt_embed"], 1e-12)
    convolutions = [(f"conv_proj_{part[0]}.{theirs}", f"{part}.{ours}") for part in ("query", "key", "value") for theirs, ours in (("conv", "conv"), ("bn", "norm"))]  # fmt: skip
    projection = filled(ConvolutionalProjection(12), "cvt", *convolutions)
    linears = [("conv_proj_", "unused_"), *((f"proj_{part[0]}.", f"{part}.") for part in ("query", "key", "value"))]
    attention = filled(ProjectedAttention(12, 3), "cvt", *linears)
    for mode in ("eval", "train"):
        projection.train(mode == "train")
        x = tokens(81)
        out = attention(*projection(x[:, :, None], (9, 9)))
        out.square().sum().backward()
        assert_close(out.detach(), GOLDEN.arrays[f"cvt_{mode}"], 1e-12)
        assert_close(x.grad, GOLDEN.arrays[f"cvt_{mode}_grad"], 1e-12)
    assert_close(projection.key.norm.running_var, GOLDEN.arrays["cvt_running_var"], 1e-12)


@pytest.mark.parametrize("shifted", [False, True])
def test_a_token_attends_to_its_window_alone(shifted: bool) -> None:
    """Guards against padding that takes part in attention, and tokens from opposite borders that see each other: on a grid of 11
    x 11, which windows of 8 do not tile."""
    torch.manual_seed(0)
    block = SwinBlock(12, 3, side=11, shifted=shifted).double()
    starts = (0, 4, 12) if shifted else (0, 8, 16)  # of windows, in rows and columns
    for row, column in ((0, 0), (2, 9), (10, 10), (5, 3)):
        x = torch.randn(1, 121, 1, 12, dtype=torch.float64, requires_grad=True)
        block(x, (11, 11), None)[0, 11 * row + column].square().sum().backward()
        reached = x.grad[0, :, 0].abs().amax(-1).view(11, 11) > 0
        sides = [[begin <= place < end for place in range(11)] for at in (row, column) for begin, end in zip(starts, starts[1:]) if begin <= at < end]  # fmt: skip
        assert torch.equal(reached, torch.tensor(sides[0])[:, None] & torch.tensor(sides[1])[None])


def test_padding_changes_nothing_within_the_image() -> None:
    """Guards against a padded window that computes something else than the tokens of that window alone."""
    torch.manual_seed(0)
    block = SwinBlock(12, 3, side=11, shifted=False).double()
    x = torch.randn(1, 11, 11, 12, dtype=torch.float64)
    whole = block(x.flatten(1, 2)[:, :, None], (11, 11), None).view(11, 11, 12)
    part = block(x[:, :8, :8].flatten(1, 2)[:, :, None], (8, 8), None).view(8, 8, 12)
    torch.testing.assert_close(whole[:8, :8], part, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    ("local", "parameters"), [("swin", 6_845_421), ("swin_pair", 7_290_960), ("cvt", 6_850_698), ("lsa", 10_228_298)]
)
def test_parameter_counts_are_exact(local: str, parameters: int) -> None:
    """Guards against another model than the docstrings describe. Table 6 prints no counts; the parts are counted here."""
    switches = {"heads": 3} | ({} if local == "lsa" else {"local": local})
    with torch.device("meta"):
        model = create_model("lsat_t_32", num_classes=10, image_size=32, switches=switches)
        own, none = ({k: v.numel() for k, v in m.named_parameters()} for m in (model, create_model("lsat_t_32", 10, 32, switches={"heads": 3, "shifts": "none"})))  # fmt: skip
    assert sum(own.values()) == parameters
    block = "levels.0.blocks.0."
    others = sum(
        size for name, size in none.items() if not name.startswith(block)
    )  # variant A of Table 5 without its first block
    linear = lambda inputs, outputs: inputs * outputs + outputs  # noqa: E731
    mlp = linear(192, 768) + linear(768, 192)
    swin = linear(192, 576) + linear(192, 192) + mlp + 15**2 * 3 + 4 * 192
    cvt = 4 * linear(192, 192) + mlp + 3 * (9 * 192 + 2 * 192) + 2 * 192  # with the norms of projection and embedding
    expected = {"swin": others + swin, "swin_pair": others + 2 * swin, "cvt": others + cvt}
    assert local == "lsa" or sum(own.values()) == expected[local]


def test_multiply_accumulates_count_windows_and_strided_keys() -> None:
    """Guards against attention that goes uncounted, or that pays for all pairs of tokens."""
    swin, cvt, none = (
        count("lsat_t_32", 16, 10, {"heads": 3} | switches).gmacs * 1e9  # 256 tokens, 4 windows
        for switches in ({"local": "swin_pair"}, {"local": "cvt"}, {"shifts": "none"})
    )
    others = none - 256 * 192 * (192 + 128 + 192 + 2 * 256)  # without queries, shared keys and values, output, and attention
    block = 256 * 192 * (576 + 192 + 2 * 64)
    mlp = 256 * 192 * 8 * 192
    attention = 192 * (256 * (2 * 192 + 9) + 64 * 2 * (192 + 9) + 2 * 256 * 64)
    norms = 1.5e6  # fvcore counts a few operations for each element of a norm
    assert swin == pytest.approx(others + 2 * block + mlp, abs=norms)
    assert cvt == pytest.approx(others + attention, abs=norms)


@pytest.mark.parametrize("local", LOCALS)
@pytest.mark.parametrize("drop_path", [0.0, 0.3])
def test_every_parameter_trains(local: str, drop_path: float) -> None:
    """Guards against a part that nothing reaches, and a rate of stochastic depth that is not the published one."""
    torch.manual_seed(0)
    model = small_model(local, drop_path=drop_path)
    assert model.noise_per_sample == (0 if not drop_path else 10 if local == "swin_pair" else 8)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.0)
    two_steps(model, optimizer, (torch.randn(4, 3, 12, 12) for _ in range(2)), labels=[0, 1, 2, 0])
    assert {name for name, p in model.named_parameters() if torch.equal(p, before[name])} == set()


@pytest.mark.parametrize("local", LOCALS)
def test_activation_checkpointing_gives_identical_gradients_and_statistics(local: str) -> None:
    """Guards against BatchNorm inside of what is recomputed, whose statistics would change twice."""
    results = []
    for checkpointing in (False, True):
        torch.manual_seed(0)
        model = small_model(local, drop_path=0.5, activation_checkpointing=checkpointing)
        images, noise = torch.randn(4, 3, 12, 12), torch.rand(4, model.noise_per_sample)
        model(images, noise).square().sum().backward()
        results.append({**{name: p.grad for name, p in model.named_parameters()}, **dict(model.named_buffers())})
    assert all(torch.equal(results[0][name], results[1][name]) for name in results[0])


@pytest.mark.parametrize("local", LOCALS)
def test_no_graph_break_in_a_block(local: str) -> None:
    """Guards against a block that ``train.compile`` cannot take as a whole; convolutional projections stay outside, as stems do."""
    torch.compiler.reset()
    counters.clear()
    model = small_model(local, drop_path=0.1)
    compile_tables_as_constants()
    for level in model.levels:
        for block in level.blocks:
            block.forward = torch.compile(block.forward, backend="eager", fullgraph=True, dynamic=False)
    model(torch.randn(2, 3, 12, 12), torch.rand(2, model.noise_per_sample))
    assert not counters["graph_break"]
    assert (
        counters["stats"]["unique_graphs"] == {"swin": 4, "swin_pair": 5, "cvt": 4}[local]
    )  # three of them global blocks, as in LSAT
    torch.compiler.reset()


@pytest.mark.parametrize(
    ("name", "size", "local"),
    [("lsat_t_224", 77, "cvt"), ("lsat_s_224", 36, "cvt"), ("lsat_s_224", 36, "swin_pair"), ("lsat_t_32", 11, "swin_pair")],
)
def test_any_size_the_stem_divides(name: str, size: int, local: str) -> None:
    """Guards against windows or strides that tie the variants to the paper's size, and logits that depend on the batch."""
    torch.manual_seed(0)
    model = create_model(name, num_classes=3, image_size=size, switches={"local": local}).eval()
    images = torch.randn(2, 3, size, size)
    with torch.no_grad():
        logits = model(images)
        assert logits.shape == (2, 3)
        torch.testing.assert_close(model(images[:1]), logits[:1], rtol=1e-4, atol=1e-5)


def test_patches_overlap_and_keep_their_grid() -> None:
    """Guards against a token embedding of another grid than LSAT's, or whose patches do not overlap."""
    assert overlapping(3, 1, 1) == (3, 1, 1) and overlapping(9, 7, 1) == (9, 7, 1)  # lsat_t_32 and lsat_t_224: as they are
    assert overlapping(4, 4, 0) == (7, 4, 2)  # lsat_s_224: CvT's own
    assert overlapping(2, 2, 0) == (3, 2, 1)


def test_attention_is_offered_to_analyses() -> None:
    """Guards against weights of another shape than documented."""
    shapes = {"swin": (2, 4, 4, 64, 64), "swin_pair": (2, 4, 4, 64, 64), "cvt": (2, 4, 1, 144, 36)}
    for local, shape in shapes.items():
        model = small_model(local).eval()
        with torch.no_grad(), recorded("attention") as values:
            model(torch.randn(2, 3, 12, 12))
        assert values["attention"][0].shape == shape
        for weights in values["attention"]:
            torch.testing.assert_close(weights.sum(-1), torch.ones(weights.shape[:-1]))


@pytest.mark.parametrize("local", LOCALS)
def test_bf16_autocast_trains(local: str) -> None:
    """Guards against types that do not meet under autocast, and a mask that bf16 turns into NaN."""
    torch.manual_seed(0)
    model, images = small_model(local), torch.randn(4, 3, 12, 12)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        logits = model(images)
    logits.float().square().sum().backward()
    assert all(torch.isfinite(p.grad).all() for p in model.parameters())
    torch.testing.assert_close(logits.float(), model(images), rtol=0.1, atol=0.05)


def test_switches_without_an_effect_are_refused() -> None:
    """Guards against a row of Table 5 on a variant of Table 6 that silently trains the latter, and authors' names it has not."""
    for switch in ({"shifts": "axes"}, {"shift_by": "translation"}, {"position": "shared"}):
        with pytest.raises(UserError, match="must leave shifts, shift_by and position alone with local 'swin'"):
            create_model("lsat_t_32", switches={"local": "swin", **switch})
    with pytest.raises(UserError, match="model.switches.local is 'cvt', which the authors' code of LSAT does not support"):
        reference_state_dict(small_model("cvt"))


def test_initial_weights_are_lsats() -> None:
    """Guards against parts that keep PyTorch's initialization: the published code goes over the whole model."""
    torch.manual_seed(0)
    for local in ("swin_pair", "cvt"):
        for name, value in create_model("lsat_t_32", 10, 32, switches={"local": local}).named_parameters():
            if value.ndim > 1:
                assert value.std().item() == pytest.approx(0.02, rel=0.1), name
            else:
                assert np.unique(value.detach()).tolist() == [float("norm" in name and name.endswith("weight"))], name
