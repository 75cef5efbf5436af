"""Write a page about a run: its result, curves, speed and story, what it confuses, its config and checkpoints. Or compare several
runs, or put a table of a paper beside our results.

    pervit report runs/pervit_t
    pervit report runs/pervit_t --data data/imagenet --output pervit_t.html
    pervit report runs/pervit_t runs/pervit_t_1 runs/deit_t --output comparison.html
    pervit report --table pervit_table1 runs --format latex --output table1.tex

The page is one file that opens without a network. The run may still be training, and its folder may be incomplete: the page shows
what is there and says what is missing. For the sections about mistakes and about the inside of the model, run first:

    pervit evaluate --checkpoint RUN --data DATA --predictions RUN/predictions.parquet
    pervit analyze RUN --data DATA --output RUN/analysis

With several runs, or a folder that holds some, the page compares them. --table list lists the papers' tables; some also take files
that `evaluate --json` or `throughput --json` has written, beside the runs.
"""

import argparse
import sys
from pathlib import Path

from pipeline.command_line import begins_anew, command_parser, run_command
from pipeline.errors import UserError
from pipeline.files import check_writable, replace_text
from pipeline.stores.place import place_argument
from pipeline.terminal import Stage


@begins_anew
def main() -> int:
    parser = command_parser("pipeline.report", __doc__)
    add = parser.add_argument
    add("runs", type=place_argument, nargs="*", metavar="RUN", help="a run's output_dir, or a folder that holds several")
    default = "default: report.html; for --table in a format other than html, the terminal"
    add("--output", type=Path, metavar="FILE", help=default)
    add("--table", metavar="TABLE", help="a table of a paper, such as pervit_table1; list: all of them")
    add("--format", choices=("html", "markdown", "latex", "csv"), default="html", help="format of --table (default: html)")
    any_data = "with --table: also list, separately, runs of a row's switches on other data, of another size or recipe"
    add("--any-data", action="store_true", help=any_data)
    predictions = "table from pervit evaluate --predictions (default: RUN/predictions.parquet, .jsonl or .csv)"
    add("--predictions", type=Path, metavar="FILE", help=predictions)
    data = "shards or folder that the pictures come from (default: the run's data.path)"
    add("--data", type=place_argument, metavar="DIR", help=data)
    add("--analysis", type=Path, metavar="DIR", help="folder from pipeline.analyze (default: RUN/analysis)")
    args = parser.parse_args()
    if args.table == "list":
        from pipeline.reports.papers import list_tables

        print(list_tables())
        return 0
    if not args.runs and args.table is None:
        raise UserError("a report requires at least one run, got none", "pass the output_dir of a run, or --table")
    if args.table is None and (args.format != "html" or args.any_data):
        raise UserError("--format and --any-data require --table, got none", "pass --table, or drop them")
    if args.table is not None:
        _refuse_options_of_one_run(args, "--table is given")
    elif len(args.runs) > 1:
        _refuse_options_of_one_run(args, f"{len(args.runs)} paths are given")
    from pipeline.checkpoint.bucket import fetched

    args.runs = [fetched(run, weights=False) for run in args.runs]
    output = args.output or (Path("report.html") if args.table is None or args.format == "html" else None)
    check_writable(output)
    with Stage(f"making {output}" if output else "reading the runs"):
        text, lost = _text(args)
    if output is None:
        print(text, end="")
        return 0
    replace_text(output, text)
    size = len(text.encode())
    print(f"{output}: {size / 1e6:.1f} MB" if size >= 1e5 else f"{output}: {size / 1e3:.1f} kB")
    for path in lost:
        print(f"warning: {path} is left out: the page says why", file=sys.stderr)
    return 1 if lost else 0


def _text(args: argparse.Namespace) -> tuple[str, list[Path]]:
    """What is to be written, and which runs it lacks."""
    if args.table is not None:
        from pipeline.reports.table_formats import paper_table

        return paper_table(args.table, args.runs, args.format, args.any_data), []
    from pipeline.runs.folder import find_runs, is_run, read_run

    run = args.runs[0]
    if len(args.runs) == 1 and (is_run(run) or not find_runs([run])[0]):  # a folder without runs has a sentence of its own
        from pipeline.reports.run_page import run_page

        return run_page(read_run(run), args.predictions, args.data, args.analysis), []
    _refuse_options_of_one_run(args, f"{run} holds several")
    from pipeline.reports.comparison_page import comparison_page

    return comparison_page(args.runs)


def _refuse_options_of_one_run(args: argparse.Namespace, found: str) -> None:
    for name in ("predictions", "data", "analysis"):
        if getattr(args, name) is not None:
            raise UserError(f"--{name} requires one run, but {found}", "pass one run, or drop it")


if __name__ == "__main__":
    run_command(main)
