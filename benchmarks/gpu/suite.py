"""Stages ``test``, ``compile_test``: pytest on a file that has tests marked ``gpu``. pytest loads this file as a plugin, too, which tells
of each test when it ends.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import TYPE_CHECKING

from benchmarks.gpu.common import REPOSITORY, Context, Rows, has_module

if TYPE_CHECKING:
    import pytest

_PIPE = "PERVIT_GPU_TESTS_PIPE"


def measure(context: Context) -> Rows:
    """A row for each test that fails as soon as it does, and one of the file's counts."""
    if not has_module("pytest"):
        yield {"skipped": "pytest is not there"}
        return
    file, counts, running = context.options["file"], {"passed": 0, "failed": 0, "skipped": 0}, ""
    options = ["-m", "gpu", "-q", "-p", "no:cacheprovider", "-p", "benchmarks.gpu.suite"]
    reading, writing = os.pipe()
    process = subprocess.Popen(
        [sys.executable, "-m", "pytest", *options, file],
        cwd=REPOSITORY,
        env={**os.environ, _PIPE: str(writing)},
        pass_fds=[writing],
    )
    os.close(writing)
    with os.fdopen(reading) as lines:
        for line in lines:
            name, outcome, why = json.loads(line)
            running = name if outcome == "began" else ""
            if outcome in counts:
                counts[outcome] += 1
            if outcome == "failed":
                yield {"case": name, "failed": why}
    code = process.wait()
    row = {"passed": counts["passed"], "not_passed": counts["failed"], "not_run": counts["skipped"]}
    if code not in (0, 1, 5):  # all passed, some failed, there was none
        row["failed"] = f"pytest ended with code {code}" + (f" in {running}" if running else "")
    yield row


def pytest_runtest_logstart(nodeid: str) -> None:
    _tell(nodeid, "began")


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.failed or report.skipped or report.when == "call":
        crash = getattr(report.longrepr, "reprcrash", None)
        _tell(report.nodeid, report.outcome, " ".join(str(getattr(crash, "message", report.longrepr)).split())[:300])


def pytest_collectreport(report: pytest.CollectReport) -> None:
    if not report.passed:
        _tell(report.nodeid, report.outcome, " ".join(str(report.longrepr).split())[-300:])


def _tell(name: str, outcome: str, why: str = "") -> None:
    if _PIPE in os.environ:
        os.write(int(os.environ[_PIPE]), (json.dumps([name, outcome, why]) + "\n").encode())
