"""Attention in chunks is attention."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from pipeline.kernels import chunked
from pipeline.kernels.chunked import attention_in_chunks, suits_chunks
from pipeline.kernels.peripheral import biased_attention
from pipeline.models.common.vit import merge_heads, merged_attention, split_heads


def arguments(images: int, tokens: int, heads: int, head_dim: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    torch.manual_seed(0)
    qkv = torch.randn(images, tokens, 3 * heads * head_dim, dtype=dtype).requires_grad_()
    bias = -10 * torch.rand(heads, tokens, tokens, dtype=torch.promote_types(dtype, torch.float32))
    return qkv, bias.transpose(0, 1).contiguous().transpose(0, 1).requires_grad_()  # in the layout of log Φp


def results(form, qkv: Tensor, heads: int, bias: Tensor) -> list[Tensor]:
    out = form(qkv, heads, bias)
    return [out, *torch.autograd.grad(out, (qkv, bias), torch.cos(10 * out.detach().float()).to(out.dtype))]


def plain(qkv: Tensor, heads: int, bias: Tensor) -> Tensor:
    exact = qkv.to(bias.dtype)  # the scores are not rounded to bf16, nor is the bias
    return merge_heads(biased_attention(*split_heads(exact, 3, heads), bias)).to(qkv.dtype)


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-5), (torch.bfloat16, 3e-2)], ids=("f64", "f32", "bf16")
)
@pytest.mark.parametrize("chunk_bytes", [1, 2**13, 2**40], ids=("1 image", "some", "all"))
def test_outputs_and_gradients(chunk_bytes: int, dtype: torch.dtype, tolerance: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against chunks that miss the last images, and against what the padding of odd widths leaves behind."""
    monkeypatch.setattr(chunked, "_CHUNK_BYTES", chunk_bytes)
    for shape in ((7, 17, 2, 5), (3, 16, 4, 8)):
        qkv, bias = arguments(*shape, dtype)
        expected, found = results(plain, qkv, shape[2], bias), results(attention_in_chunks, qkv, shape[2], bias)
        for value, other in zip(found, expected):
            assert value.dtype == other.dtype and value.shape == other.shape
            torch.testing.assert_close(value, other, rtol=tolerance, atol=tolerance)


def test_gradients_against_differences() -> None:
    """Guards against a backward pass that agrees with another wrong one."""
    qkv, bias = arguments(3, 5, 2, 3, torch.float64)
    assert torch.autograd.gradcheck(lambda qkv, bias: attention_in_chunks(qkv, 2, bias), (qkv, bias))


def test_a_query_without_keys_gets_zeros() -> None:
    """Guards against NaN where Φp leaves a query nothing, which spreads to every weight."""
    qkv, bias = arguments(3, 17, 2, 5, torch.float32)
    bias = bias.detach().index_fill(1, torch.tensor([4]), -torch.inf).requires_grad_()
    expected, found = results(plain, qkv, 2, bias), results(attention_in_chunks, qkv, 2, bias)
    assert torch.equal(found[0][:, 4], torch.zeros_like(found[0][:, 4]))
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def test_taken_where_no_kernel_of_pytorch_fits() -> None:
    """Guards against chunks where PyTorch has a fused kernel: without a gradient for the bias, and without one at all."""
    qkv, bias = arguments(2, 4, 2, 3, torch.float32)
    assert suits_chunks(qkv, bias)
    assert not suits_chunks(qkv, bias.detach()) and not suits_chunks(qkv, None)
    with torch.no_grad():
        assert not suits_chunks(qkv, bias)
        expected = merged_attention(qkv, 2, bias)
    torch.testing.assert_close(merged_attention(qkv, 2, bias), expected)


def test_under_autocast_scores_are_as_exact_as_before() -> None:
    """Guards against scores rounded to bf16: a difference of 0.05 at a score of 20 is 5 % of a weight."""
    qkv, bias = arguments(2, 32, 2, 16, torch.float32)
    exact = merged_attention(3 * qkv, 2, bias).detach()
    with torch.autocast("cpu", torch.bfloat16):
        rounded = merged_attention((3 * qkv).bfloat16(), 2, bias)
    assert rounded.dtype == torch.bfloat16
    rounded_inputs = merged_attention((3 * qkv).bfloat16().float(), 2, bias).detach()
    assert (rounded.float() - rounded_inputs).abs().max() < 0.01 * exact.abs().max()
