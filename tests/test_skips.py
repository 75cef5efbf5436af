"""What continuous integration skips in every environment has a reason there (tests/support/skips.py)."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from support.launching import REPOSITORY, clean_environment

WHOLE = """
import os, pytest
if "EXTRA" not in os.environ:
    pytest.skip("needs the extra `remote`", allow_module_level=True)
def test_of_the_extra(): pass
@pytest.mark.skip(reason="part of the soak: set PERVIT_SOAK=1")
def test_soak(): pass
"""
SINGLE = """
import os, pytest
@pytest.mark.skipif("CUDA" not in os.environ, reason="needs torchvision")
def test_of_cuda(): pass
"""


def test_reasons_are_kept_across_environments(tmp_path: Path) -> None:
    """Guards against a file that one environment cannot read and whose tests then count as skipped for no reason in all of them."""
    (tmp_path / "test_whole.py").write_text(WHOLE)
    (tmp_path / "test_single.py").write_text(SINGLE)
    before, found = [], []
    for number, variables in enumerate(({}, {"EXTRA": "1"}, {"CUDA": "1"})):
        options = ["-p", "support.skips", "--skips", f"{number}.json", *before]
        environment = clean_environment(PYTHONPATH=str(REPOSITORY / "tests"), **variables)
        subprocess.run([sys.executable, "-m", "pytest", "-q", *options], cwd=tmp_path, env=environment, check=True)
        found.append(json.loads((tmp_path / f"{number}.json").read_text()))
        before = ["--only-skipped", f"{number}.json"]
    soak = {"test_whole.py::test_soak": "part of the soak: set PERVIT_SOAK=1"}
    single = {"test_single.py::test_of_cuda": "needs torchvision"}
    assert found == [{"test_whole.py": "needs the extra `remote`", **single}, {**soak, **single}, soak]
    last = [sys.executable, str(REPOSITORY / "tests/support/skips.py")]
    assert subprocess.run([*last, tmp_path / "2.json"], capture_output=True).returncode == 0
    assert subprocess.run([*last, tmp_path / "0.json"], capture_output=True).returncode == 1
