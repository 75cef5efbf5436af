"""Random inputs of peripheral attention, and its errors against float64."""

from __future__ import annotations

import torch
from torch import Tensor

from pipeline.kernels import peripheral_attention
from pipeline.kernels.peripheral import biased_attention


def random_case(batch: int, heads: int, tokens: int, width: int, dtype: torch.dtype, device: str = "cpu") -> tuple[Tensor, ...]:
    """q, k and v as views of one projection (3, B, heads, N, head_dim), log Φp (heads, N, N) with -20, 0 and what is between, and a
    gradient of the result. The first two want gradients."""
    generator = torch.Generator().manual_seed(batch * heads * tokens * width)
    qkv = torch.randn(batch, tokens, 3, heads, width, generator=generator).to(device, dtype).permute(2, 0, 3, 1, 4)
    log_phi = (torch.rand(heads, tokens, tokens, generator=generator) * -60 + 20).clamp(-20, 0).to(device)
    dout = torch.randn(batch, tokens, heads, width, generator=generator).to(device, dtype).transpose(1, 2)
    if dtype == torch.float64:
        log_phi = log_phi.double()
    return qkv.requires_grad_(), log_phi.requires_grad_(), dout


def errors(qkv: Tensor, log_phi: Tensor, dout: Tensor, function=peripheral_attention) -> dict[str, float]:
    """Largest error of the result and of each gradient, over the largest number in it, against the plain form in float64."""
    expected = _results(biased_attention, *(t.detach().double() for t in (qkv, log_phi, dout)))
    found = _results(function, *(t.detach() for t in (qkv, log_phi, dout)))
    return {
        name: float((found[name].double() - value).abs().max() / value.abs().max().clamp_min(1e-30))
        for name, value in expected.items()
    }


def _results(function, qkv: Tensor, log_phi: Tensor, dout: Tensor) -> dict[str, Tensor]:
    q, k, v, bias = (t.requires_grad_() for t in (*qkv.unbind(0), log_phi))
    out = function(q, k, v, bias)
    return dict(zip(("out", "dq", "dk", "dv", "dphi"), (out.detach(), *torch.autograd.grad(out, (q, k, v, bias), dout))))
