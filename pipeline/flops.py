"""Count parameters and multiply-accumulates of models: GMACs, counted by fvcore, beside the papers' figures.

  pervit flops pervit_t pervit_s pervit_m
  pervit flops deit_s --image-size 384 --json FILE
  pervit flops deit_t --switch relative_position=true
  pervit flops timm:swin_tiny_patch4_window7_224

GMACs are those of one image: "modules" as the papers count, "+ attention" in full, "Φp" once per forward pass.
"""

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from pipeline import models
from pipeline.command_line import begins_anew, command_parser, run_command
from pipeline.files import check_writable, write_json
from pipeline.terminal import Stage

if TYPE_CHECKING:
    from pipeline.models.flops import FlopRow


def table(rows: "list[FlopRow]") -> str:
    """Format the rows as an aligned table with the papers' figures and the relative differences."""
    lines = [
        f"{'model':<14} {'size':>5} {'params':>12} {'paper M':>8} {'diff':>7} {'Φp share':>9} "
        f"{'GMACs modules':>14} {'paper':>6} {'diff':>7} {'GMACs + attention':>18} {'Φp GMACs, once':>15}"
    ]
    for row in rows:
        native = row.image_size == models.model_entry(row.name).image_size and not row.switches
        paper_gmacs = row.paper_gmacs if native else None  # the paper's figure is for this size
        paper_params = None if row.switches else row.paper_params_m
        lines.append(
            f"{row.name:<14} {row.image_size:>5} {row.params:>12,} {_figure(paper_params):>8} "
            f"{_difference(row.params / 1e6, paper_params):>7} {row.params_phi / row.params:>9.2%} "
            f"{row.gmacs_modules:>14.3f} {_figure(paper_gmacs):>6} {_difference(row.gmacs_modules, paper_gmacs):>7} "
            f"{row.gmacs:>18.3f} {row.gmacs_phi:>15.3f}"
        )
    return "\n".join(lines)


def _figure(value: float | None) -> str:
    return "" if value is None else f"{value:.1f}"


def _difference(ours: float, papers: float | None) -> str:
    return "" if papers is None else f"{100 * (ours / papers - 1):+.1f}%"


_NOTES = """
modules: the papers' convention, which omits the matrix products of attention. + attention: the full cost of one image (fvcore).
Φp: once per forward pass, shared by the batch. The authors' code takes 1.710 / 6.726 / 15.047 GMACs for T / S / M: its first
convolution runs over 4 x heads scaled copies of one distance map; ours sums the scaled kernels and convolves that map once."""


@begins_anew
def main() -> None:
    parser = command_parser("pipeline.flops", __doc__)
    parser.add_argument("models", nargs="*", metavar="MODEL", help="default: all models")
    parser.add_argument("--image-size", type=int, help="in pixels (default: that of the model's paper)")
    said = "a switch of the models, as model.switches; repeatable"
    parser.add_argument("--switch", action="append", default=[], metavar="NAME=VALUE", help=said)
    parser.add_argument("--json", type=Path, help="also write the rows to this file")
    args = parser.parse_args()
    check_writable(args.json)
    from pipeline.config.values import parse_switches

    switches = parse_switches(args.switch)
    with Stage("loading PyTorch and counting"):
        from pipeline.models.flops import count  # imported late: PyTorch takes seconds, and --help does not need it

        rows = [count(name, args.image_size, switches=switches) for name in args.models or models.list_models()]
    print(table(rows))
    print(*(sentence for row in rows for sentence in row.remarks()), _NOTES, sep="\n")
    write_json(args.json, [asdict(row) for row in rows])


if __name__ == "__main__":
    run_command(main)
