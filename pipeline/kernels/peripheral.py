"""Compute softmax(q kᵀ / sqrt(head_dim) + log Φp) v: the functions that models call, and the choice between its two forms."""

from __future__ import annotations

import logging
import os
from functools import cache

import torch
from torch import Tensor
from torch.nn import functional as F

from pipeline.errors import UserError, first_line

_log = logging.getLogger(__name__)

SWITCH = "PERVIT_ATTENTION"
AUTO, TRITON, PLAIN = "auto", "triton", "plain"
INTERPRETER = "TRITON_INTERPRET"
# Read once: Triton reads its own when the kernels are defined, and a compiled model would not follow a change of either.
_ASKED = os.environ.get(SWITCH, AUTO)
_INTERPRETED = os.environ.get(INTERPRETER, "").lower() in ("1", "true", "on", "yes", "y")

MAX_WIDTH = 128  # channels of a head: more would need smaller tiles
MAX_POSITIONS = 256  # of Φp's hidden maps: a program holds them in registers, those of images of 224 pixels without spills
CAPABILITY = (8, 0)  # the oldest GPUs that the tests compile the kernels for, Ampere
_ALIGNMENT = 8  # channels of a head on CUDA
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def peripheral_attention(q: Tensor, k: Tensor, v: Tensor, log_phi: Tensor | None) -> Tensor:
    """:func:`packed_attention` of q, k and v (B, heads, N, head_dim), with any strides, which are copied for the kernels ->
    (B, heads, N, head_dim)."""
    if log_phi is None or not uses_triton(q):
        return biased_attention(q, k, v, log_phi)
    packed = torch.stack([part.transpose(1, 2) for part in (q, k, v)], 2)  # (B, N, 3, heads, head_dim)
    head_dim = q.shape[-1]
    if padding := aligned_width(head_dim, q.device) - head_dim:
        packed = F.pad(packed, (0, padding))
    return packed_attention(packed, log_phi, head_dim)[..., :head_dim].transpose(1, 2)


def packed_attention(qkv: Tensor, log_phi: Tensor | None, head_dim: int | None = None) -> Tensor:
    """softmax(q kᵀ / sqrt(head_dim) + log Φp) v, which is Normalize[exp(q kᵀ / sqrt(head_dim)) ⊙ Φp] v (PerViT, Eq. 3).

    On NVIDIA GPUs of compute capability 8.0 and more it runs Triton kernels, whose results repeat bit for bit; elsewhere, and for
    float64 or heads of more than 128 channels, PyTorch's own attention. ``PERVIT_ATTENTION=plain`` in the environment keeps GPUs
    from the kernels, ``triton`` makes it an error where they cannot run; ``TRITON_INTERPRET=1`` runs them on CPU tensors, in
    Triton's interpreter.

    Under autocast q, k and v are cast to its dtype. The kernels keep log Φp in its own and add up in float32. A query whose
    scores are all -inf gets zeros, and its scores no gradient.

    Args:
        qkv: queries, keys and values as one projection gives them, (B, N, 3, heads, width).
        log_phi: (heads, N, N), the same for all images; None: Φp = 1.
        head_dim: channels of a head; those from here to ``width`` must be zero (:func:`aligned_width`). Default: ``width``.

    Returns:
        (B, N, heads, width); what is zero in v is zero here, and in all gradients.

    Raises:
        RuntimeError: the shapes do not fit together.
        UserError: the kernels are asked for, but cannot run.
    """
    head_dim = head_dim or qkv.shape[-1]
    if log_phi is not None and uses_triton(qkv):
        return torch.ops.pervit.peripheral_attention(qkv, log_phi, head_dim)[0]
    q, k, v = (part.transpose(1, 2) for part in qkv.unbind(2))  # the gradients of the parts are put together with one copy
    return biased_attention(q, k, v, log_phi, scale=head_dim**-0.5).transpose(1, 2)


def aligned_width(head_dim: int, device: torch.device) -> int:
    """Channels of a head, with zeros at their end, in projections that attention reads on this device.

    On a GPU a multiple of 16 bytes in bf16, the widest load: heads of 39, 45 and 57 (PerViT-M) or 70 channels (T) begin anywhere
    otherwise, and can neither be copied to shared memory ahead of their use nor go into PyTorch's fused kernels.
    """
    padded = device.type == "cuda" or (_INTERPRETED and _ASKED != PLAIN)
    return head_dim + (-head_dim % _ALIGNMENT if padded else 0)


def biased_attention(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, alignment: int | None = None, scale: float | None = None
) -> Tensor:
    """:func:`peripheral_attention` with PyTorch's fused attention, for which the bias is cast to ``q``'s dtype.

    Args:
        alignment: zero-pad head_dim to a multiple of this, which changes neither the scores nor the columns that are kept.
            Default: 8 on CUDA, where other sizes cannot use the fused kernels, else 1.
        scale: of the scores. Default: 1 / sqrt(head_dim).
    """
    head_dim = q.shape[-1]
    if padding := -head_dim % (alignment or (_ALIGNMENT if q.is_cuda else 1)):
        q, k, v = (F.pad(t, (0, padding)) for t in (q, k, v))
    mask = None if bias is None else bias.to(q.dtype)[None]  # (1, heads, N, N)
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale or head_dim**-0.5)
    return out[..., :head_dim]  # (B, heads, N, head_dim)


