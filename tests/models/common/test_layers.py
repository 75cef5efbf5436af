"""Linear layers whose products have rows of a multiple of 16 bytes, as on a GPU."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from pipeline.models.common import layers
from pipeline.models.common.layers import AlignedLinear


@pytest.fixture
def products(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """As on a GPU; the list gets (inputs, outputs) of each product."""
    found, plain = list[tuple[int, ...]](), F.linear

    def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        found.append((x.shape[-1], weight.shape[0]))
        return plain(x, weight, bias)

    monkeypatch.setattr(layers, "aligned_width", lambda size, device: size + -size % 8)
    monkeypatch.setattr(F, "linear", linear)
    return found


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("sizes", [(36, 12), (32, 12), (36, 16)])
def test_zeros_align_a_product(sizes: tuple[int, int], bias: bool, products: list[tuple[int, ...]]) -> None:
    """Guards against a product of odd rows, a wrong corner, and gradients of the zeros in those of the parameters (PerViT-M's widths
    are odd)."""
    torch.manual_seed(0)
    layer, x = AlignedLinear(*sizes, bias=bias), torch.randn(2, 5, sizes[0], requires_grad=True)

    def run(dtype: torch.dtype) -> list[Tensor]:
        with torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.bfloat16):
            y = layer(x)  # (2, 5, outputs)
        return [y, *torch.autograd.grad(y.float().square().sum(), (x, *layer.parameters()))]

    expected, found = run(torch.float32), run(torch.bfloat16)
    assert products == [sizes, tuple(size + -size % 8 for size in sizes)]
    assert found[0].dtype == torch.bfloat16 and all(each.dtype == torch.float32 for each in found[1:])
    for one, other in zip(expected, found, strict=True):
        assert one.shape == other.shape and (one - other).norm() < 2e-2 * one.norm()
