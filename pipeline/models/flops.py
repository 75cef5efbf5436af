"""Count the parameters and multiply-accumulates (1 GMAC = 1e9) of a model with fvcore."""

import logging
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import torch
from torch import nn

from pipeline.models.registry import create_model, list_models, model_entry

# Operators without matrix products of which fvcore knows nothing. One that is not in this list either makes the count fail.
_NO_PRODUCT = frozenset(
    "add add_ sub sub_ rsub lerp mul mul_ div div_ neg pow sqrt exp log log_sigmoid sigmoid gelu silu tanh softmax sum mean "
    "clone unflatten expand_as reciprocal repeat pad constant ones_like eye linspace where lt le ne min abs hardswish "
    "hardswish_ hardsigmoid hardsigmoid_ hardtanh hardtanh_ silu_ sigmoid_ mish elu leaky_relu softplus erf sin cos "
    "linalg_vector_norm norm std var pixel_shuffle pixel_unshuffle flip meshgrid index_select tile dropout_ max_pool2d "
    "avg_pool2d adaptive_avg_pool1d feature_alpha_dropout numel".split()
)


@dataclass(frozen=True)
class FlopRow:
    """Counts of one model at one image size."""

    name: str
    image_size: int
    params: int
    params_phi: int
    gmacs_modules: float  # by the papers' convention, which hooks modules and so misses the matrix products of attention
    gmacs: float  # the full cost of one image, without Φp
    gmacs_phi: float  # of Φp, which depends on weights only and is computed once per forward pass, for any batch size
    paper_params_m: float | None
    paper_gmacs: float | None  # at the paper's image size, without switches
    switches: dict[str, Any] = field(default_factory=dict)  # that were set
    gmacs_torch: float | None = None  # by torch.utils.flop_counter; models of others only
    uncounted: list[str] = field(default_factory=list)  # operators without a rule in fvcore, which may have products; likewise

    def remarks(self) -> list[str]:
        """What there is to say about the count of a model of others."""
        if self.gmacs_torch is None:
            return []
        counts = f"{self.name}: fvcore counts {self.gmacs:.3f} GMACs, torch.utils.flop_counter {self.gmacs_torch:.3f}"
        return [f"note: {counts}; fvcore leaves out {', '.join(self.uncounted)}" if self.uncounted else counts]

    def training_flops_per_image(self, micro_batch_size: int) -> float:
        """Model FLOPs of one image's forward and backward pass: 2 per multiply-accumulate, the backward pass twice the forward.

        Recomputed activations do not count (model FLOPs utilization; Chowdhery et al., "PaLM", 2022, App. B).
        """
        return 6e9 * (self.gmacs + self.gmacs_phi / micro_batch_size)


def count(
    name: str, image_size: int | None = None, num_classes: int | None = None, switches: Mapping[str, Any] = MappingProxyType({})
) -> FlopRow:
    """Count a model on one image; by default at the image size and with the number of classes of the model's paper. Raises
    UserError: unknown model or unsupported image size; RuntimeError: an unknown operator, which may contain matrix products."""
    entry = model_entry(name)
    side, classes = image_size or entry.image_size, num_classes or entry.num_classes
    model = create_model(name, num_classes=classes, image_size=side, switches=switches).eval()
    image = torch.zeros(1, 3, side, side)
    by_torch: float | None = None
    uncounted: list[str] = []
    with torch.no_grad():
        model(image)  # fills Φp's cache, which keeps Φp out of the next two traces
        if name not in list_models():
            by_torch, modules, per_image, uncounted = _count_others(model, image)
        else:
            modules, per_image = _macs(model, image, MODULE_CONVENTION), _macs(model, image)
    with_phi = _macs(model, image) if model.has_phi else per_image  # with gradients Φp is not cached
    return FlopRow(
        name=name,
        image_size=side,
        params=sum(p.numel() for p in model.parameters()),
        params_phi=sum(p.numel() for p in model.phi_parameters()),
        gmacs_modules=modules / 1e9,
        gmacs=per_image / 1e9,
        gmacs_phi=(with_phi - per_image) / 1e9,
        paper_params_m=entry.paper_params_m,
        paper_gmacs=entry.paper_gmacs,
        switches=dict(switches),
        gmacs_torch=None if by_torch is None else by_torch / 1e9,
        uncounted=uncounted,
    )


