"""Trainings of which a chosen call to the operating system fails: every place at which a run writes or reads, one after the other.

Read by ``test_refused_calls.py``; ``refusing.c`` is what counts the calls of a process and refuses some.
"""

from __future__ import annotations

import functools
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from support import ranks
from support.runs import step_rows
from support.small_run import SMALL_MODEL

STEPS, EVERY = 6, 3
KEYS = (
    f"train.max_steps={STEPS}",
    f"checkpoint.every_steps={EVERY}",
    "checkpoint.retry_seconds=2",
    "seed=3",
    "log.samples=true",
)
SOURCE = Path(__file__).with_suffix(".c")
FOR_GOOD = 10**6  # calls that fail, once one has
_NAMES = (  # what differs from run to run in a path
    (r"\.saving-\d+-[0-9a-f]+", ".saving"),
    (r"step-\d+", "step"),
    (r"tfevents\..*", "tfevents"),
    (r"\.\d+\.tmp", ".tmp"),
    (r"\.tmp-\w+", ".tmp"),
)


@dataclass(frozen=True)
class Refusal:
    """Call number ``at`` below ``folder`` fails with ``error``, and ``count`` - 1 more. ``at`` 0: all are only counted."""

    folder: Path
    calls: str  # "read" or "write"
    error: int = 0
    at: int = 0
    count: int = 1


def compiler() -> str | None:
    return shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")


@functools.cache
def library(source: Path) -> Path:
    """The compiled library."""
    made = Path(tempfile.mkdtemp(prefix="refusing-")) / "library.so"
    subprocess.run([compiler(), "-O1", "-shared", "-fPIC", "-o", str(made), str(source), "-ldl"], check=True)
    return made


@functools.cache
def _zygote(source: Path) -> ranks._Zygote:
    """Like that of other tests, with the library."""
    before = os.environ.get("LD_PRELOAD")
    os.environ["LD_PRELOAD"] = str(library(source))
    try:
        return ranks._Zygote()
    finally:
        del os.environ["LD_PRELOAD"]
        if before is not None:
            os.environ["LD_PRELOAD"] = before


@contextmanager
def preloaded(source: Path = SOURCE) -> Iterator[None]:
    """Jobs are forked from a process that has the library."""
    usual, ranks._zygote = ranks._zygote, lambda: _zygote(source)
    try:
        yield
    finally:
        ranks._zygote = usual


def train(config: Path, run: Path, refusal: Refusal | None = None, *overrides: str) -> tuple[ranks.Job, list[str]]:
    """A training to its end, and a line ``NUMBER FUNCTION PATH`` for each of its calls below the folder."""
    log = run.with_name(f"{run.name}.calls")
    log.unlink(missing_ok=True)
    told = {} if refusal is None else {"FOLDER": refusal.folder, "CALLS": refusal.calls, "LOG": log}
    if refusal is not None and refusal.at:
        told |= {"AT": refusal.at, "FOR": refusal.count, "ERRNO": refusal.error}
    with preloaded():
        variables = {f"PERVIT_REFUSED_{name}": str(value) for name, value in told.items()}
        job = ranks.Job(1, "--config", config, f"output_dir={run}", *SMALL_MODEL, *KEYS, *overrides, **variables)
        job.wait()
    return job, log.read_text().splitlines() if log.exists() else []


def places(lines: list[str]) -> dict[str, list[int]]:
    """The calls by place: function and path, without what differs from run to run -> numbers."""
    found: dict[str, list[int]] = {}
    for line in lines:
        number, function, *path = line.removesuffix(" fails").split(" ", 2)
        name = path[0] if path else "/"
        for pattern, plain in _NAMES:
            name = re.sub(pattern, plain, name)
        found.setdefault(f"{function.removesuffix('64')} {name}", []).append(int(number))
    return found


def rows(run: Path) -> dict[int, tuple[float, float]]:
    """Loss and gradient norm of each step in a run's log."""
    return {row["step"]: (row["loss"], row["grad_norm"]) for row in step_rows(run)} if (run / "metrics.jsonl").exists() else {}


def verdict(config: Path, run: Path, want: dict, refusal: Refusal) -> tuple[list[str], str]:
    """Train with calls that fail and, if that ended the run, once more without.

    Returns:
        What is wrong, nothing in the best case; and how the first training ended, in a line.
    """
    job, lines = train(config, run, refusal)
    (code,), said = job.codes, job.stderr().strip().splitlines()
    wrong = [] if any(line.endswith(" fails") for line in lines) else ["no call has failed"]
    if "Traceback" in job.stderr() + job.stdout():
        wrong.append("a traceback")
    if code and (code != 2 or not said or not said[-1].startswith("error: ")):
        wrong.append(f"exit code {code} without a sentence")
    ended = f"exit {code} after step {max(rows(run), default=0)}"
    if code:
        again, _ = train(config, run)
        if again.codes != [0]:
            wrong.append(f"the next start ended with {again.codes[0]}: {again.stderr().strip()[-200:]}")
    if rows(run) != want:
        wrong.append(
            f"steps {sorted(rows(run))}, other losses in {[step for step in want if rows(run).get(step) != want[step]]}"
        )
    return wrong, f"{ended}: {said[-1] if said else 'nothing said'}"
