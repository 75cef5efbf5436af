"""Measure this code on the CUDA GPUs of this machine, without network: 25 minutes, the most valuable first.

    python -m benchmarks.gpu --output gpu-check.json
    python -m benchmarks.gpu --only step,attention --minutes 5

Prints each row when it is there, and tables at the end, when time is up or after Ctrl-C. Each case is a process with a time limit: one that
crashes or hangs is a row with its reason, and the others go on. --output is a record that is complete after each row, to be sent as
benchmarks/gpu_ledger/README.md says. Images are generated, or those in PERVIT_IMAGENET_SAMPLES, a folder <class>/*.JPEG.
"""

from __future__ import annotations

import argparse
import shutil
import signal
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import NoReturn

from benchmarks.gpu.cases import MINUTES, TITLES, Case, cases
from benchmarks.gpu.common import Context, Values
from benchmarks.gpu.record import Record
from benchmarks.gpu.report import in_a_line, tables
from benchmarks.gpu.runner import run_case
from pipeline.command_line import command_parser, run_command
from pipeline.errors import UserError
from pipeline.files import check_writable

_TOO_SHORT = 15.0  # seconds in which no case comes to its figures
_KEPT = 0.3  # of the time beyond ten minutes, for the tests
_BEFORE = 600.0  # seconds
_NEEDED = ("machine", "data", "decode")  # what others read
_STAGES = [name for name in TITLES if name != "kernel"]  # whose rows come with those of steps


def arguments() -> argparse.Namespace:
    parser = command_parser("benchmarks.gpu", __doc__)
    parser.add_argument("--output", type=Path, metavar="FILE", help="write the record here, anew after each row")
    parser.add_argument("--only", metavar="STAGE,...", help=f"of {', '.join(_STAGES)}; what they read is measured too")
    parser.add_argument(
        "--minutes", type=float, default=MINUTES, help="for all; with more, cases have more as well (default: %(default)g)"
    )
    parser.add_argument("--work", type=Path, metavar="DIR", help="keep data and logs here (default: removed)")
    parser.add_argument("--miniature", action="store_true", help="the whole path in small on a CPU, to see that it runs")
    return parser.parse_args()


def chosen(only: str | None, miniature: bool) -> list[Case]:
    """The cases of the stages asked for and of those they need.

    Raises:
        UserError: there is no such stage.
    """
    names = only.split(",") if only else _STAGES
    for name in names:
        if name not in _STAGES:
            raise UserError(f"--only must name some of {', '.join(_STAGES)}, got {name!r}", "correct it")
    found = [case for case in cases(miniature) if case.stage in names or case.stage in _NEEDED]
    needs_data = any(case.needs_data for case in found if case.stage in names)
    return [case for case in found if case.stage in names or case.stage == "machine" or needs_data]


def measured(chosen: list[Case], context: Context, seconds: float) -> Iterator[Values]:
    """Rows of all cases, as they come."""
    began = time.monotonic()
    for case in chosen:
        kept = 0.0 if case.is_test or not any(each.is_test for each in chosen) else _KEPT * max(0.0, seconds - _BEFORE)
        left = seconds - kept - (time.monotonic() - began)
        processes = context.gpus or (2 if context.miniature else 1)
        skipped = "no time was left" if left < _TOO_SHORT else "needs two GPUs" if case.all_gpus and processes < 2 else None
        if skipped:
            yield {"stage": case.stage, "case": case.name, **case.options, "skipped": skipped}
            continue
        limit = case.seconds * max(1.0, seconds / 60 / MINUTES)
        for row in run_case(case, context, processes if case.all_gpus else 1, min(left, limit)):
            if "gpu" in row:
                context = replace(context, gpus=row["gpu"]["count"])
            if case.stage == "decode":
                context = replace(context, decode=row.get("decodes", None if "note" in row else "cpu"))
            yield row


def main() -> int:
    args = arguments()
    stages = chosen(args.only, args.miniature)
    if not args.minutes > 0:
        raise UserError(f"--minutes must be above 0, got {args.minutes:g}", "correct it")
    if args.output:
        check_writable(args.output)
    work = Path(args.work or tempfile.mkdtemp(prefix="pervit-gpu-")).absolute()
    work.mkdir(parents=True, exist_ok=True)
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
        if number == signal.SIGTERM or signal.getsignal(number) != signal.SIG_IGN:  # nohup, and shells in the background
            signal.signal(number, _stop)
    record, began, stopped = Record(args.output), time.monotonic(), False
    try:
        for row in measured(stages, Context("", {}, work, args.miniature, 0, None), 60 * args.minutes):
            print(f"[{time.monotonic() - began:4.0f} s] {in_a_line(record.add(row))}", flush=True)
            if row["stage"] == "machine" and row.get("failed", "").endswith("finds no CUDA GPU"):
                raise UserError(
                    f"this requires a CUDA GPU: {row['failed']}", "run this where there is one, or with --miniature"
                )
    except KeyboardInterrupt:
        stopped = True
    finally:
        for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
            signal.signal(number, signal.SIG_IGN)
        if not args.work:
            shutil.rmtree(work, ignore_errors=True)
    print(("\nstopped by a signal; what was measured:" if stopped else "") + f"\n\n{tables(record.content)}", flush=True)
    if args.output:
        print(f"{args.output}: the record of these figures; benchmarks/gpu_ledger/README.md says how to send it")
    return 130 if stopped else 1 if any("failed" in row for row in record.rows) else 0


def _stop(number: int, frame: FrameType | None) -> NoReturn:
    raise KeyboardInterrupt


if __name__ == "__main__":
    run_command(main)
