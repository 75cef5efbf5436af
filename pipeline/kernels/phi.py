"""The two convolutions of the peripheral position encoding Φp, of all layers at once, as Triton kernels: ``torch.ops.pervit.phi_maps``.

What they compute is convolution, instance norm, ReLU and convolution of the layers' own networks
(:class:`~pipeline.models.pervit.position.PeripheralPosition`; PerViT, Eq. 7 and 8). cuDNN takes a sixth of PerViT-M's step for the second
one, of 12 groups in float32, in which it keeps a tenth of the GPU busy. The kernels multiply in TF32, with three products for one of float32.

Importing this module needs Triton and registers the operator; ``TRITON_INTERPRET=1``: see :mod:`pipeline.kernels.fused`.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
from torch import Tensor
from torch.library import wrap_triton

from pipeline.kernels.fused import SMALLEST_BLOCK, block_of, make_operator
from pipeline.kernels.phi_tiles import phi_backward, phi_forward

NAME = "pervit::phi_maps"
CHUNK = SMALLEST_BLOCK  # channels at a time


def launch(kernel: str, distance: Tensor, kernel1: Tensor, kernel2: Tensor, eps: float) -> tuple[int, dict[str, Any]]:
    """Programs, and the keyword arguments of a kernel's launch."""
    rows, columns = (int(size) - 4 for size in distance.shape[-2:])
    hidden, layers = int(kernel2.shape[1]), int(kernel1.shape[0]) // int(kernel2.shape[1])
    heads, positions = int(kernel2.shape[0]) // layers, block_of((rows + 2) * (columns + 2))
    programs = layers * len(distance) * (triton.cdiv(hidden, CHUNK) if kernel == "phi_backward" else 1)
    return programs, {
        "ROWS": rows,
        "COLUMNS": columns,
        "HIDDEN": hidden,
        "HEADS": heads,
        "POSITIONS": positions,
        "KEYS": block_of(rows * columns),
        "OUTPUTS": block_of(heads),
        "CHANNELS": CHUNK,
        "EPS": eps,
        "PRECISION": "tf32x3",
        "num_warps": max(4, positions // 32),
    }


def _maps(
    distance: Tensor, kernel1: Tensor, shift: Tensor, weight: Tensor, bias: Tensor, kernel2: Tensor, eps: float
) -> Tensor:
    """:func:`pipeline.kernels.peripheral.phi_maps`. ``shift`` the norm removes."""
    out = _empty(distance, kernel1, shift, weight, bias, kernel2, eps)
    programs, arguments = launch("phi_forward", distance, kernel1, kernel2, eps)
    inputs = [each.contiguous() for each in (distance, kernel1, weight, bias, kernel2)]
    with torch.cuda.device_of(distance):
        wrap_triton(phi_forward)[(programs,)](*inputs, out, **arguments)
    return out


def _empty(
    distance: Tensor, kernel1: Tensor, shift: Tensor, weight: Tensor, bias: Tensor, kernel2: Tensor, eps: float
) -> Tensor:
    tokens, _, rows, columns = distance.shape
    channels, (outputs, hidden, *_) = len(kernel1), kernel2.shape
    layers = channels // hidden
    fit = [(tokens, 1, rows, columns), (channels, 1, 3, 3), (channels,), (channels,), (outputs, hidden, 3, 3)]
    found = [tuple(each.shape) for each in (distance, kernel1, weight, bias, kernel2)]
    whole = tokens == (rows - 4) * (columns - 4) and channels == layers * hidden and outputs % layers == 0
    # The kernels take the shapes on trust, and would read past a tensor's end.
    torch._check(whole and found == fit, lambda: f"the shapes of distances, kernels and norm must fit together, got {found}")
    return distance.new_empty(tokens, outputs, rows - 4, columns - 4)


def _gradients(
    distance: Tensor, kernel1: Tensor, weight: Tensor, bias: Tensor, kernel2: Tensor, dout: Tensor, eps: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    programs, arguments = launch("phi_backward", distance, kernel1, kernel2, eps)
    by_key = dout.unflatten(1, (-1, arguments["HEADS"])).flatten(3).mT  # (N, layers, H * W, heads)
    inputs = [each.contiguous() for each in (distance, kernel1, weight, bias, kernel2, by_key)]
    parts = [distance.new_empty((len(distance), *each.shape)) for each in inputs[1:5]]  # of each query
    with torch.cuda.device_of(distance):
        wrap_triton(phi_backward)[(programs,)](*inputs, *parts, **arguments)
    dkernel1, dweight, dbias, dkernel2 = (part.sum(0) for part in parts)
    return dkernel1, dweight, dbias, dkernel2


phi_maps = make_operator(NAME, _maps, mutates_args=())
gradients = make_operator(f"{NAME}_backward", _gradients, mutates_args=())
phi_maps.register_fake(_empty)
gradients.register_fake(lambda _distance, *learned: tuple(each.new_empty(each.shape) for each in learned[:4]))


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    distance, kernel1, shift, *rest, ctx.eps = inputs
    ctx.save_for_backward(shift, distance, kernel1, *rest)


def _backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
    shift, *inputs = ctx.saved_tensors
    dkernel1, *rest = gradients(*inputs, dout, ctx.eps)
    # What is the same at all positions, the norm removes.
    return None, dkernel1, torch.zeros_like(shift), *rest, None


phi_maps.register_autograd(_backward, setup_context=_keep)
