"""The Triton kernels of peripheral attention on a CUDA GPU."""

from __future__ import annotations

import pytest
import torch

from pipeline.kernels import peripheral_attention
from pipeline.kernels.peripheral import CAPABILITY, uses_triton
from pipeline.models import create_model
from support.attention import errors, random_case

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() < CAPABILITY,
        reason="needs a CUDA GPU from Ampere on",
    ),
]
TOLERANCES = {torch.float32: 5e-6, torch.bfloat16: 1.5e-2, torch.float16: 2e-3}


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize(
    "shape",
    [(3, 2, 4, 8), (5, 4, 196, 32), (5, 4, 196, 56), (3, 4, 196, 70), (9, 12, 196, 45), (3, 3, 197, 64), (1, 2, 400, 128)],
    ids=str,
)
def test_the_kernels_agree_with_float64(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """Guards against what the interpreter does not show: the compiler, its layouts and the GPU's own arithmetic."""
    case = random_case(*shape, dtype, "cuda")
    assert uses_triton(case[0][0])
    found = errors(*case)
    assert max(found.values()) < TOLERANCES[dtype], found


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "torch.compile"])
def test_repeated_runs_agree_bit_for_bit(compiled: bool) -> None:
    """Guards against sums in the order in which programs happen to end, at PerViT-T's and PerViT-M's shapes."""
    for shape in ((128, 4, 196, 56), (64, 12, 196, 45)):
        qkv, log_phi, dout = random_case(*shape, torch.bfloat16, "cuda")
        function = torch.compile(peripheral_attention, fullgraph=True) if compiled else peripheral_attention
        results = []
        for _ in range(5):
            out = function(*qkv.unbind(0), log_phi)
            results.append((out.detach(), *torch.autograd.grad(out, (qkv, log_phi), dout)))
        for other in results[1:]:
            assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


@pytest.mark.parametrize(("name", "side"), [("pervit_t", 224), ("pervit_m", 224), ("pervit_s", 96)])
def test_maps_of_phi_agree_with_float64_and_repeat(name: str, side: int) -> None:
    """Guards against maps and gradients that only the interpreter gets right, and against sums in another order."""
    torch.manual_seed(0)
    model = create_model(name, num_classes=10, image_size=side).cuda()
    grid = (side // 16, side // 16)
    with torch.no_grad():
        for parameter in model.phi_parameters():
            parameter += 0.1 * torch.randn_like(parameter)

    def maps_and_gradients() -> list[torch.Tensor]:
        model.zero_grad()
        maps = torch.stack([layer for layer in model.log_phi(grid) if layer is not None])  # (layers, heads, N, N)
        maps.backward(torch.linspace(0, 3000, maps.numel(), device="cuda").sin().view(maps.shape).to(maps.dtype))
        return [maps.detach(), *(parameter.grad for parameter in model.phi_parameters())]

    first, again = maps_and_gradients(), maps_and_gradients()
    assert all(torch.equal(*pair) for pair in zip(first, again, strict=True))
    model.double()
    for found, expected in zip(first, maps_and_gradients(), strict=True):
        if expected.norm() > 1e-6:  # but the biases before a norm, whose gradient is zero
            assert (found.double() - expected).norm() < 5e-3 * expected.norm()
    assert (first[0] - maps_and_gradients()[0]).abs().max() < 1e-4
