"""Which models there are, and which switches (a config's model.switches.NAME) one has.

  python -m pipeline.models
  python -m pipeline.models pervit_t --gmacs

Multiply-accumulates are counted on request, as python -m pipeline.flops does: it runs every model once, which takes minutes.
"""

from __future__ import annotations

import json
from types import NoneType, UnionType
from typing import TYPE_CHECKING, Annotated, Any, Literal, NoReturn, Union, get_args, get_origin

from pipeline import models
from pipeline.command_line import command_parser
from pipeline.errors import run_command

if TYPE_CHECKING:
    from pipeline.models.registry import ModelEntry


def parameter_count(entry: ModelEntry) -> int:
    """Parameters at the paper's image size, without allocating any."""
    import torch  # here, as --help does not wait for it

    with torch.device("meta"):
        model = models.create_model(entry.name, num_classes=entry.num_classes, image_size=entry.image_size)
    return sum(parameter.numel() for parameter in model.parameters())


def gmacs_text(entry: ModelEntry) -> str:
    """Both counts and the paper's: "1.556 1.752 (1.6)"."""
    from pipeline.flops import count_at  # imports fvcore, which the plain list does not wait for

    row = count_at(entry.name)
    return f"{row.gmacs_modules:>9.3f} {row.gmacs:>9.3f} {_in_brackets(entry.paper_gmacs):>7}"


def overview(with_gmacs: bool) -> str:
    """A line for each registered model."""
    gmacs_header = f"{'GMACs':>9} {'attention':>9} {'(paper)':>7}  " if with_gmacs else ""
    lines = [f"{'model':<18} {'parameters':>12} {'(paper)':>8} {'pixels':>6} {'classes':>7}  {gmacs_header}what and from where"]
    for name in models.list_models():
        entry = models.model_entry(name)
        gmacs = gmacs_text(entry) + "  " if with_gmacs else ""
        lines.append(
            f"{name:<18} {parameter_count(entry):>12,} {_in_brackets(entry.paper_params_m, 'M'):>8} {entry.image_size:>6} "
            f"{entry.num_classes:>7}  {gmacs}{entry.description}; {entry.paper}"
        )
    if with_gmacs:
        lines.append("\nGMACs: modules, as the papers count. attention: with attention's products, all that one image costs.")
    return "\n".join(lines)


def details(name: str, with_gmacs: bool) -> str:
    """What is known of one model, and its switches as a config sets them.

    Raises:
        UserError: unknown name.
    """
    entry = models.model_entry(name)
    top1 = "" if entry.paper_top1 is None else f"; the paper's top-1 is {entry.paper_top1} %"
    lines = [
        f"{name}: {entry.description}",
        entry.paper,
        f"{parameter_count(entry):,} parameters at {entry.image_size} pixels and {entry.num_classes} classes{top1}",
    ]
    if with_gmacs:
        lines.append(f"GMACs of the modules, with attention, (paper): {gmacs_text(entry)}")
    fields = entry.switches.model_fields
    lines += ["", "Switches, set with model.switches.NAME=VALUE:" if fields else "No switches."]
    for switch, field in fields.items():
        lines += [f"  {switch} = {json.dumps(field.default)}    ({type_text(field.annotation)})", f"      {field.description}"]
    return "\n".join(lines)


def type_text(annotation: Any) -> str:
    """A switch's type as one writes its values in YAML: ``bool``, ``1 | 2``, ``[int, int] | null``."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Literal:
        return " | ".join(map(str, arguments))
    if origin is Annotated:
        return type_text(arguments[0])
    if origin in (Union, UnionType):
        return " | ".join(map(type_text, arguments))
    if origin is tuple:
        return f"[{', '.join(map(type_text, arguments))}]"
    return "null" if annotation is NoneType else annotation.__name__


def _in_brackets(figure: float | None, unit: str = "") -> str:
    return "" if figure is None else f"({figure:g}{unit})"


def main() -> None:
    parser = command_parser("pipeline.models", __doc__)
    parser.add_argument("model", nargs="?", help="show this one's switches")
    parser.add_argument("--gmacs", action="store_true", help="count multiply-accumulates too (slow)")
    args = parser.parse_args()
    print(overview(args.gmacs) if args.model is None else details(args.model, args.gmacs))


def command() -> NoReturn:
    """``python -m pipeline.models``."""
    run_command(main)


if __name__ == "__main__":
    command()
