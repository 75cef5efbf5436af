"""Tell how far the runs of a sweep are, and make the page that compares them."""

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from pipeline.config import accumulation_steps, config_from_dict, decides_weights, flatten
from pipeline.errors import UserError
from pipeline.sweep.lines import Sweep, SweepRun

REPORT = "report.html"
LOGS = "logs"


def check_batches(sweep: Sweep, processes: int, remedy: str = "") -> None:
    """See that each run's batch divides by its processes, before the queue; ``remedy`` is added to that of the config."""
    for run in sweep.runs:
        if isinstance(run.config.train.micro_batch_size, int):  # else it is settled when the run starts
            try:
                accumulation_steps(run.config.train, processes, run.config.augment.unit)
            except UserError as error:
                what_to_do = str(error).removeprefix(f"{error.problem}: ").rstrip(".")
                raise UserError(f"{sweep.file}, line {run.line}: {error.problem}", what_to_do + remedy) from None


def is_finished(run: SweepRun) -> bool:
    """Whether the run is finished, with this config. If not, or in doubt, the training is started and finds out."""
    from pipeline.runs.files import RunFiles
    from pipeline.runs.state import state_of

    files = RunFiles(run.folder)
    if not state_of(files).finished:
        return False
    try:
        before, now = flatten(config_from_dict(files.config, str(run.folder))), flatten(run.config)
    except UserError:
        return False
    decisive = [key for key in now if decides_weights(key)]
    if now["train.precision"] == "auto":  # the run has recorded what it chose
        decisive.remove("train.precision")
    return all(before.get(key) == now[key] for key in decisive)


def state(folder: Path) -> str:
    """How far a run is, in words."""
    from pipeline.runs.folder import RunFolder

    run = RunFolder(folder)
    return str(run.state) + (f", top-1 {run.result['top1']:.1f} %" if run.result else "")


def table(rows: Sequence[tuple[int, Path]]) -> str:
    """A line for each run, given as (number, folder)."""
    width = max(len(folder.name) for _, folder in rows)
    return "\n".join(f"{number:>4}  {folder.name:<{width}}  {state(folder)}" for number, folder in rows)


def make_report(folders: Sequence[Path], folder: Path) -> int:
    """Write the page that compares the runs into the sweep's folder; returns the exit code of :mod:`pipeline.report`."""
    found = [run for run in folders if run.is_dir()]
    if not found:
        raise UserError(f"a report requires at least 1 run, got none in {folder}", "see the logs of the tasks")
    command = [sys.executable, "-m", "pipeline.report", *map(str, found), "--output", str(folder / REPORT)]
    return subprocess.run(command, stdin=subprocess.DEVNULL).returncode
