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
from pipeline.kernels import peripheral_attention
from pipeline.kernels.peripheral import biased_attention
from pipeline.models import create_model
from pipeline.models.pervit.model import PeripheralAttention

Form = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]  # q, k, v (B, heads, N, head_dim), log_phi (heads, N, N) -> as q
_CHECKED = 4  # images for the errors, which are against float64
_TOKENS = 196
_BOUND = "without bias (a bound)"


def measure(context: Context) -> Rows:
    heads, head_dim = layer_shapes(context.options["model"])[context.options["width"]]
    shape = {"heads": heads, "head_dim": head_dim}
    inputs = make_inputs(context, heads, 10 if context.miniature else _TOKENS, head_dim)
    for form, values in of_a_shape(context, inputs):
        yield {"case": f"{context.options['model']}, {heads} heads of {head_dim}: {form}", **shape, "form": form, **values}


def layer_shapes(name: str) -> list[tuple[int, int]]:
    """(heads, head_dim) of a model's layers, each once, in their order."""
    with torch.device("meta"):
        model = create_model(name)
    layers = [each for each in model.modules() if isinstance(each, PeripheralAttention)]
    return list(dict.fromkeys((each.heads, each.proj.in_features // each.heads) for each in layers))


def all_forms() -> dict[str, Form]:
    """The forms by name, the operator first: one that crashes costs those after it."""
    backends = (SDPBackend.EFFICIENT_ATTENTION, SDPBackend.CUDNN_ATTENTION)
    return {
        "operator": peripheral_attention,
        "plain PyTorch": plain,
        "authors": authors,
        _BOUND: lambda q, k, v, log_phi: F.scaled_dot_product_attention(q, k, v),
        "PyTorch's choice of kernel": biased_attention,
        **{f"PyTorch, {each.name.lower().removesuffix('_attention')}": partial(with_backend, each) for each in backends},
    }


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
        return biased_attention(q, k, v, log_phi)


def make_inputs(context: Context, heads: int, tokens: int, head_dim: int) -> list[Tensor]:
    """q, k, v as they come out of one projection, in the precision of training, and log Φp in float32."""
    batch = 2 if context.miniature else context.batch
    dtype = torch.float32 if context.miniature else torch.bfloat16
    generator = torch.Generator().manual_seed(0)
    qkv = torch.randn(batch, tokens, 3, heads, head_dim, generator=generator).to(context.device, dtype)
    log_phi = -5 * torch.rand(heads, tokens, tokens, generator=generator).to(context.device)
    parts = [*qkv.permute(2, 0, 3, 1, 4).unbind(0), log_phi]  # (B, heads, N, head_dim) each
    return [part.detach().requires_grad_() for part in parts]


def of_a_shape(context: Context, inputs: list[Tensor]) -> Iterator[tuple[str, Values]]:
    """Figures of every form, each as soon as it is measured; one that fails has its reason."""
    expected = gradients(plain, [each.detach()[:_CHECKED].double().requires_grad_() for each in inputs[:3]], inputs[3].double())
    for name, form in all_forms().items():
        try:
            yield name, of_a_form(context, inputs, form, expected if name != _BOUND else None)
        except Exception as error:  # a kernel that does not take these inputs
            yield name, {"skipped" if name.startswith("PyTorch, ") else "failed": reason(error)}


def of_a_form(context: Context, inputs: list[Tensor], form: Form, expected: list[Tensor] | None) -> Values:
    """Time, TFLOP/s (two products forward, five backward, whatever is computed), memory, and errors of some images."""
    found = gradients(form, [each.detach()[:_CHECKED].requires_grad_() for each in inputs[:3]], inputs[3])
    peak = PeakMemory(context.device)
    first, second = (gradients(form, inputs[:3], inputs[3]) for _ in range(2))
    gib, repeats = peak.gib(), all(map(torch.equal, first, second))
    del first, second
    rounds, times = (1, 1) if context.miniature else (5, 5)
    calls = {"forward": partial(form, *inputs), "both": partial(gradients, form, inputs[:3], inputs[3])}
    ms = {
        name: statistics.median(milliseconds(call, context.device, times) for _ in range(rounds))
        for name, call in calls.items()
    }
    batch, heads, tokens, head_dim = inputs[0].shape
    product = 2e-9 * batch * heads * tokens**2 * head_dim  # TFLOP, times 1000
    values: Values = {
        "forward_ms": ms["forward"],
        "ms": ms["both"],
        "forward_tflops": 2 * product / ms["forward"],
        "tflops": 7 * product / ms["both"],
        "peak_gib": gib,
        "repeats_bit_for_bit": repeats,
    }
    if expected:
        errors = [relative_error(a, b) for a, b in zip(found, expected)]
        values |= {"error": errors[0], "error_of_gradients": max(errors[1:4]), "error_of_dlog_phi": errors[4]}
    return values


def gradients(form: Form, qkv: list[Tensor], log_phi: Tensor) -> list[Tensor]:
    """Output and gradients of q, k, v and log Φp for a fixed gradient of the output; zeros where one is not used."""
    bias = log_phi.detach().requires_grad_()
    out = form(*qkv, bias)
    given = torch.linspace(-1, 1, out.shape[-1], device=out.device, dtype=out.dtype).expand_as(out)
    found = torch.autograd.grad(out, [*qkv, bias], given, allow_unused=True, materialize_grads=True)
    return [out.detach(), *found]


def relative_error(found: Tensor, expected: Tensor) -> float:
    """Largest difference, as a part of the largest expected value."""
    return ((found.double() - expected).abs().max() / expected.abs().max()).item()