def _count_others(model: nn.Module, image: torch.Tensor) -> tuple[float, float, float, list[str]]:
    """Multiply-accumulates of PyTorch's counter, of fvcore's in the papers' convention and in full, and what fvcore leaves out.

    Where fvcore cannot trace the model, PyTorch's count stands for all.
    """
    from torch.utils.flop_counter import FlopCounterMode

    with FlopCounterMode(display=False) as counter:
        model(image)
    by_torch = counter.get_total_flops() / 2
    try:
        modules, _ = _traced(model, image, MODULE_CONVENTION)
        return by_torch, modules, *_traced(model, image, {})
    except Exception:  # of the tracer, on control flow that it cannot follow
        return by_torch, by_torch, by_torch, ["everything: it cannot trace the model, so both figures are PyTorch's"]


def _attention_macs(inputs: list, outputs: list) -> float:
    """The products q kᵀ and softmax(..) v of fused attention, for which fvcore has no handler."""
    (*batch, queries, width), (*_, keys, value_width) = inputs[0].type().sizes(), inputs[2].type().sizes()  # (B, heads, N, D)
    return math.prod(batch) * queries * keys * (width + value_width)


def _packed_attention_macs(inputs: list, outputs: list) -> float:
    """The same of :mod:`pipeline.kernels`: (B, N, 3, heads, width), log Φp, and the channels of a head that are not zero."""
    batch, tokens, _, heads, _ = inputs[0].type().sizes()
    return 2 * batch * heads * tokens**2 * inputs[2].toIValue()


_ATTENTION = {"aten::scaled_dot_product_attention": _attention_macs, "pervit::peripheral_attention": _packed_attention_macs}


def _conv_and_bias(inputs: list, outputs: list) -> float:
    from fvcore.nn.jit_handles import conv_flop_jit

    has_bias = inputs[2].type().kind() == "TensorType"
    return conv_flop_jit(inputs, outputs)["conv"] + has_bias * _numel(outputs)


def _numel(values: list) -> int:
    return math.prod(values[0].type().sizes())


# The papers count with module hooks (ptflops' convention): linear layers, convolutions including bias, 2 per element for norms,
# 1 for ReLU. Inferred from the published counts of PerViT and ConViT, which it reproduces.
MODULE_CONVENTION = {
    "aten::_convolution": _conv_and_bias,
    **dict.fromkeys(("aten::layer_norm", "aten::batch_norm"), lambda inputs, outputs: 2 * _numel(outputs)),
    **dict.fromkeys(("aten::relu", "aten::relu_"), lambda inputs, outputs: _numel(outputs)),
    **dict.fromkeys((*_ATTENTION, "aten::matmul", "aten::einsum"), lambda inputs, outputs: 0),
}


def _macs(model: nn.Module, image: torch.Tensor, handlers: Mapping[str, Callable] = MappingProxyType({})) -> float:
    """Multiply-accumulates of one forward pass; RuntimeError for an unknown operator."""
    total, unknown = _traced(model, image, handlers)
    if unknown:
        raise RuntimeError(f"operators {unknown} were not counted: add a handler, or list them in _NO_PRODUCT")
    return total


def _traced(model: nn.Module, image: torch.Tensor, handlers: Mapping[str, Callable]) -> tuple[float, list[str]]:
    """Multiply-accumulates of one forward pass, and the operators that are not among them and may contain matrix products.
    ``handlers``: of operators that are counted otherwise than in full."""
    from fvcore.nn import FlopCountAnalysis

    logging.getLogger("fvcore.nn.jit_analysis").setLevel(logging.ERROR)
    analysis = FlopCountAnalysis(model, image)
    analysis.set_op_handle(**{**_ATTENTION, **handlers})
    analysis.unsupported_ops_warnings(False).uncalled_modules_warnings(False).tracer_warnings("none")
    total = analysis.total()
    return total, sorted(op for op in analysis.unsupported_ops() if op.removeprefix("aten::") not in _NO_PRODUCT)
