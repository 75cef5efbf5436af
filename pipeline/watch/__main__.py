"""Watch a run in a terminal: progress, loss, speed, evaluations, trouble. It only reads the run's files, from any machine that sees them.

    pervit watch runs/pervit_t
    pervit watch runs/seed_0 runs/seed_1 runs/seed_2
    pervit watch runs/pervit_t --once

Without --once, it waits for a run that has not started yet. Press q or Ctrl-C to quit; the run is not affected.
"""

import os
import select
import sys
import termios
import time
import tty
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

from pipeline.checkpoint.bucket import fetched
from pipeline.command_line import command_parser, run_command
from pipeline.errors import UserError, missing_extra
from pipeline.stores.place import place_argument

_REFRESH = 1.0  # seconds
_COPY = 10.0  # seconds between two copies of what has changed in a store


def main() -> None:
    parser = command_parser("pipeline.watch", __doc__)
    several = "a run's output_dir; several runs are shown one per line"
    parser.add_argument("runs", nargs="+", type=place_argument, metavar="RUN", help=several)
    parser.add_argument("--once", action="store_true", help="print the current state, as without a terminal, and exit")
    args = parser.parse_args()
    paths = [fetched(run, weights=False) for run in args.runs]
    for path in paths:
        if path.exists() and not path.is_dir():
            raise UserError(f"{path} must be a run folder, got a file", "pass a run's output_dir")
    try:
        from rich.console import Console
        from rich.live import Live
    except ImportError as error:
        raise missing_extra("pipeline.watch", "Rich", "insight", error=error) from None
    from pipeline.watch import screen

    console, runs, copied = Console(), [screen.LiveRun(path) for path in paths], time.monotonic()

    def now() -> Any:
        nonlocal copied
        if time.monotonic() - copied > _COPY:
            with suppress(UserError, OSError):  # a store that is away: what was copied stays
                for source in args.runs:
                    fetched(source, weights=False)
            copied = time.monotonic()
        for run in runs:
            run.look()
        return screen.page(runs[0], console) if len(runs) == 1 else screen.table(runs)

    stays = not args.once and console.is_terminal
    if not stays and not any(path.exists() for path in paths):
        names = " and ".join(f"{path}" for path in paths)
        missing = f"{names} {'does' if len(args.runs) == 1 else 'do'} not exist"
        raise UserError(missing, "correct the name, or wait until the run has begun")
    if stays:
        with _keys() as pressed, Live(console=console, screen=True, auto_refresh=False) as live, suppress(KeyboardInterrupt):
            while True:
                live.update(now(), refresh=True)
                if pressed(_REFRESH) in ("q", "Q"):
                    break
    console.print(now())  # stays when the page is gone


@contextmanager
def _keys() -> Iterator:
    """A function that waits some seconds for a key and returns it, or nothing. Keys are not echoed meanwhile."""
    if not sys.stdin.isatty():
        yield time.sleep
        return
    terminal = sys.stdin.fileno()
    before = termios.tcgetattr(terminal)

    def pressed(seconds: float) -> str:
        there, _, _ = select.select([terminal], [], [], seconds)
        return os.read(terminal, 1).decode(errors="replace") if there else ""

    try:
        tty.setcbreak(terminal)
        yield pressed
    finally:
        termios.tcsetattr(terminal, termios.TCSADRAIN, before)


if __name__ == "__main__":
    run_command(main)
