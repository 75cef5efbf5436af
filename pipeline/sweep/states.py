"""How far the runs of a sweep are, and the page that compares them."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from pipeline.config import flatten, is_free
from pipeline.errors import UserError
from pipeline.sweep.lines import Sweep, SweepRun

REPORT = "report.html"
LOGS = "logs"


def is_finished(run: SweepRun) -> bool:
    """Whether the run is through, with this config. If not, or in doubt, the training is started and finds out."""
    from pipeline.reports.known_runs import is_run, read_runs

    if not is_run(run.folder):
        return False
    known, _ = read_runs([run.folder])
    if not known or not known[0].finished:
        return False
    before, now = flatten(known[0].config), flatten(run.config)
    decisive = [key for key in now if key == "train.max_steps" or not is_free(key)]
    if now["train.precision"] == "auto":  # the run has recorded what it chose
        decisive.remove("train.precision")
    return all(before.get(key) == now[key] for key in decisive)


def state(folder: Path) -> str:
    """How far a run is, in words."""
    from pipeline.reports.known_runs import is_run, read_runs

    if not is_run(folder):
        return "not begun"
    known, problems = read_runs([folder])
    if not known:
        return problems[0]
    run = known[0]
    top1 = f", top-1 {run.result['top1']:.1f} %" if run.result and "top1" in run.result else ""
    if run.finished:
        return f"finished at step {run.folder.step}{top1}"
    last = run.folder.last_step
    return f"{'training' if run.folder.running else 'stopped'} at step {run.folder.step}{f' of {last}' if last else ''}{top1}"


def table(rows: Sequence[tuple[int, Path]]) -> str:
    """A line for each run, given as (number, folder)."""
    width = max(len(folder.name) for _, folder in rows)
    return "\n".join(f"{number:>4}  {folder.name:<{width}}  {state(folder)}" for number, folder in rows)


def sweep_table(sweep: Sweep) -> str:
    """:func:`table` of a sweep."""
    return table([(run.number, run.folder) for run in sweep.runs])


def make_report(folders: Sequence[Path], folder: Path) -> int:
    """Write the page that compares the runs into the sweep's folder; returns the exit code of :mod:`pipeline.report`."""
    found = [each for each in folders if each.is_dir()]
    if not found:
        raise UserError(f"{folder} has no run yet, at least one needed for a report", "see the logs of the tasks")
    command = [sys.executable, "-m", "pipeline.report", *map(str, found), "--output", str(folder / REPORT)]
    return subprocess.run(command, stdin=subprocess.DEVNULL).returncode
