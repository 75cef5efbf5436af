"""Stage ``attention``: peripheral attention of one layer in all its forms, at the shapes of PerViT-T, -S and -M.

The operator (``pipeline.kernels``), plain PyTorch, PyTorch's kernels with log Φp as their bias, and the authors' form,
Normalize[exp(..) * Φp] V without fusion. As a bound, PyTorch's kernel without any bias, which computes another function.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.gpu.common import MODELS, Context, PeakMemory, Rows, Values, has_module, interleaved, reason
from pipeline.models import create_model
from pipeline.models.pervit.model import PeripheralAttention

Form = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]  # q, k, v (B, heads, N, head_dim), log_phi (heads, N, N) -> as q
if has_module("pipeline.kernels"):
    from pipeline.kernels.peripheral import biased_attention
else:
    from pipeline.models.common.layers import biased_attention
_CHECKED = 4  # images for the errors, which are against float64


def measure(context: Context) -> Rows:
    tokens = 10 if context.miniature else 196
    shapes = [("pervit_t", 1, 17)] if context.miniature else layer_shapes()
    for model, heads, head_dim in shapes:
        forms = all_forms()
        inputs = make_inputs(context, heads, tokens, head_dim)
        yield from (
            (f"{model}, {heads} heads of {head_dim}: {form}", values) for form, values in of_a_shape(context, inputs, forms)
        )


def layer_shapes() -> list[tuple[str, int, int]]:
    """(model, heads, head_dim) of the narrowest and the widest layers of each model."""
    shapes = []
    for name in MODELS:
        with torch.device("meta"):
            model = create_model(name)
        layers = [each for each in model.modules() if isinstance(each, PeripheralAttention)]
        found = sorted({(each.proj.in_features // each.heads, each.heads) for each in layers})
        shapes += [(name, heads, head_dim) for head_dim, heads in dict.fromkeys([found[0], found[-1]])]
    return shapes


def all_forms() -> dict[str, Form | str]:
    """The forms by name; a reason instead of one that is missing."""
    forms: dict[str, Form | str] = {"operator": "pipeline.kernels is not there"}
    if has_module("pipeline.kernels"):
        if torch.cuda.is_available() or has_module("triton"):
            from pipeline.kernels import peripheral_attention

            forms["operator"] = peripheral_attention
        else:
            forms["operator"] = "Triton is not there"
    forms["plain PyTorch"] = plain
    forms["PyTorch's choice of kernel"] = biased_attention
    for backend in (SDPBackend.EFFICIENT_ATTENTION, SDPBackend.CUDNN_ATTENTION, SDPBackend.MATH):
        forms[f"PyTorch, {backend.name.lower().removesuffix('_attention')}"] = partial(with_backend, backend)
    forms["authors"] = authors
    forms["without bias (a bound)"] = lambda q, k, v, log_phi: F.scaled_dot_product_attention(q, k, v)
    return forms


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


def of_a_shape(context: Context, inputs: list[Tensor], forms: dict[str, Form | str]) -> Iterator[tuple[str, Values]]:
    """Figures of every form. Timed together, round by round; a form that fails here is left out with its reason."""
    works, memory, errors, repeated = {}, {}, {}, {}
    expected = gradients(plain, [each.detach()[:_CHECKED].double().requires_grad_() for each in inputs[:3]], inputs[3].double())
    for name, form in forms.items():
        if isinstance(form, str):
            yield name, {"skipped": form}
            continue
        try:
            found = gradients(form, [each.detach()[:_CHECKED].requires_grad_() for each in inputs[:3]], inputs[3])
            errors[name] = [relative_error(a, b) for a, b in zip(found, expected)]
            peak = PeakMemory(context.device)
            first, second = (gradients(form, inputs[:3], inputs[3]) for _ in range(2))
            memory[name] = peak.gib()
            repeated[name] = all(map(torch.equal, first, second))
            works[name] = form
            del first, second
        except Exception as error:  # a kernel that does not take these inputs
            yield name, {"failed" if name == "operator" else "skipped": reason(error)}
    rounds, repeats = (1, 1) if context.miniature else (5, 5)
    forward = interleaved({name: partial(form, *inputs) for name, form in works.items()}, context.device, rounds, repeats)
    both = interleaved(
        {name: partial(gradients, form, inputs[:3], inputs[3]) for name, form in works.items()}, context.device, rounds, repeats
    )
    for name in works:
        out, *_, bias = errors[name]
        bound = "bound" in name
        yield (
            name,
            {
                "forward, ms": forward[name],
                "with backward, ms": both[name],
                "to the authors'": both[name] / both["authors"],
                "peak MiB": None if memory[name] is None else 1024 * memory[name],
                "error": None if bound else out,
                "error of dlog Φp": None if bound else bias,
                "repeats bit for bit": repeated[name],
            },
        )


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
