"""Measure this code on the CUDA GPUs of this machine, in at most 8 minutes, without network.

    python -m benchmarks.gpu --output gpu.jsonl
    python -m benchmarks.gpu --only attention,steps_t --minutes 3

Prints Markdown tables for docs/results/. Every stage is a process with a time limit; one that fails is a row with its
reason, and the others go on. --output has each row as soon as it is measured. Data are generated, or made of the images in
PERVIT_IMAGENET_SAMPLES, a folder <class>/*.JPEG. Features that the code does not have yet are reported as not there.
"""

from __future__ import annotations

import argparse
import json
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.gpu.report import markdown
from benchmarks.gpu.stages import BY_NAME, MINUTES, STAGES, Stage
from pipeline.command_line import command_parser, run_command
from pipeline.errors import UserError
from pipeline.files import check_writable

_TOO_SHORT = 3.0  # seconds in which no stage even starts
_PATIENCE = 20.0  # in miniature it is not a measurement, and the machine may be slow


def arguments() -> argparse.Namespace:
    parser = command_parser("benchmarks.gpu", __doc__)
    parser.add_argument("--output", type=Path, metavar="FILE", help="append the rows to this file as lines of JSON")
    parser.add_argument("--only", metavar="STAGE,...", help=f"of {', '.join(BY_NAME)}; what they read is measured too")
    parser.add_argument("--minutes", type=float, default=MINUTES, help="for all; stages get their share (default: %(default)g)")
    parser.add_argument("--work", type=Path, metavar="DIR", help="keep data and logs of the stages here (default: removed)")
    parser.add_argument("--miniature", action="store_true", help="the whole path in small on a CPU, to see that it runs")
    return parser.parse_args()


def chosen(only: str | None) -> list[Stage]:
    """The stages asked for and those they need, in the order of all.

    Raises:
        UserError: there is no such stage.
    """
    names = only.split(",") if only else list(BY_NAME)
    for name in names:
        if name not in BY_NAME:
            raise UserError(f"--only must name some of {', '.join(BY_NAME)}, got {name!r}", "correct it")
    names += [needed for name in names if (needed := BY_NAME[name].needs)]
    return [stage for stage in STAGES if stage.name in names]


def measured(stages: list[Stage], work: Path, miniature: bool, minutes: float) -> Iterator[dict[str, Any]]:
    """Rows of all stages, as they come."""
    from benchmarks.gpu.runner import run_stage

    began = time.monotonic()
    if miniature:
        minutes *= _PATIENCE
    for stage in stages:
        left = 60 * minutes - (time.monotonic() - began)
        seconds = min(left, stage.seconds * minutes / MINUTES)
        what = {"stage": stage.name, "case": stage.name}
        if seconds < _TOO_SHORT:
            yield {**what, "values": {"skipped": f"no time is left of {minutes:g} minutes"}}
            continue
        try:
            for line in run_stage(stage, work, miniature, seconds):
                row = json.loads(line)
                yield {"stage": stage.name, "case": row["case"] or stage.name, "values": row["values"]}
        except (TimeoutError, ChildProcessError) as error:
            yield {**what, "values": {"failed": str(error)}}


def main() -> int:
    args = arguments()
    stages = chosen(args.only)
    if not args.minutes > 0:
        raise UserError(f"--minutes must be above 0, got {args.minutes:g}", "correct it")
    if args.output:
        check_writable(args.output)
    if not args.miniature:
        import torch

        if not torch.cuda.is_available():
            raise UserError(
                f"this requires a CUDA GPU, and PyTorch {torch.__version__} finds none",
                "run this where there is one, or with --miniature",
            )
    work = Path(args.work or tempfile.mkdtemp(prefix="pervit-gpu-")).absolute()
    work.mkdir(parents=True, exist_ok=True)
    for number in (signal.SIGTERM, signal.SIGHUP):  # as Ctrl-C: end the stage, print what there is
        signal.signal(number, lambda received, frame: signal.raise_signal(signal.SIGINT))
    rows: list[dict[str, Any]] = []
    try:
        for row in measured(stages, work, args.miniature, args.minutes):
            rows.append(row)
            print(f"{row['stage']}: {row['case']}: {json.dumps(row['values'])}", file=sys.stderr, flush=True)
            if args.output:
                with open(args.output, "a") as file:
                    print(json.dumps(row), file=file)
    except KeyboardInterrupt:
        print("stopped by a signal; what was measured:", file=sys.stderr)
    finally:
        if not args.work:
            shutil.rmtree(work, ignore_errors=True)
    print(markdown(rows))
    return 1 if any("failed" in row["values"] for row in rows) else 0


if __name__ == "__main__":
    run_command(main)
