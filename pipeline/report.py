"""One page about a run: its result, curves, speed and story, what it confuses, its config, its checkpoints.

    python -m pipeline.report runs/pervit_t
    python -m pipeline.report runs/pervit_t --data data/imagenet --output pervit_t.html

The page is one file that opens without a network. The run may be going on, and its folder may be incomplete: the page shows what is
there and says what is missing. ``python -m pipeline.evaluate --predictions RUN/predictions.parquet`` and
``python -m pipeline.analyze RUN --output RUN/analysis`` make what the sections about mistakes and about the model's inside show.
"""

from __future__ import annotations

from pathlib import Path

from pipeline.command_line import command_parser, run_command
from pipeline.files import check_writable, replace_text


def main() -> None:
    parser = command_parser("pipeline.report", __doc__)
    add = parser.add_argument
    add("run", type=Path, metavar="RUN", help="a run's output_dir")
    add("--output", type=Path, default=Path("report.html"), metavar="FILE", help="default: report.html")
    add("--predictions", type=Path, metavar="FILE", help="of pipeline.evaluate (default: RUN/predictions.parquet or .csv)")
    add("--data", type=Path, metavar="DIR", help="shards or folder that the pictures come from (default: the run's data.path)")
    add("--analysis", type=Path, metavar="DIR", help="of pipeline.analyze (default: RUN/analysis)")
    args = parser.parse_args()
    check_writable(args.output)

    from pipeline.reports.run_folder import read_run
    from pipeline.reports.run_page import Sources, run_page

    run = read_run(args.run)
    text = run_page(run, Sources(args.predictions, args.data, args.analysis))
    replace_text(args.output, text)
    print(f"{args.output}: {len(text.encode()) / 1e6:.1f} MB")


def command() -> None:
    """``python -m pipeline.report``."""
    run_command(main)


if __name__ == "__main__":
    command()
