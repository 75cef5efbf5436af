"""Runs interpreted.py in a process in which Triton interprets its kernels."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from support.launching import PATIENCE, REPOSITORY, clean_environment

pytest.importorskip("triton", reason="needs Triton, which the extra `test` installs")


def test_the_kernels_in_tritons_interpreter() -> None:
    """Guards against all that interpreted.py guards against."""
    # NumPy multiplies small matrices, for which its threads only wait for each other.
    environment = clean_environment(TRITON_INTERPRET="1", OPENBLAS_NUM_THREADS="1", OMP_NUM_THREADS="1")
    file = Path(__file__).parent / "interpreted.py"
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", file],
        cwd=REPOSITORY,
        env=environment,
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )
    assert done.returncode == 0 and "skipped" not in done.stdout, done.stdout + done.stderr
