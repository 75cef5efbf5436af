"""The two convolutions of the peripheral position encoding Φp, of all layers at once, as Triton kernels: ``torch.ops.pervit.phi_maps``.

What they compute is convolution, instance norm, ReLU and convolution of the layers' own networks
(:class:`~pipeline.models.pervit.position.PeripheralPosition`; PerViT, Eq. 7 and 8). cuDNN takes a sixth of PerViT-M's step for the second
one, of 12 groups in float32, in which it keeps a tenth of an H100 busy. The kernels multiply in TF32, with three products for one of float32.

Importing this module needs Triton and registers the operator; ``TRITON_INTERPRET=1``: see :mod:`pipeline.kernels.fused`.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
from torch import Tensor
from torch.library import wrap_triton

from pipeline.kernels.fused import SMALLEST_BLOCK, make_operator
from pipeline.kernels.phi_tiles import phi_backward, phi_forward

NAME = "pervit::phi_maps"
CHUNK = SMALLEST_BLOCK  # channels at a time


def launch(kernel: str, distance: Tensor, kernel1: Tensor, kernel2: Tensor) -> tuple[int, dict[str, Any]]:
    """Programs, and the keyword arguments of a kernel's launch."""
    rows, columns = (int(size) - 4 for size in distance.shape[-2:])
    hidden, layers = int(kernel2.shape[1]), int(kernel1.shape[0]) // int(kernel2.shape[1])
    heads, positions = int(kernel2.shape[0]) // layers, triton.next_power_of_2((rows + 2) * (columns + 2))
    programs = layers * len(distance) * (triton.cdiv(hidden, CHUNK) if kernel == "phi_backward" else 1)
    return programs, {
        "ROWS": rows,
        "COLUMNS": columns,
        "HIDDEN": hidden,
        "HEADS": heads,
        "POSITIONS": positions,
        "KEYS": max(SMALLEST_BLOCK, triton.next_power_of_2(rows * columns)),
        "OUTPUTS": max(SMALLEST_BLOCK, triton.next_power_of_2(heads)),
        "CHANNELS": CHUNK,
        "EPS": 1e-5,
        "PRECISION": "tf32x3",
        "num_warps": min(16, max(4, positions // 32)),
    }


def _maps(distance: Tensor, kernel1: Tensor, shift: Tensor, weight: Tensor, bias: Tensor, kernel2: Tensor) -> Tensor:
    programs, arguments = launch("phi_forward", distance, kernel1, kernel2)
    out = _empty(distance, kernel1, shift, weight, bias, kernel2)
    with torch.cuda.device_of(distance):
        wrap_triton(phi_forward)[(programs,)](distance, kernel1, weight, bias, kernel2, out, **arguments)
    return out


def _empty(distance: Tensor, kernel1: Tensor, shift: Tensor, weight: Tensor, bias: Tensor, kernel2: Tensor) -> Tensor:
    tokens, _, rows, columns = distance.shape  # the kernels take shapes on trust
    torch._check(
        tokens == (rows - 4) * (columns - 4) and kernel1.shape[1:] == (1, 3, 3) and kernel2.shape[2:] == (3, 3),
        lambda: (
            f"distances of {tokens} queries {tuple(distance.shape)} and kernels {kernel1.shape}, {kernel2.shape} do not fit"
        ),
    )
    torch._check(
        kernel1.shape[0] == weight.shape[0] == bias.shape[0] and kernel1.shape[0] % kernel2.shape[1] == 0,
        lambda: (
            f"kernels {kernel1.shape} and {kernel2.shape} must have layers times as many channels, as the norm {weight.shape}"
        ),
    )
    return distance.new_empty(tokens, kernel2.shape[0], rows - 4, columns - 4)


def _gradients(
    distance: Tensor, kernel1: Tensor, weight: Tensor, bias: Tensor, kernel2: Tensor, dout: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    inputs = (kernel1, weight, bias, kernel2)
    programs, arguments = launch("phi_backward", distance, kernel1, kernel2)
    by_key = dout.unflatten(1, (-1, arguments["HEADS"])).flatten(3).mT.contiguous()  # (N, layers, H * W, heads)
    parts = [distance.new_empty((len(distance), *each.shape)) for each in inputs]
    with torch.cuda.device_of(distance):
        wrap_triton(phi_backward)[(programs,)](distance, *inputs, by_key, *parts, **arguments)
    dkernel1, dweight, dbias, dkernel2 = (part.sum(0) for part in parts)
    return dkernel1, dweight, dbias, dkernel2


phi_maps = make_operator(NAME, _maps, mutates_args=())
gradients = make_operator(f"{NAME}_backward", _gradients, mutates_args=())
phi_maps.register_fake(_empty)
gradients.register_fake(lambda distance, *learned: tuple(torch.empty_like(each) for each in learned[:4]))


def _keep(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
    distance, kernel1, shift, *rest = inputs
    ctx.save_for_backward(shift, distance, kernel1, *rest)


def _backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
    shift, *inputs = ctx.saved_tensors
    dkernel1, *rest = gradients(*inputs, dout)
    return None, dkernel1, torch.zeros_like(shift), *rest  # the norm removes what is the same at all positions


phi_maps.register_autograd(_backward, setup_context=_keep)
