"""The Triton kernels of peripheral attention in Triton's interpreter, on CPU tensors: test_interpreter.py runs this file in a process
of its own, because the interpreter is chosen when the kernels are defined."""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from pipeline.kernels import fused, peripheral, peripheral_attention
from pipeline.kernels.peripheral import biased_attention, suits_kernels
from pipeline.models import create_model, flops, load_reference_state_dict
from pipeline.models.common import layers
from pipeline.models.common.vit import SelfAttention
from pipeline.models.convit import PositionalSelfAttention, relative_positions
from pipeline.models.pervit.model import PeripheralAttention
from pipeline.models.pervit.phi_model import grouped_log_phi
from pipeline.models.pervit.position import DistanceScales, PeripheralPosition, position_distances
from support.attention import errors, random_case
from support.golden import RULES, Golden, assert_close, make_input

# (B, heads, N, head_dim): fewer tokens than the smallest tile; odd widths; full tiles and a rest; more images than groups of the
# gradient of log Φp; the narrowest and the widest head. benchmarks/attention_errors.py has many more.
SHAPES = [(3, 2, 4, 8), (1, 2, 20, 39), (1, 1, 67, 57), (1, 1, 33, 128), (9, 1, 17, 26), (1, 1, 64, 70)]
# Largest error of a result over its largest number, against float64. PyTorch's own attention: 1e-6, 4e-3, 4e-4.
TOLERANCES = {torch.float32: 2e-6, torch.bfloat16: 1e-2, torch.float16: 1e-3}


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_float32_agrees_with_float64(shape: tuple[int, ...]) -> None:
    """Guards against a wrong result or gradient at the edges of tiles, for Φp between e^-20 and 1."""
    found = errors(*random_case(*shape, torch.float32))
    assert max(found.values()) < TOLERANCES[torch.float32], found


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_precision_adds_up_in_float32(dtype: torch.dtype) -> None:
    """Guards against sums in half precision, whose error grows with the number of tokens."""
    found = errors(*random_case(1, 1, 67, 45, dtype))
    assert max(found.values()) < TOLERANCES[dtype], found


def test_any_strides() -> None:
    """Guards against kernels that take the layout of their inputs for granted: channels far apart, one map for two heads,
    a gradient that is one number everywhere."""
    qkv, log_phi, _ = random_case(2, 2, 18, 10, torch.float32)
    turned = qkv.detach().mT.contiguous().mT.requires_grad_()
    shared = log_phi.detach()[:1].mT.requires_grad_()
    found = errors(turned, shared.expand(2, -1, -1), torch.ones(()).expand(2, 2, 18, 10))
    assert max(found.values()) < TOLERANCES[torch.float32], found


def test_a_bias_of_minus_infinity() -> None:
    """Guards against NaN where a query's first keys, or all of them, have no weight: what PyTorch's attention makes of them."""
    qkv, log_phi, dout = random_case(1, 1, 67, 8, torch.float32)
    log_phi = log_phi.detach()
    log_phi[0, 3, :64] = log_phi[0, 5, ::2] = log_phi[0, 7] = -torch.inf
    assert max(errors(qkv, log_phi, dout).values()) < TOLERANCES[torch.float32]
    out, dqkv, dphi = gradients(peripheral_attention, qkv, log_phi.requires_grad_(), dout)
    assert out[0, 0, 3].all() and not out[0, 0, 7].any()
    assert not dqkv[0, 0, 0, 7].any() and not dphi[0, 7].any()


def test_saturated_scores() -> None:
    """Guards against scores of thousands that overflow, or whose weights are lost before they are normalized. The plain form's errors
    are as large: a float32 of 1000 has steps of 6e-5."""
    qkv, log_phi, dout = random_case(2, 2, 33, 13, torch.float32)
    qkv = qkv.detach() * torch.tensor([300.0, 1.0, 1.0]).view(3, 1, 1, 1, 1)
    assert (qkv[0] @ qkv[1].mT).max() > 1000
    found, plain = errors(qkv, log_phi, dout), errors(qkv, log_phi, dout, biased_attention)
    assert max(found.values()) < 1e-4 and max(plain.values()) < 1e-4, (found, plain)


def test_shapes_that_do_not_fit() -> None:
    """Guards against kernels that read past the end of a map, with values or while a graph is traced."""
    qkv, log_phi, _ = random_case(1, 2, 5, 8, torch.float32)
    q, k, v = qkv.detach().unbind(0)
    packed = torch.stack([part.transpose(1, 2) for part in (q, k, v)], 2)
    wrong = log_phi.detach()[:1]
    with pytest.raises(RuntimeError, match="equal size"):
        peripheral_attention(q, k[:, :, :4], v[:, :, :4], log_phi.detach())
    for mode in (nullcontext(), FakeTensorMode(allow_non_fake_inputs=True)):
        with (
            mode,
            pytest.raises(RuntimeError, match=r"log_phi must be \(heads, N, N\) = \(2, 5, 5\), got the shape \(1, 5, 5\)"),
        ):
            torch.ops.pervit.peripheral_attention(packed, wrong, 8)
        with mode, pytest.raises(RuntimeError, match=r"head_dim must be from 1 to the width 8, got 9"):
            torch.ops.pervit.peripheral_attention(packed, log_phi.detach(), 9)


