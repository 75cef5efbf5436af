"""Run in one environment what another has skipped, and name what every one of them skips.

``pytest --skips first.json`` writes which tests were skipped, and why; ``pytest --only-skipped first.json --skips second.json`` in a
second environment runs those alone and writes what is still left. ``python tests/support/skips.py last.json`` ends with 1 and the names
of the tests that are left without one of the reasons in :data:`ACCEPTED`.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest

# Why a test need not run in continuous integration, as its skip says it.
ACCEPTED = (
    r"needs (a|\d+|two) CUDA GPUs?",  # make gpu-check
    r"part of the soak: ",  # make soak
    r"trains all twelve kinds: ",  # an hour; one of each runs
    r"takes half an hour: ",  # all recipes for two steps; one config of each family runs
    r"takes minutes: set PERVIT_DETECTION=1",  # until it detects; two steps of it run
    r"needs real ImageNet images: ",  # not free to pass on
    r"set PERVIT_DEIT_CODE to a clone",  # the authors' code; what it gave is in tests/parity
    r"needs accelerate, which nothing here depends on",  # it starts torchrun's agent, which is tested
    r"one architecture is enough",
    r"needs a CPU with bf16 instructions, which can also do without: this CPU has no",  # one that has them forbids them itself
    r"needs root, to become another user",  # where they do not
    r"needs the right to mount a file system",
    r"needs root and /dev/net/tun for nodes",
    r"cannot (make an interface|make a network namespace|make a cgroup|limit \w+|mount a folder) here: ",
    r"root may write anywhere",  # where the tests run as root
)


class Skips:
    """Keeps the skipped tests of a session, and leaves out all that another session has not skipped."""

    def __init__(self, output: Path | None, source: Path | None) -> None:
        self._output = output
        self._asked: dict[str, str] | None = None if source is None else json.loads(source.read_text())
        self._skipped: dict[str, str] = {}
        self._seen: set[str] = set()

    def pytest_ignore_collect(self, collection_path: Path, config: pytest.Config) -> bool | None:
        if self._asked is None or collection_path.suffix != ".py":
            return None
        file = collection_path.relative_to(config.rootpath).as_posix()
        return None if any(name.partition("::")[0] == file for name in self._asked) else True

    def pytest_collection_modifyitems(self, items: list[pytest.Item], config: pytest.Config) -> None:
        if self._asked is None:
            return
        rest = [item for item in items if not {item.nodeid, _file(item.nodeid)} & self._asked.keys()]
        items[:] = [item for item in items if item not in set(rest)]
        config.hook.pytest_deselected(items=rest)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        self._keep(report)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._keep(report)

    def _keep(self, report: pytest.CollectReport | pytest.TestReport) -> None:
        if report.skipped and isinstance(report.longrepr, tuple):
            self._skipped[report.nodeid] = report.longrepr[2].removeprefix("Skipped: ")
        if report.skipped or isinstance(report, pytest.TestReport):
            self._seen |= {report.nodeid, _file(report.nodeid)}

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if self._output is None or hasattr(session.config, "workerinput"):  # a worker of xdist
            return
        asked = self._asked or {}
        whole = {name for name in self._skipped if "::" not in name}  # files that this environment cannot even read
        if self._asked is not None:  # of a file that another one could, those tests are left that it skipped, for its reasons
            self._skipped = {name: why for name, why in self._skipped.items() if name not in whole - asked.keys()}
        missed = {
            name: why if _file(name) in whole else "is not a test of this environment"
            for name, why in asked.items()
            if name not in self._seen
        }
        self._output.parent.mkdir(parents=True, exist_ok=True)
        self._output.write_text(json.dumps({**self._skipped, **missed}, indent=1))


def _file(name: str) -> str:
    return name.partition("::")[0]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--skips", type=Path, metavar="FILE", help="write which tests were skipped, and why")
    parser.addoption("--only-skipped", type=Path, metavar="FILE", help="run only the tests in a file of --skips")


def pytest_configure(config: pytest.Config) -> None:
    output, source = config.getoption("skips"), config.getoption("only_skipped")
    if output or source:
        config.pluginmanager.register(Skips(output, source))


def left(skipped: dict[str, str]) -> dict[str, str]:
    """The tests whose reason is not accepted."""
    return {name: reason for name, reason in skipped.items() if not any(re.match(each, reason) for each in ACCEPTED)}


if __name__ == "__main__":
    everywhere = json.loads(Path(sys.argv[1]).read_text())
    wrong = left(everywhere)
    for name, reason in wrong.items():
        print(f"{name} is skipped in every environment: {reason}")
    print(
        f"{len(everywhere)} tests are skipped in every environment, {len(everywhere) - len(wrong)} of them for an accepted reason"
    )
    sys.exit(1 if wrong else 0)