def uses_triton(q: Tensor) -> bool:
    """Whether attention of queries (..., width) of this device, dtype and width runs the Triton kernels. Raises UserError: see
    :func:`peripheral_attention`."""
    if _ASKED not in (AUTO, TRITON, PLAIN):
        problem = f"{SWITCH} must be {AUTO}, {TRITON} or {PLAIN}, got {_ASKED!r}"
        raise UserError(problem, "set the environment variable to one of these")
    interpreted = _INTERPRETED and q.device.type == "cpu"
    if _ASKED == PLAIN or not (interpreted or q.is_cuda):
        return False
    if q.dtype not in _DTYPES:
        obstacle, remedy = f"they do not compute in {q.dtype}", "use float32 or bfloat16"
    elif q.shape[-1] > MAX_WIDTH:
        obstacle, remedy = f"a head has {q.shape[-1]} channels, more than {MAX_WIDTH}", f"unset {SWITCH}"
    else:
        obstacle, remedy = _obstacle(q.device.type, q.device.index or 0)
        if obstacle and interpreted:
            raise UserError(f"{INTERPRETER} requires the Triton kernels of attention, but {obstacle}", remedy)
    if obstacle and _ASKED == TRITON:
        raise UserError(f"{SWITCH}={TRITON} requires the Triton kernels of attention, but {obstacle}", remedy)
    return not obstacle


def suits_kernels(distance: Tensor, kernel: Tensor) -> bool:
    """Whether Φp's maps come from :func:`phi_maps` on this device; arguments as of :func:`fits_kernels`."""
    return fits_kernels(distance, kernel) and uses_triton(distance)


def fits_kernels(distance: Tensor, kernel: Tensor) -> bool:
    """Whether :func:`phi_maps` computes Φp of distances (N, 1, H + 4, W + 4) and a first kernel (out, channels, 3, 3)."""
    rows, columns = (size - 2 for size in distance.shape[-2:])  # of the hidden maps
    fits = distance.shape[1] == 1 and kernel.shape[-1] == 3 and rows * columns <= MAX_POSITIONS
    return fits and distance.dtype == torch.float32


def phi_maps(
    distance: Tensor, kernel1: Tensor, shift: Tensor, weight: Tensor, bias: Tensor, kernel2: Tensor, eps: float
) -> Tensor:
    """Convolution of one map, instance norm, ReLU and convolution (PerViT, Eq. 7 and 8) of several layers, where
    :func:`suits_kernels`.

    Args:
        distance: (N, 1, H + 4, W + 4).
        kernel1, shift: of the first convolution, (layers * hidden, 1, 3, 3) and (layers * hidden,).
        weight, bias: of the norm, (layers * hidden,).
        kernel2: of the second, (layers * heads, hidden, 3, 3).

    Returns:
        (N, layers * heads, H, W), without the second convolution's bias.
    """
    return torch.ops.pervit.phi_maps(distance, kernel1, shift, weight, bias, kernel2, eps)


@torch.compiler.assume_constant_result  # a compiled model contains the chosen form alone
def _obstacle(device: str, index: int) -> tuple[str, str]:
    """Why the kernels cannot run on a device, and what helps; two empty strings if they can."""
    return _find_obstacle(device, index)


@cache  # looked at once per process; not part of _obstacle, as a compiler ignores caches
def _find_obstacle(device: str, index: int) -> tuple[str, str]:
    if device == "cuda":
        if torch.version.cuda is None or not torch.cuda.is_available():
            return "PyTorch has no NVIDIA GPU here", f"unset {SWITCH}"
        found = torch.cuda.get_device_capability(index)
        if found < CAPABILITY:
            least = f"{CAPABILITY[0]}.{CAPABILITY[1]}"
            return f"the GPU has compute capability {found[0]}.{found[1]}, not {least}", f"unset {SWITCH}"
    try:
        import triton  # noqa: F401
    except ImportError:
        return "triton is not installed", "pip install --no-deps -c constraints.txt triton"
    from pipeline.kernels import fused, phi  # noqa: F401  # registers the operators

    if device == "cuda":
        zeros = torch.zeros(1, 16, 3, 1, 16, device=f"cuda:{index}")
        try:
            fused.attention(zeros, zeros[:, :, 0, 0], 16)
        except Exception as error:  # no C compiler, an unfit driver, a cache folder that is not writable: many types
            line = first_line(error)
            _log.warning(f"attention runs without its Triton kernels, which cannot be built here ({line})")
            return f"they cannot be built here ({line})", f"mend that, or unset {SWITCH}"
    return "", ""