def test_padded_heads_of_a_layer_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against zeros between the heads that reach the scale, the result, a gradient or a parameter's shape."""
    torch.manual_seed(0)
    layer, x, bias = SelfAttention(15, 3, qkv_bias=True), torch.randn(2, 6, 15), torch.randn(3, 6, 6)
    results = []
    for padded in (True, False):
        if not padded:
            monkeypatch.setattr(layers, "aligned_width", lambda size, _: size)
        widths: list[int] = []
        with layer.qkv.register_forward_hook(lambda _module, _inputs, qkv, widths=widths: widths.append(qkv.shape[-1])):
            out = layer(x, bias)
        assert widths == [3 * 3 * (8 if padded else 5)]
        results.append((out, *torch.autograd.grad(out, list(layer.parameters()), torch.cos(9 * out.detach()))))
    for found, expected in zip(*results, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


def gradients(function, qkv: Tensor, log_phi: Tensor, dout: Tensor) -> tuple[Tensor, ...]:
    """The result, and what ``backward`` leaves in qkv and log_phi (re-entrant checkpointing takes no other way)."""
    qkv.grad = log_phi.grad = None
    out = function(*qkv.unbind(0), log_phi)
    out.backward(dout)
    assert qkv.grad is not None and log_phi.grad is not None
    return out.detach(), qkv.grad, log_phi.grad


def same(first: tuple[Tensor, ...], second: tuple[Tensor, ...]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_checkpointing_compiling_and_repeating_change_no_bit() -> None:
    """Guards against an operator that recomputation or tracing does not see, or that gives other numbers the second time."""
    case = random_case(2, 1, 5, 8, torch.float32)
    expected = gradients(peripheral_attention, *case)
    assert same(gradients(peripheral_attention, *case), expected)
    for reentrant in (True, False):
        assert same(gradients(partial(checkpoint, peripheral_attention, use_reentrant=reentrant), *case), expected)
    compiled = torch.compile(peripheral_attention, backend="aot_eager", fullgraph=True)
    assert same(gradients(compiled, *case), expected)


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_pytorch_checks_the_operator() -> None:
    """Guards against a schema, shapes or strides that PyTorch is told and that are not so."""
    qkv, log_phi, dout = random_case(2, 1, 5, 8, torch.float32)
    for packed in (qkv.detach().permute(1, 3, 0, 2, 4), qkv.detach().permute(1, 3, 0, 2, 4).contiguous()):
        packed.requires_grad_()
        torch.library.opcheck(torch.ops.pervit.peripheral_attention.default, (packed, log_phi, 8))
        with torch.no_grad():
            out, log_sums = fused.attention(packed, log_phi, 8)
        inputs = [t.detach() for t in (packed, log_phi, out, log_sums, dout.transpose(1, 2))]
        for phi_learns in (True, False):
            torch.library.opcheck(torch.ops.pervit.peripheral_attention_backward.default, (*inputs, 8, phi_learns))


def test_autocast_casts_all_but_phi() -> None:
    """Guards against float32 products under autocast, and against log Φp = -20.1 rounded to -20."""
    qkv, log_phi, dout = random_case(1, 1, 17, 12, torch.float32)
    log_phi = log_phi.detach() - 0.1
    rounded = qkv.detach().bfloat16()
    with torch.autocast("cpu", torch.bfloat16):
        out = peripheral_attention(*qkv.unbind(0), log_phi)
    assert out.dtype == torch.bfloat16
    assert torch.equal(out, peripheral_attention(*rounded.unbind(0), log_phi))
    out.backward(dout.bfloat16())
    assert qkv.grad is not None and qkv.grad.dtype == torch.float32


def test_a_frozen_phi_has_no_gradient() -> None:
    """Guards against computing it for nothing (Φp frozen, Table S3), and against attention whose result is not used."""
    qkv, log_phi, dout = random_case(2, 1, 5, 8, torch.float32)
    expected = gradients(peripheral_attention, qkv, log_phi, dout)[1]
    out = peripheral_attention(*qkv.unbind(0), log_phi.detach())
    assert torch.equal(torch.autograd.grad(out, qkv, dout)[0], expected)


def test_not_a_number_is_not_hidden() -> None:
    """Guards against a maximum that skips NaN: the training loop must see it."""
    qkv, log_phi, _ = random_case(1, 1, 20, 8, torch.float32)
    q, k, v = qkv.detach().unbind(0)
    q[0, 0, 3, 0] = torch.nan
    assert peripheral_attention(q, k, v, log_phi.detach()).isnan().all(-1)[0, 0].nonzero().tolist() == [[3]]


@pytest.mark.parametrize("shape", [(2, 3, 49, 129), (1, 2, 4, 16)], ids=["too wide", "float64"])
def test_what_the_kernels_do_not_take_is_plain(shape: tuple[int, ...]) -> None:
    """Guards against float64 that is computed in float32, and against a width without a tile."""
    dtype = torch.float64 if shape[-1] == 16 else torch.float32
    qkv, log_phi, _ = random_case(*shape, dtype)
    q, k, v = qkv.unbind(0)
    assert torch.equal(peripheral_attention(q, k, v, log_phi), biased_attention(q, k, v, log_phi))


class OneLayer(nn.Module):
    """A PerViT attention layer with its log Φp, called with tokens alone."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = PeripheralAttention(16, 2)
        self.log_phi = nn.Parameter(torch.zeros(2, 5, 5))

    def forward(self, x: Tensor) -> Tensor:
        return self.attention(x, self.log_phi)


def test_flops_are_those_of_the_plain_form(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against attention that a FLOP count does not see: fvcore's of a model, PyTorch's of any code."""
    layer, x = OneLayer(), torch.randn(3, 5, 16)
    counts, totals = [], []
    for triton in (True, False):
        if not triton:
            monkeypatch.setattr(peripheral, "uses_triton", lambda q: False)
        counts.append(flops._macs(layer, x))
        with FlopCounterMode(display=False) as counter:
            layer(x)
        assert (torch.ops.pervit.peripheral_attention in counter.get_flop_counts()["Global"]) == triton
        totals.append(counter.get_total_flops())
    products = 3 * 2 * 2 * 5 * 5 * 8  # q kᵀ and the sum of v, for 3 images and 2 heads
    assert counts[0] == counts[1] == products + 3 * 5 * 16 * 4 * 16
    assert totals[0] == totals[1] == 2 * counts[0]


@pytest.mark.parametrize("rule", RULES)
def test_logits_reproduce_the_authors_code(rule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against kernels that agree on random numbers and not in a model. Large tiles, which the interpreter is quicker with."""
    monkeypatch.setattr(fused, "tiling", lambda *_: fused.Tiling(256, 256, 4))
    golden = Golden("pervit_tiny")
    model = load_reference_state_dict(create_model("pervit_t"), golden.weights(rule)).eval()
    with torch.no_grad():
        logits = model(make_input(224))
    assert_close(logits, golden.arrays[f"logits_f32_{rule}"], 1e-4)


def test_deit_and_convit_run_it() -> None:
    """Guards against a family with a bias on its scores that does without the kernels."""
    x, bias = torch.randn(1, 4, 16), torch.zeros(2, 4, 4)
    offsets = relative_positions(2, 2, x.device, x.dtype)
    for layer, position in ((SelfAttention(16, 2, qkv_bias=True), bias), (PositionalSelfAttention(16, 2), offsets)):
        with FlopCounterMode(display=False) as counter, torch.no_grad():
            layer(x, position)
        assert torch.ops.pervit.peripheral_attention in counter.get_flop_counts()["Global"]


@pytest.mark.parametrize(("heads", "grid"), [(2, (2, 2)), (6, (5, 2))], ids=str)
def test_maps_of_phi_agree_with_float64(heads: int, grid: tuple[int, int]) -> None:
    """Guards against a wrong map or gradient where channels, heads and positions do not fill their tiles, and against a parameter
    without its gradient: those before a norm are noise, or zero."""
    torch.manual_seed(0)
    layers = [PeripheralPosition(heads, layer, 3) for layer in range(2)]
    scales = DistanceScales(4 * heads)
    modules = nn.ModuleList([*layers, scales])
    with torch.no_grad():
        for parameter in modules.parameters():
            parameter += 0.3 * torch.randn_like(parameter)
    results = []
    for dtype in (torch.float64, torch.float32):  # in float64 without the kernels
        modules.to(dtype).zero_grad()
        distance = position_distances(*grid, torch.device("cpu"), dtype)
        assert suits_kernels(distance, layers[0].projection1.weight) == (dtype == torch.float32)
        maps = torch.cat(grouped_log_phi(layers, distance, *scales()))
        maps.backward(torch.linspace(0, 300, maps.numel(), dtype=dtype).sin().view(maps.shape))
        learned = {name: each.grad.clone().double() for name, each in modules.named_parameters() if each.grad is not None}
        results.append((maps.detach().double(), learned))
    (expected, gradients), (found, others) = results
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=2e-5)
    assert len(gradients) == len(others) == len(list(modules.parameters()))
    for name, gradient in gradients.items():
        assert (others[name] - gradient).norm() < 2e-5 * gradient.norm() + 2e-4, name


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_pytorch_checks_the_operator_of_phi() -> None:
    """Guards against a schema, shapes or strides that PyTorch is told and that are not so, and against reading past a tensor's end."""
    distance = position_distances(2, 2, torch.device("cpu"), torch.float32)
    learned = [torch.randn(size, requires_grad=True) for size in ((16, 1, 3, 3), 16, 16, 16, (4, 8, 3, 3))]
    torch.library.opcheck(torch.ops.pervit.phi_maps.default, (distance, *learned, 1e-5))
    with pytest.raises(RuntimeError, match="must fit together"):
        torch.ops.pervit.phi_maps(distance[:3], *learned, 1e-5)
