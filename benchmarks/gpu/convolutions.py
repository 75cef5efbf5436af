"""Stage ``convolution``: each convolution of a model alone, as its training step calls it: Φp's, the depthwise ones, the stem's."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.gpu.common import Context, Rows, Values, milliseconds, reason
from pipeline.models import create_model
from pipeline.step.precision import autocast

_aten = torch.ops.aten
Call = tuple[Any, ...]  # arguments of aten::convolution, with (shape, strides, dtype) for tensors


def measure(context: Context) -> Rows:
    torch.backends.cudnn.benchmark, torch.backends.cudnn.allow_tf32 = True, False  # as init_world does
    device, name = context.device, context.options["model"]
    model = create_model(name, num_classes=context.classes, image_size=context.image_size).to(device).train()
    model.groups_phi = True  # as on a GPU, also in miniature
    grid = (context.image_size // 16,) * 2
    yield {"case": f"{name}: Φp as a whole", **log_phi(context, model, grid)}
    found = Recorder()
    images = torch.randn(context.batch, 3, context.image_size, context.image_size, device=device)
    with torch.no_grad(), autocast(device, "fp32" if context.miniature else "bf16"), found:
        model(images, torch.rand(context.batch, model.noise_per_sample, device=device))
    for call, count in sorted(found.calls.items(), key=lambda each: _order(each[0])):
        try:
            values = times(context, call)
        except Exception as error:  # of cuDNN
            values = {"failed": reason(error)}
        yield {"case": f"{name}: {described(call)}", "calls": count, **values}


class Recorder(TorchDispatchMode):
    """Counts the convolutions that run while it is active, by their arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: dict[Call, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if func is _aten.convolution.default:
            call = tuple(_described(each) for each in args)
            self.calls[call] = self.calls.get(call, 0) + 1
        return func(*args, **(kwargs or {}))


def _described(argument: Any) -> Any:
    if isinstance(argument, Tensor):
        return tuple(argument.shape), argument.stride(), argument.dtype
    return tuple(argument) if isinstance(argument, list) else argument


def _order(call: Call) -> tuple[bool, bool]:
    """Φp's first, in fp32, then the depthwise ones."""
    (_, _, dtype), (shape, _, _) = call[0], call[1]
    return dtype != torch.float32, shape[1] != 1


def described(call: Call) -> str:
    """Shapes, groups and dtype in a few words."""
    (batch, channels, height, width), _, dtype = call[0]
    outputs, _, kernel, _ = call[1][0]
    groups = f", {call[8]} groups" if call[8] > 1 else ""
    precision = str(dtype).removeprefix("torch.")
    return f"{kernel} x {kernel}{groups}, {batch} x {channels} x {height} x {width} to {outputs}, {precision}"


def times(context: Context, call: Call) -> Values:
    """Milliseconds of the three passes, and GB/s if each of them read and wrote its tensors once."""
    images, weight, bias = (made(each, context) for each in call[:3])
    rest, sizes = call[3:], None if bias is None else list(bias.shape)
    output = _aten.convolution(images, weight, bias, *rest)
    gradient = torch.randn_like(output)
    nbytes = sum(each.numel() * each.element_size() for each in (images, weight, output))
    calls: dict[str, Callable[[], object]] = {"forward": lambda: _aten.convolution(images, weight, bias, *rest)}
    for name, mask in {"input_gradient": [True, False, False], "weight_gradient": [False, True, False]}.items():
        calls[name] = partial(_aten.convolution_backward, gradient, images, weight, sizes, *rest, mask)
    values: Values = {}
    for name, run in calls.items():
        ms = _median(run, context)
        values |= {f"{name}_ms": ms, f"{name}_gb_per_s": 1e-6 * nbytes / ms}
    return values


def made(described: Any, context: Context) -> Tensor | None:
    if described is None:
        return None
    shape, strides, dtype = described
    return torch.empty_strided(shape, strides, dtype=dtype, device=context.device).normal_()


def log_phi(context: Context, model: Any, grid: tuple[int, int]) -> Values:
    """All layers' maps, and the gradients of their parameters."""

    def both() -> None:
        maps = model.log_phi(grid)
        torch.autograd.grad(maps, parameters, [torch.ones_like(each) for each in maps])

    parameters = list(model.phi_parameters())
    return {"calls": 1, "forward_ms": _median(lambda: model.log_phi(grid), context), "ms": _median(both, context)}


def _median(call: Callable[[], object], context: Context) -> float:
    call()  # cuDNN tries its algorithms
    rounds, repeats = (1, 1) if context.miniature else (5, 5)
    return statistics.median(milliseconds(call, context.device, repeats) for _ in range(rounds))
