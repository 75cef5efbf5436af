"""Check that a run is what it says it is: compare its records with each other and with its config, and train some steps again.

    pervit audit runs/pervit_t
    pervit audit runs/pervit_t --steps 400,12000 --json audit.json
    pervit audit runs/pervit_t --windows 0

Samples, draws and learning rates are computed again for every step. Of --windows parts of the run, from one checkpoint to the next or
--longest steps, losses, gradient norms, evaluations, weights and optimizer state are: bit for bit on a machine and a number of
processes like the run's, else within bounds (docs/audit.md). The exit code is 1 if anything differs, else 2 if a part could not be trained again.
"""

import argparse
import sys
import tempfile
import time
from dataclasses import asdict
from functools import partial
from pathlib import Path

from pipeline.command_line import begins_anew, command_parser, interrupted_later, run_command
from pipeline.errors import USER_ERROR, UserError, counted
from pipeline.files import check_writable, replace_text, write_json
from pipeline.page import Section, html, join, page, table
from pipeline.runs import CONFIG
from pipeline.stores.place import place_argument
from pipeline.terminal import Stage, paint

_Row = tuple[str, str, str, object]  # what, whether it agrees, what was compared, problems


@begins_anew
def main() -> int:
    parser = command_parser("pipeline.audit", __doc__)
    add = parser.add_argument
    add("run", type=place_argument, metavar="RUN", help="a run's output_dir")
    add("--steps", type=_steps, default=[], metavar="N,N", help="train the windows again that have these steps")
    windows = "train so many windows again, of which all but the last are drawn (default: 2)"
    add("--windows", type=int, default=2, metavar="N", help=windows)
    add("--longest", type=int, default=500, metavar="STEPS", help="length of a window at most (default: 500)")
    add("--processes", type=int, metavar="N", help="train on so many processes (default: as the run did)")
    add("--bounds", action="store_true", help="accept differences within the bounds, as of another kind of CPU")
    add("--data", metavar="DIR", help="shards (default: the run's data.path)")
    add("--work", type=Path, metavar="DIR", help="where to train, in a folder that is removed (default: beside the run)")
    add("--output", type=Path, default=Path("audit.html"), metavar="FILE", help="the page (default: audit.html)")
    add("--json", type=Path, metavar="FILE", help="also write what was compared and what differs")
    args = parser.parse_args()
    for name, least in {"windows": 0, "longest": 1, "processes": 1}.items():
        if (number := getattr(args, name)) is not None and number < least:
            raise UserError(f"--{name} must be at least {least}, got {number}", "correct it")
    check_writable(args.output)
    check_writable(args.json)
    with Stage("loading the libraries"), interrupted_later():
        from pipeline.audit.records import Records
        from pipeline.audit.replay import Replay, choose, compare, train_again
        from pipeline.checkpoint.bucket import fetched
        from pipeline.checkpoint.folder import find_step
        from pipeline.config import load_config
        from pipeline.runs.files import RunFiles
        from pipeline.runs.state import state_of

    run = fetched(args.run)
    find_step(run)  # there is one
    files = RunFiles(run)
    for step in [found.step for found in files.checkpoints if found.manifest]:
        fetched(args.run, step)  # its parts, if the run is in a store
    if (state := state_of(files)).alive:
        raise UserError(f"{run} must be a run that nobody trains, got one that is {state}", "wait for its end")
    records = Records(files, load_config(run / CONFIG, [f"data.path={args.data}"] if args.data else []))
    findings, replays, rows = [], list[Replay](), [list[_Row](), list[_Row]()]  # of the page: of records, of windows
    for finding in records.findings():
        findings.append(finding)
        rows[0].append(_say(finding.name, finding.compared, finding.problems))
    for window in choose(records, args.windows, args.longest, args.steps, args.processes):
        began = time.monotonic()
        replays.append(replay := Replay(window))
        with tempfile.TemporaryDirectory(prefix=".audit-", dir=args.work or run.absolute().parent) as folder:
            try:
                with Stage(f"training {window} again"):
                    again = train_again(records, replay, Path(folder), args.bounds)
                compare(records, again, replay)
            except UserError as error:
                replay.exact, replay.failed = False, str(error)
        replay.seconds = time.monotonic() - began
        rows[1].append(_say(str(window), f"{replay.words()} ({replay.seconds:.0f} s)", replay.problems, bool(replay.failed)))
    differs = [name for part in rows for name, mark, *_ in part if mark == "differs"]
    failed = sum(bool(each.failed) for each in replays)
    loose = sum(not each.exact for each in replays) - failed
    verdict = "what was compared agrees" if failed else "everything agrees"
    verdict = f"{counted(len(differs), 'part')} of the run differ: {', '.join(differs)}" if differs else verdict
    for number, what in ((0 if differs else loose, "only within bounds"), (failed, "not trained again")):
        verdict += f", {number} of {counted(len(replays), 'window')} {what}" * (number > 0)
    parts = {"findings": list(map(asdict, findings)), "replays": list(map(asdict, replays))}
    write_json(args.json, {"run": str(args.run), "agrees": not differs and not failed, **parts})
    head, none = ("what", "", "compared", "differences"), html("<p>No steps were trained again.</p>")
    sections = [Section("Records", table(head, rows[0])), Section("Trained again", table(head, rows[1]) if rows[1] else none)]
    replace_text(args.output, page(f"Audit of {args.run}", f"{state}: {verdict}", sections, plots=False))
    print(f"{run}, {state}: {paint(verdict, 'red' if differs or failed else 'green', sys.stdout)}; the page: {args.output}")
    return 1 if differs else USER_ERROR if failed else 0


def _steps(text: str) -> list[int]:
    try:
        return [int(step) for step in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} are not steps: write numbers with commas") from None


def _say(name: str, compared: str, problems: list[str], failed: bool = False) -> _Row:
    """Print what a part of the run was compared with, and what differs; returns its row of the page."""
    mark = "differs" if problems else "not compared" if failed else "agrees"
    shown = paint(mark, "green" if mark == "agrees" else "red", sys.stdout)
    print(f"{name}: {shown}; {compared}", *(f"  {problem}" for problem in problems), sep="\n", flush=True)
    return name, mark, compared, join(map(partial(html, "<p>{}</p>"), problems))


if __name__ == "__main__":
    run_command(main)
