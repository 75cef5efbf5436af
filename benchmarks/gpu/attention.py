"""Stage ``attention``: peripheral attention of one layer in all its forms, at the shapes of PerViT-T, -S and -M.

The operator (``pipeline.kernels``), plain PyTorch, PyTorch's kernels with log Φp as their bias, and the authors' form,
Normalize[exp(..) * Φp] V without fusion. As a bound, PyTorch's kernel without any bias, which computes another function.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.gpu.common import Context, PeakMemory, Rows, Values, milliseconds, reason
from pipeline.kernels import peripheral
from pipeline.models import create_model
from pipeline.models.pervit.model import PeripheralAttention

Attention = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]  # q, k, v (B, heads, N, head_dim), log_phi (heads, N, N) -> as q
Form = Callable[[Tensor, Tensor], Tensor]  # qkv (B, N, 3, heads, width), log_phi -> (B, N, heads, width)
_CHECKED = 4  # images for the errors, which are against float64
_TOKENS = 196
_OPERATOR, _BOUND = "operator", "without bias (a bound)"


def measure(context: Context) -> Rows:
    heads, head_dim = layer_shapes(context.options["model"])[context.options["width"]]
    shape = {"heads": heads, "head_dim": head_dim}
    qkv, log_phi = make_inputs(context, heads, 10 if context.miniature else _TOKENS, head_dim)
    for form, values in of_a_shape(context, qkv, log_phi):
        yield {"case": f"{context.options['model']}, {heads} heads of {head_dim}: {form}", **shape, "form": form, **values}


def layer_shapes(name: str) -> list[tuple[int, int]]:
    """(heads, head_dim) of a model's layers, each once, in their order."""
    with torch.device("meta"):
        model = create_model(name)
    layers = [each for each in model.modules() if isinstance(each, PeripheralAttention)]
    return list(dict.fromkeys((each.heads, each.proj.in_features // each.heads) for each in layers))


def all_forms(head_dim: int) -> dict[str, Form]:
    """The forms by name, the operator first: one that crashes costs those after it."""
    backends = (SDPBackend.EFFICIENT_ATTENTION, SDPBackend.CUDNN_ATTENTION)
    parts: dict[str, Attention] = {
        "plain PyTorch": plain,
        "authors": authors,
        _BOUND: lambda q, k, v, log_phi: F.scaled_dot_product_attention(q, k, v),
        "PyTorch's choice of kernel": peripheral.biased_attention,
        **{f"PyTorch, {each.name.lower().removesuffix('_attention')}": partial(with_backend, each) for each in backends},
    }
    return {_OPERATOR: partial(operator, head_dim), **{name: partial(of_parts, form) for name, form in parts.items()}}


def of_parts(attention: Attention, qkv: Tensor, log_phi: Tensor) -> Tensor:
    """Of queries, keys and values as they lie in one projection; their gradients are put together with a copy."""
    return attention(*(part.transpose(1, 2) for part in qkv.unbind(2)), log_phi).transpose(1, 2)


def operator(head_dim: int, qkv: Tensor, log_phi: Tensor) -> Tensor:
    """As the models call it."""
    return peripheral.packed_attention(qkv, log_phi, head_dim)


def plain(q: Tensor, k: Tensor, v: Tensor, log_phi: Tensor) -> Tensor:
    """softmax(q kᵀ / sqrt(head_dim) + log_phi) v, each operation by itself."""
    scores = q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5  # (B, heads, N, N)
    return (scores + log_phi.to(scores.dtype)).softmax(-1).to(v.dtype) @ v


def authors(q: Tensor, k: Tensor, v: Tensor, log_phi: Tensor) -> Tensor:
    """As the published code computes it: every (N, N) matrix of every image is written to memory."""
    scores = q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5  # (B, heads, N, N)
    weights = (scores - scores.amax(-1, keepdim=True)).exp() * log_phi.exp().to(scores.dtype)
    return F.normalize(weights, p=1, dim=-1) @ v


def with_backend(backend: SDPBackend, q: Tensor, k: Tensor, v: Tensor, log_phi: Tensor) -> Tensor:
    with sdpa_kernel(backend):
        return peripheral.biased_attention(q, k, v, log_phi)


def make_inputs(context: Context, heads: int, tokens: int, head_dim: int) -> tuple[Tensor, Tensor]:
    """q, k, v as one projection gives them, (B, N, 3, heads, head_dim), in the precision of training, and log Φp in float32."""
    batch = 2 if context.miniature else context.batch
    dtype = torch.float32 if context.miniature else torch.bfloat16
    generator = torch.Generator().manual_seed(0)
    qkv = torch.randn(batch, tokens, 3, heads, head_dim, generator=generator).to(context.device, dtype)
    return qkv, -5 * torch.rand(heads, tokens, tokens, generator=generator).to(context.device)


def of_a_shape(context: Context, qkv: Tensor, log_phi: Tensor) -> Iterator[tuple[str, Values]]:
    """Figures of every form, each as soon as it is measured; one that fails has its reason."""
    head_dim = qkv.shape[-1]
    forms = all_forms(head_dim)
    expected = gradients(forms["plain PyTorch"], qkv[:_CHECKED].double(), log_phi.double(), head_dim)
    for name, form in forms.items():
        given = qkv
        if name == _OPERATOR:  # as the models' projections give it
            given = F.pad(qkv, (0, peripheral.aligned_width(head_dim, qkv.device) - head_dim))
        try:
            yield name, of_a_form(context, form, given, log_phi, head_dim, expected if name != _BOUND else None)
        except Exception as error:  # a kernel that does not take these inputs
            yield name, {"skipped" if name.startswith("PyTorch, ") else "failed": reason(error)}


def of_a_form(
    context: Context, form: Form, qkv: Tensor, log_phi: Tensor, head_dim: int, expected: list[Tensor] | None
) -> Values:
    """Time, TFLOP/s (two products forward, five backward, whatever is computed), memory, and errors of some images."""
    found = gradients(form, qkv[:_CHECKED], log_phi, head_dim)
    peak, both = PeakMemory(context.device), partial(gradients, form, qkv, log_phi, head_dim)
    first, second = both(), both()
    gib, repeats = peak.gib(), all(map(torch.equal, first, second))
    del first, second
    rounds, times = (1, 1) if context.miniature else (5, 5)
    forward_ms, ms = (
        statistics.median(milliseconds(call, context.device, times) for _ in range(rounds))
        for call in (partial(form, qkv, log_phi), both)
    )
    batch, tokens, _, heads, _ = qkv.shape
    product = 2e-9 * batch * heads * tokens**2 * head_dim  # TFLOP, times 1000
    values: Values = {
        "forward_ms": forward_ms,
        "ms": ms,
        "forward_tflops": 2 * product / forward_ms,
        "tflops": 7 * product / ms,
        "peak_gib": gib,
        "repeats_bit_for_bit": repeats,
    }
    if expected:
        errors = map(relative_error, found, expected)
        values |= dict(zip(("error", "error_of_gradients", "error_of_dlog_phi"), errors))
    return values


def gradients(form: Form, qkv: Tensor, log_phi: Tensor, head_dim: int) -> list[Tensor]:
    """Output (B, N, heads, head_dim) and gradients of qkv and log Φp for a fixed gradient of the output."""
    inputs = [each.detach().requires_grad_() for each in (qkv, log_phi)]
    out = form(*inputs)
    given = torch.linspace(-1, 1, head_dim, device=out.device, dtype=out.dtype)
    given = F.pad(given, (0, out.shape[-1] - head_dim)).expand_as(out)
    found = torch.autograd.grad(out, inputs, given, allow_unused=True, materialize_grads=True)
    return [out.detach()[..., :head_dim], found[0][..., :head_dim], found[1]]


def relative_error(found: Tensor, expected: Tensor) -> float:
    """Largest difference, as a part of the largest expected value."""
    return ((found.double() - expected).abs().max() / expected.abs().max()).item()
