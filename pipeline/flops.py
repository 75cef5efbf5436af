"""Parameters and multiply-accumulates (GMACs = 1e9) of the models, counted by fvcore.

  python -m pipeline.flops pervit_t pervit_s pervit_m
  python -m pipeline.flops deit_s --image-size 384 --json FILE

Three numbers per model, since each answers another question. ``gmacs_modules`` is what the papers print: they counted
modules, so the products inside attention are missing. ``gmacs`` is everything one image costs. ``gmacs_phi`` is the
position encoding Φp, which depends on weights alone: a training step pays it once per forward pass, whatever the batch.
"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NoReturn

from pipeline import models
from pipeline.command_line import command_parser
from pipeline.errors import check_writable, run_command

if TYPE_CHECKING:  # what takes seconds to import is imported where it is used: --help does not wait for it
    import torch
    from torch import nn

# Operators known to multiply no matrices. One that fvcore has no handler for and that is not here makes the count fail.
_NO_PRODUCT = frozenset(
    "add add_ sub sub_ rsub lerp mul mul_ div div_ neg pow sqrt exp log log_sigmoid sigmoid gelu relu relu_ silu tanh softmax sum mean "
    "clone copy_ detach to type_as contiguous view reshape flatten unflatten transpose permute t unsqueeze squeeze expand expand_as "
    "reciprocal repeat cat stack split chunk unbind select slice index gather pad constant_pad_nd constant full zeros ones zeros_like ones_like "
    "empty eye arange linspace masked_fill where lt le gt ge eq ne clamp max min abs batch_norm layer_norm instance_norm group_norm "
    "dropout dropout_ roll max_pool2d avg_pool2d adaptive_avg_pool1d adaptive_avg_pool2d feature_alpha_dropout "
    "size numel".split()
)


@dataclass(frozen=True)
class FlopRow:
    """Counts of one model at one image size."""

    name: str
    image_size: int
    params: int
    params_phi: int
    gmacs_modules: float
    gmacs: float
    gmacs_phi: float
    paper_params_m: float | None
    paper_gmacs: float | None  # at the paper's image size

    def training_flops_per_image(self, micro_batch_size: int) -> float:
        """Floating-point operations (2 per multiply-accumulate) of forward and backward pass (twice the forward).

        Recomputed activations are not model FLOPs and are not counted (Chowdhery et al., "PaLM", 2022, App. B).
        """
        return 6e9 * (self.gmacs + self.gmacs_phi / micro_batch_size)


def count(
    name: str, image_size: int = 224, num_classes: int = 1000, switches: Mapping[str, Any] = MappingProxyType({})
) -> FlopRow:
    """Count a model on one image.

    Raises:
        UserError: unknown model or unsuitable size.
        RuntimeError: an operator that may multiply matrices went uncounted.
    """
    import torch

    entry = models.model_entry(name)
    model = models.create_model(name, num_classes=num_classes, image_size=image_size, switches=switches).eval()
    image = torch.zeros(1, 3, image_size, image_size)
    with torch.no_grad():
        model(image)  # fills the cache of Φp, so that the traces below do not contain it
        modules = _macs(model, image, MODULE_CONVENTION)
        per_image = _macs(model, image)
    with_phi = _macs(model, image)  # with gradients Φp is not cached
    return FlopRow(
        name=name,
        image_size=image_size,
        params=sum(p.numel() for p in model.parameters()),
        params_phi=sum(p.numel() for p in model.phi_parameters()) if hasattr(model, "phi_parameters") else 0,
        gmacs_modules=modules / 1e9,
        gmacs=per_image / 1e9,
        gmacs_phi=(with_phi - per_image) / 1e9,
        paper_params_m=entry.paper_params_m,
        paper_gmacs=entry.paper_gmacs,
    )


def count_at(name: str, image_size: int | None = None) -> FlopRow:
    """:func:`count` for the classes and, unless another is given, the image size of the model's paper."""
    entry = models.model_entry(name)
    return count(name, image_size or entry.image_size, entry.num_classes)


def _attention_macs(inputs: list, outputs: list) -> float:
    """q kᵀ and (weights) v of fused attention, which fvcore does not know."""
    (batch, heads, queries, width), (_, _, keys, value_width) = inputs[0].type().sizes(), inputs[2].type().sizes()
    return batch * heads * queries * keys * (width + value_width)


def _conv_and_bias(inputs: list, outputs: list) -> float:
    from fvcore.nn.jit_handles import conv_flop_jit

    has_bias = inputs[2].type().kind() == "TensorType"
    return conv_flop_jit(inputs, outputs)["conv"] + has_bias * _numel(outputs)


