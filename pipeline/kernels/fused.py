"""Peripheral attention with Triton kernels, registered as one operator of PyTorch: ``torch.ops.pervit.peripheral_attention``.

Importing this module needs Triton and registers the operator. With ``TRITON_INTERPRET=1`` in the environment at that time the kernels
run in Triton's interpreter, on CPU tensors; torch.compile then sees an opaque operator, as there is nothing to compile.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
from torch import Tensor
from torch.library import Library, custom_op, triton_op, wrap_triton
from torch.utils.flop_counter import register_flop_formula

from pipeline.kernels import gradient_tiles, tiles

NAME = "pervit::peripheral_attention"
# Groups of images whose gradients of log Φp are summed in a kernel each, and then over the groups. A constant, as another number
# rounds differently: 512 programs for PerViT-T's 4 heads at 224 px, which fill a GPU, and sums of 5 (T) to 15 MB (M).
GROUPS = 8
SMALLEST_BLOCK = 16  # of a matrix instruction's sides

INTERPRETED = not isinstance(tiles.forward, triton.JITFunction)
make_operator: Any = custom_op if INTERPRETED else triton_op


@dataclass(frozen=True)
class Tiling:
    """How a kernel is cut up: a program keeps ``outer`` tokens and goes through the others by ``inner``."""

    outer: int
    inner: int
    num_warps: int
    num_stages: int = 2  # of loads under way


# By kernel and largest number of channels: the fastest of 26 of each on an H200, 196 tokens, 128 images (docs/results/gpu_step.md).
_HOPPER = {
    ("forward", 64): Tiling(64, 64, 4),
    ("query_gradient", 32): Tiling(64, 64, 4, 1),
    ("query_gradient", 64): Tiling(64, 32, 4, 1),
    ("key_value_gradient", 32): Tiling(128, 32, 4, 1),
    ("key_value_gradient", 64): Tiling(128, 32, 8, 1),
    ("phi_gradient", 64): Tiling(64, 64, 4, 3),
    ("forward", 128): Tiling(128, 32, 8, 3),
    ("query_gradient", 128): Tiling(64, 64, 4, 2),
    ("key_value_gradient", 128): Tiling(64, 64, 4, 1),
    ("phi_gradient", 128): Tiling(64, 64, 4, 1),
}


def tiling(kernel: str, itemsize: int, channels: int, capability: tuple[int, int]) -> Tiling:
    """The tiles of a kernel: measured on Hopper, elsewhere the largest that keep its numbers in registers.

    Args:
        kernel: its name in ``tiles.py`` or ``gradient_tiles.py``.
        itemsize: bytes of an element of q. float32 is multiplied without matrix instructions, at several times the registers.
        channels: of a head, rounded up to a power of two.
        capability: of the GPU. Hopper and later multiply from shared memory, and 64 rows at least; Ampere from registers.
    """
    if itemsize == 4:
        return Tiling(32, 32, 8, 1)
    if capability[0] == 9:
        return _HOPPER[kernel, min(most for name, most in _HOPPER if name == kernel and channels <= most)]
    if channels > 64:
        return Tiling(64, 32, 8) if capability >= (10, 0) else Tiling(32, 32, 4)
    return {"key_value_gradient": Tiling(64, 32, 4), "phi_gradient": Tiling(64, 64, 8)}.get(kernel, Tiling(64, 64, 4))


def launch(kernel: str, capability: tuple[int, int], qkv: Tensor, log_phi: Tensor, head_dim: int) -> tuple[int, dict[str, Any]]:
    """Programs per head, and the keyword arguments of a kernel's launch: sizes, strides of log Φp, tiles, warps and stages."""
    tokens, _, heads, width = (int(size) for size in qkv.shape[1:])
    cut = tiling(kernel, qkv.element_size(), block_of(width), capability)
    outer, inner = (min(block, block_of(tokens)) for block in (cut.outer, cut.inner))
    rest = tokens % inner
    by_key = kernel == "key_value_gradient"
    arguments: dict[str, Any] = {
        **{f"PHI_{axis}": int(stride) for axis, stride in zip(("HEAD", "QUERY", "KEY"), log_phi.stride())},
        "HEADS": heads,
        "TOKENS": tokens,
        "WIDTH": width,
        "CHANNELS": block_of(width),
        "SCALE": head_dim**-0.5,
        "QUERIES": inner if by_key else outer,
        "KEYS": outer if by_key else inner,
        "PRECISION": "ieee" if torch.get_float32_matmul_precision() == "highest" else "tf32",  # of products of float32
        "num_warps": cut.num_warps,
        "num_stages": cut.num_stages,
    }
    if kernel == "phi_gradient":
        return triton.cdiv(tokens, outer) * triton.cdiv(tokens, inner), arguments
    return triton.cdiv(tokens, outer), {**arguments, "REST": block_of(rest) if rest else 0}


def block_of(size: int) -> int:
    """The power of two that holds ``size`` and that a matrix instruction takes."""
    return max(SMALLEST_BLOCK, triton.next_power_of_2(size))


def _capability(qkv: Tensor) -> tuple[int, int]:
    return torch.cuda.get_device_capability(qkv.device) if qkv.is_cuda else (9, 0)


