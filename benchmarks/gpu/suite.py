"""Stage ``tests``: pytest on the files that have tests marked ``gpu``."""

from __future__ import annotations

import subprocess
import sys
from xml.etree import ElementTree

from benchmarks.gpu.common import REPOSITORY, Context, Rows, has_module

MARK = "mark.gpu"


def measure(context: Context) -> Rows:
    if not has_module("pytest"):
        yield "pytest -m gpu", {"skipped": "pytest is not there"}
        return
    files = sorted(str(path) for path in (REPOSITORY / "tests").rglob("test_*.py") if MARK in path.read_text())
    report = context.work / "tests.xml"
    options = ["-m", "gpu", "-q", "--durations=0", "-p", "no:cacheprovider", "--continue-on-collection-errors"]
    subprocess.run([sys.executable, "-m", "pytest", *options, f"--junitxml={report}", *files], cwd=REPOSITORY)
    cases = [(each, _outcome(each)) for each in ElementTree.parse(report).iter("testcase")]
    counts = {name: sum(outcome == name for _, (outcome, _) in cases) for name in ("passed", "failed", "skipped")}
    yield "pytest -m gpu", {"passed": counts["passed"], "not passed": counts["failed"], "not run": counts["skipped"]}
    for case, (outcome, why) in cases:
        if outcome == "failed":
            yield f"{case.get('classname')}::{case.get('name')}", {"failed": why}


def _outcome(case: ElementTree.Element) -> tuple[str, str]:
    for kind, outcome in (("failure", "failed"), ("error", "failed"), ("skipped", "skipped")):
        found = case.find(kind)
        if found is not None:
            return outcome, " ".join((found.get("message") or found.text or "").split())[:200]
    return "passed", ""