def _numel(values: list) -> int:
    return math.prod(values[0].type().sizes())


# The papers' figures count modules with hooks (the convention of ptflops): linear layers, convolutions with their bias,
# two per element for norms, one for ReLU. Derived from the published counts of PerViT and ConViT, which it reproduces.
MODULE_CONVENTION = {
    "aten::_convolution": _conv_and_bias,
    "aten::layer_norm": lambda inputs, outputs: 2 * _numel(outputs),
    "aten::batch_norm": lambda inputs, outputs: 2 * _numel(outputs),
    "aten::relu": lambda inputs, outputs: _numel(outputs),
    "aten::relu_": lambda inputs, outputs: _numel(outputs),
    "aten::scaled_dot_product_attention": lambda inputs, outputs: 0,
    "aten::matmul": lambda inputs, outputs: 0,
    "aten::einsum": lambda inputs, outputs: 0,
}


def _macs(model: nn.Module, image: torch.Tensor, handlers: dict[str, Callable] = MappingProxyType({})) -> float:
    """Multiply-accumulates of one forward pass.

    Raises:
        RuntimeError: an operator that may multiply matrices was not counted.
    """
    from fvcore.nn import FlopCountAnalysis

    logging.getLogger("fvcore.nn.jit_analysis").setLevel(logging.ERROR)
    analysis = FlopCountAnalysis(model, image)
    analysis.set_op_handle(**{"aten::scaled_dot_product_attention": _attention_macs, **handlers})
    analysis.unsupported_ops_warnings(False).uncalled_modules_warnings(False).tracer_warnings("none")
    total = analysis.total()
    unknown = sorted(op for op in analysis.unsupported_ops() if op.removeprefix("aten::") not in _NO_PRODUCT)
    if unknown:
        raise RuntimeError(
            f"operators {unknown} were not counted: give them a handler, or add them to _NO_PRODUCT if they multiply no matrices"
        )
    return total


def table(rows: list[FlopRow]) -> str:
    """Aligned text, the papers' figures and the difference beside ours."""
    lines = [
        f"{'model':<14} {'size':>5} {'params':>12} {'paper M':>8} {'diff':>7} {'Φp share':>9} "
        f"{'GMACs modules':>14} {'paper':>6} {'diff':>7} {'GMACs + attention':>18} {'Φp GMACs, once':>15}"
    ]
    for row in rows:
        native = row.image_size == models.model_entry(row.name).image_size  # the size that the paper's figure is for
        paper_gmacs = row.paper_gmacs if native else None
        lines.append(
            f"{row.name:<14} {row.image_size:>5} {row.params:>12,} {_figure(row.paper_params_m):>8} "
            f"{_difference(row.params / 1e6, row.paper_params_m):>7} {row.params_phi / row.params:>9.2%} "
            f"{row.gmacs_modules:>14.3f} {_figure(paper_gmacs):>6} {_difference(row.gmacs_modules, paper_gmacs):>7} "
            f"{row.gmacs:>18.3f} {row.gmacs_phi:>15.3f}"
        )
    return "\n".join(lines)


def _figure(value: float | None) -> str:
    return "" if value is None else f"{value:.1f}"


def _difference(ours: float, papers: float | None) -> str:
    return "" if papers is None else f"{100 * (ours / papers - 1):+.1f}%"


_NOTES = """
modules: the papers' convention, attention's products left out. + attention: all that one image costs (fvcore).
Φp: once per forward pass, shared by the batch. The authors' code needs 1.710 / 6.726 / 15.047 for T / S / M: its first
convolution runs over 4 x heads maps that are one distance map times a number; ours sums the kernels and runs over one."""


def main() -> None:
    parser = command_parser("pipeline.flops", __doc__)
    parser.add_argument("models", nargs="*", metavar="MODEL", help="default: all of them")
    parser.add_argument("--image-size", type=int, help="pixels (default: each model's own, which its paper's figures are for)")
    parser.add_argument("--json", type=Path, help="also write the rows to this file")
    args = parser.parse_args()
    if args.json:
        check_writable(args.json)
    rows = [count_at(name, args.image_size) for name in args.models or models.list_models()]
    print(table(rows))
    print(_NOTES)
    if args.json:
        args.json.write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n")


def command() -> NoReturn:
    """``python -m pipeline.flops``."""
    run_command(main)


if __name__ == "__main__":
    command()
