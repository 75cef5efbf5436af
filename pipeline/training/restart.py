"""Decide whether a run that stopped may be restarted. The job script asks before it requeues its job.

    python -m pipeline.training.restart --exit-code 75 --config pervit_t
    python -m pipeline.training.restart --exit-code 137 --config pervit_t output_dir=runs/other

Exit code 0: yes, and the restart is recorded in ``restarts.json`` in the run folder. Exit code 1: no, with the reason printed.
A run whose last three restarts all began at the checkpoint that is still the newest makes no progress, and is not restarted.
"""

import json
import os
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from pathlib import Path

from pipeline.checkpoint.folder import latest_step
from pipeline.cluster.environment import job_name
from pipeline.command_line import command_parser
from pipeline.config import load_config
from pipeline.errors import UserError, exit_reason
from pipeline.files import replace_text
from pipeline.runs import RESTARTS

LIMIT = 3  # consecutive restarts from one checkpoint: fewer would give up on two bad nodes in a row, more burn node hours


@dataclass(frozen=True)
class Restart:
    """An entry of ``restarts.json``."""

    time: str  # ISO 8601, UTC
    job: str  # Slurm's job id, ARRAY_TASK in a job array; it survives a requeue
    restart: int  # Slurm's restart count of this job, from 1
    exit_code: int  # of the training
    step: int | None  # of the checkpoint that the restart resumes from; None: from scratch


def allow_restart(run_dir: Path, job: str, number: int, exit_code: int) -> Restart:
    """Record the next restart of a job in the run folder, which is made if the training has not. Those of other jobs do not count: whoever
    submits again may have fixed the cause. Raises UserError: no progress over the last :data:`LIMIT` restarts, or a file that
    cannot be read; OSError: the restart cannot be recorded, so it could not be counted."""
    path, step = run_dir / RESTARTS, latest_step(run_dir)
    restarts = read_restarts(path)
    last = [restart for restart in restarts if restart.job == job][-LIMIT:]
    if len(last) == LIMIT and all(restart.step == step for restart in last):
        why = f"the last {LIMIT} restarts began {_place(step)} and no newer checkpoint was saved"
        remedy = f"{why}; find the cause in the log, then submit the same command again"
        raise UserError(f"{run_dir} has made no progress", remedy)
    restart = Restart(datetime.now(timezone.utc).isoformat(timespec="seconds"), job, number, exit_code, step)
    run_dir.mkdir(parents=True, exist_ok=True)
    replace_text(path, "[\n" + ",\n".join(json.dumps(asdict(row)) for row in [*restarts, restart]) + "\n]\n")
    return restart


def read_restarts(path: Path) -> list[Restart]:
    """The restarts of a run so far; empty if there is no file. Raises UserError: it is not what :func:`allow_restart` writes."""
    try:
        return [Restart(**row) for row in json.loads(path.read_text())]
    except FileNotFoundError:
        return []
    except (ValueError, TypeError):  # not JSON, or other keys
        raise UserError(f"{path} must be a list of restarts, so that they can be counted", "remove the file") from None


def _place(step: int | None) -> str:
    return "at the beginning" if step is None else f"at step {step}"


def main() -> int:
    return answer("pipeline.training.restart", __doc__, lambda path, words: str(load_config(path, words).folder))


def answer(program: str, description: str | None, run_folder: Callable[[Path, list[str]], str]) -> int:
    """The command, for one kind of training; returns the exit code. ``run_folder``: of a config file and overrides."""
    parser = command_parser(program, description)
    parser.add_argument("--exit-code", required=True, type=int, help="the training's exit code")
    parser.add_argument("--config", required=True, type=Path, help="the training's config")
    parser.add_argument("--doctor", action="store_true", help="changes nothing: an option of the training")
    parser.add_argument("overrides", nargs="*", metavar="dotted.key=value", help="the training's overrides")
    args = parser.parse_intermixed_args()
    job = job_name(os.environ) or "none"
    ended = f"{exit_reason(args.exit_code)} (exit code {args.exit_code})"
    try:
        folder = Path(run_folder(args.config, args.overrides))
        before = os.environ.get("SLURM_RESTART_COUNT", "0")
        if not (before.isascii() and before.isdigit()):
            problem = f"the environment variable SLURM_RESTART_COUNT must be a whole number, got {before!r}"
            raise UserError(problem, "Slurm sets it, so unset it")
        restart = allow_restart(folder, job, int(before) + 1, args.exit_code)
    except Exception as error:  # whatever it is, the job script needs an answer, and its log a reason
        print(f"no restart of job {job}: {ended}, and {' '.join(str(error).split())}", file=sys.stderr, flush=True)
        return 1
    print(f"restart {restart.restart} of job {job}: {ended}, begins {_place(restart.step)}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