def _checked(qkv: Tensor, log_phi: Tensor, head_dim: int) -> tuple[Tensor, Tensor]:
    """``out`` (B, N, heads, width) and ``log_sums`` (B, heads, N), still empty.

    The kernels take the shapes on trust, and would read past the end of another log Φp.
    """
    packed = qkv.ndim == 5 and qkv.shape[2] == 3
    torch._check(packed, lambda: f"q, k and v must be packed as (B, N, 3, heads, width), got the shape {tuple(qkv.shape)}")
    batch, tokens, _, heads, width = qkv.shape
    fits, found = (heads, tokens, tokens), tuple(log_phi.shape)
    torch._check(found == fits, lambda: f"log_phi must be (heads, N, N) = {fits}, got the shape {found}")
    torch._check(0 < head_dim <= width, lambda: f"head_dim must be from 1 to the width {width}, got {head_dim}")
    return qkv.new_empty(batch, tokens, heads, width), qkv.new_empty(batch, heads, tokens, dtype=torch.float32)


def _attention(qkv: Tensor, log_phi: Tensor, head_dim: int) -> tuple[Tensor, Tensor]:
    out, log_sums = _checked(qkv, log_phi, head_dim)
    batch, _, heads, _ = out.shape
    programs, arguments = launch("forward", _capability(qkv), qkv, log_phi, head_dim)
    with torch.cuda.device_of(qkv):  # Triton launches on the current GPU; no effect on a CPU
        wrap_triton(tiles.forward)[(batch * heads * programs,)](qkv.contiguous(), log_phi, out, log_sums, **arguments)
    return out, log_sums


def _gradients(
    qkv: Tensor, log_phi: Tensor, out: Tensor, log_sums: Tensor, dout: Tensor, head_dim: int, phi_learns: bool
) -> tuple[Tensor, Tensor]:
    batch, tokens, heads, _ = out.shape
    inputs, dout, capability = (qkv.contiguous(), log_phi), dout.contiguous(), _capability(qkv)
    dqkv, deltas = torch.empty_like(inputs[0]), torch.empty_like(log_sums)
    groups = min(GROUPS, batch)
    sums = log_sums.new_empty((groups, heads, tokens, tokens) if phi_learns else 0)
    with torch.cuda.device_of(qkv):
        programs, arguments = launch("query_gradient", capability, *inputs, head_dim)
        grid = (batch * heads * programs,)
        wrap_triton(gradient_tiles.query_gradient)[grid](*inputs, out, log_sums, dout, dqkv, deltas, **arguments)
        programs, arguments = launch("key_value_gradient", capability, *inputs, head_dim)
        grid = (batch * heads * programs,)
        wrap_triton(gradient_tiles.key_value_gradient)[grid](*inputs, log_sums, dout, deltas, dqkv, **arguments)
        if phi_learns:
            programs, arguments = launch("phi_gradient", capability, *inputs, head_dim)
            grid, split = (groups * heads * programs,), (sums, batch, groups)
            wrap_triton(gradient_tiles.phi_gradient)[grid](*inputs, log_sums, dout, deltas, *split, **arguments)
    return dqkv, sums.sum(0).to(log_phi.dtype) if phi_learns else log_phi.new_empty(0)


attention = make_operator(NAME, _attention, mutates_args=())
gradients = make_operator(f"{NAME}_backward", _gradients, mutates_args=())
attention.register_fake(_checked)
# The last argument is ``phi_learns``.
gradients.register_fake(lambda qkv, phi, *rest: (qkv.new_empty(qkv.shape), phi.new_empty(phi.shape if rest[-1] else 0)))


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    *tensors, ctx.head_dim = inputs
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(output[1])
    ctx.save_for_backward(*tensors, *output)


def _backward(ctx: Any, dout: Tensor | None, _: None) -> tuple[Tensor | None, ...]:
    if dout is None:
        return None, None, None
    phi_learns = ctx.needs_input_grad[1]
    dqkv, dphi = gradients(*ctx.saved_tensors, dout, ctx.head_dim, phi_learns)
    return dqkv, dphi if phi_learns else None, None


attention.register_autograd(_backward, setup_context=_keep)

_library = Library("pervit", "FRAGMENT")  # holds the rules below


def _autocast_rule(device: str) -> Any:
    def cast(qkv: Tensor, log_phi: Tensor, head_dim: int) -> tuple[Tensor, Tensor]:
        dtype = torch.get_autocast_dtype(device)
        with torch.autocast(device, enabled=False):
            return attention(qkv.to(dtype), log_phi, head_dim)  # log Φp stays: bfloat16 has -20 in steps of 0.125

    return cast


for _device in ("cpu", "cuda"):
    _library.impl(NAME.partition("::")[2], _autocast_rule(_device), f"Autocast{_device.upper()}")


@register_flop_formula(torch.ops.pervit.peripheral_attention)
def _flops(qkv: torch.Size, log_phi: torch.Size, head_dim: int, *__: Any, **___: Any) -> int:
    """2 products of (N, N, head_dim) per head; PyTorch counts 2 per multiply-accumulate."""
    batch, tokens, _, heads, _ = qkv
    return 2 * 2 * batch * heads * tokens**2 * head_dim


@register_flop_formula(torch.ops.pervit.peripheral_attention_backward)
def _gradient_flops(
    qkv: torch.Size, log_phi: torch.Size, out: Any, log_sums: Any, dout: Any, head_dim: int, *_: Any, **__: Any
) -> int:
    """5 products, as PyTorch counts its own attention's backward pass: without those that are computed again."""
    return _flops(qkv, log_phi, head_dim) * 5 // 2
