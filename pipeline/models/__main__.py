"""List the models, or the ablation switches of one: model.switches.NAME in a config.

  pervit models
  pervit models pervit_t
  pervit models timm:swin_tiny_patch4_window7_224

Multiply-accumulates: pervit flops MODEL [--switch NAME=VALUE].
"""

import json
import sys
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pipeline import models
from pipeline.command_line import command_parser, run_command
from pipeline.models.registry import import_path, installed_models, parameter_count
from pipeline.models.timm.names import is_timm
from pipeline.terminal import fitted


def overview() -> str:
    """A table with one line per registered model."""
    lines = [f"{'model':<18} {'parameters':>12} {'(paper)':>8} {'pixels':>6} {'classes':>7}  what and from where"]
    for name in models.list_models():
        entry = models.model_entry(name)
        published = "" if entry.paper_params_m is None else f"({entry.paper_params_m:g}M)"
        count = parameter_count(name, entry.num_classes, entry.image_size)
        figures = f"{count:>12,} {published:>8} {entry.image_size:>6} {entry.num_classes:>7}"
        lines.append(f"{name:<18} {figures}  {entry.description}; {entry.paper}")
    return "\n".join([*lines, *(f"{name:<18} {path}, of an installed package" for name, path in installed_models().items())])


def details(name: str) -> str:
    """Description, paper, parameter count and switches of one model."""
    entry = models.model_entry(name)
    top1 = "" if entry.paper_top1 is None else f"; the paper's top-1 is {entry.paper_top1} %"
    lines = [
        f"{name}: {entry.description}",
        entry.paper,
        f"{parameter_count(name, entry.num_classes, entry.image_size):,} parameters at {entry.image_size} pixels and {entry.num_classes} classes{top1}",
    ]
    if name not in models.list_models() and (path := import_path(name)):
        from pipeline.models.imported import function_of  # imported late, with PyTorch

        taken = [str(each) for each in function_of(path)[1].values()]
        return "\n".join([*lines, "", f"Arguments; model.options sets those that no other key does: {', '.join(taken)}"])
    if is_timm(name):
        from pipeline.models.timm.network import arguments_of  # imported late: timm is an extra

        lines += ["", "Switches, set with model.switches.NAME=VALUE, are arguments of timm.create_model:"]
        for switch, value in arguments_of(name).items():  # some defaults are classes or functions of timm's, or missing
            plain = isinstance(value, bool | int | float | str | tuple | NoneType)
            lines.append(f"  {switch} = {value!r}" if plain else f"  {switch}")
        return "\n".join(lines)
    fields = entry.switches.model_fields
    lines += ["", "Switches, set with model.switches.NAME=VALUE:" if fields else "No switches."]
    for switch, field in fields.items():
        lines += [f"  {switch} = {json.dumps(field.default)}    ({type_text(field.annotation)})", f"      {field.description}"]
    return "\n".join(lines)


def type_text(annotation: Any) -> str:
    """A switch's type in YAML notation: ``bool``, ``1 | 2``, ``[int, int] | null``, ``[int, ...]``."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Literal:
        return " | ".join(map(str, arguments))
    if origin is Annotated:
        return type_text(arguments[0])
    if origin in (Union, UnionType):
        return " | ".join(map(type_text, arguments))
    if origin is tuple:
        return f"[{', '.join(map(type_text, arguments))}]"
    return {NoneType: "null", ...: "..."}.get(annotation) or annotation.__name__


def main() -> None:
    parser = command_parser("pipeline.models", __doc__)
    parser.add_argument("model", nargs="?", help="show this model's switches; also timm:NAME")
    args = parser.parse_args()
    print(fitted(overview() if args.model is None else details(args.model), sys.stdout))


if __name__ == "__main__":
    run_command(main)
