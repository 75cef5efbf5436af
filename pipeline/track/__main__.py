"""Send a run to a tracker while it trains: metrics, events, pictures, the config. It only reads the run's files, from any machine that
sees them.

    pervit track runs/pervit_t --to wandb
    pervit track runs/pervit_t --to mlflow --project my_experiment
    WANDB_MODE=offline pervit track runs/pervit_t --to wandb --once

Waits for a run that has not started yet, and exits when it is finished. It may be stopped or killed at any time: the same command
continues where it stopped. The trackers' own environment variables set the destination and the account; docs/trackers.md has them.
"""

import logging
import signal
from importlib import import_module
from pathlib import Path
from types import FrameType

from pipeline.command_line import command_parser, run_command
from pipeline.errors import UserError, counted
from pipeline.lazy import import_library

_LONGEST = 86_400  # seconds between two looks
TRACKERS = {  # title, and class in ``to_NAME.py``
    "wandb": ("Weights & Biases", "Wandb"),
    "mlflow": ("MLflow", "MLflow"),
    "trackio": ("Trackio", "Trackio"),
}


def main() -> None:
    parser = command_parser("pipeline.track", __doc__)
    parser.add_argument("run", type=Path, metavar="RUN", help="a run's output_dir")
    parser.add_argument("--to", required=True, metavar="TRACKER", help=" or ".join(TRACKERS))
    parser.add_argument("--project", metavar="NAME", help="project or experiment (default: the tracker's variable, or pervit)")
    parser.add_argument("--name", help="what to call the run there (default: the folder's name)")
    parser.add_argument("--once", action="store_true", help="send what is there now, and exit")
    every = "how often to look for new data (default: 10)"
    parser.add_argument("--every", type=float, default=10.0, metavar="SECONDS", help=every)
    args = parser.parse_args()
    if args.to not in TRACKERS:
        raise UserError(f"--to must be one of {', '.join(TRACKERS)}, got {args.to!r}", "choose one")
    if not 0 < args.every <= _LONGEST:
        raise UserError(f"--every must be above 0 and at most {_LONGEST} seconds (a day), got {args.every:g}", "correct it")
    if args.run.exists() and not args.run.is_dir():
        raise UserError(f"{args.run} must be a run folder, got a file", "pass a run's output_dir")
    if args.once and not args.run.is_dir():
        raise UserError(f"{args.run} does not exist", "leave --once away to wait for the run")
    for option, value in (("--project", args.project), ("--name", args.name)):
        if value is not None and not (value.strip() and value.isprintable()):
            problem = f"{option} must be a name of printable characters, got {value!r}"
            raise UserError(problem, "give one, or leave the option out")
    log, handler = logging.getLogger("pipeline.track"), logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(asctime)s %(message)s", "%H:%M:%S"))
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    log.propagate = False
    title, client = TRACKERS[args.to]
    import_library(args.to, f"--to {args.to}", f"{title}'s client")
    tracker = getattr(import_module(f"pipeline.track.to_{args.to}"), client)(args.project)
    from pipeline.track.position import EVENTS, PICTURE, ROWS, Position
    from pipeline.track.sending import Sender

    log.info(f"{args.run} to {tracker.target}")
    position = Position(args.run, args.to, tracker.target)
    sender = Sender(args.run, args.name or args.run.resolve().name, tracker, position, args.every)

    def stop(number: int, frame: FrameType | None) -> None:
        if sender.sending and not sender.stopping:
            sender.stopping = True  # a second signal does not wait
        else:
            raise KeyboardInterrupt

    signal.signal(signal.SIGTERM, stop)
    signal.signal(signal.SIGINT, stop)
    sender.run(args.once)
    counts = {"row": position.count(ROWS), "event": position.count(EVENTS), "picture": position.count(PICTURE)}
    said = ", ".join(counted(count, what) for what, count in counts.items())
    if position.segment.number > 1:
        said += f", segment {position.segment.number}"
    if unreadable := sender.files.metrics.unreadable:
        said += f"; {counted(unreadable, 'line')} of metrics.jsonl that cannot be read left out"
    log.info(said)


if __name__ == "__main__":
    run_command(main)
