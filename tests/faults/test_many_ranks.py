"""Heartbeats of more ranks than a test has processes for, by ``benchmarks/scale_control.py``."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

from support.launching import PATIENCE, REPOSITORY, clean_environment


def scale_control(*arguments: object) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-m", "benchmarks.scale_control", *map(str, arguments)],
        cwd=REPOSITORY, env=clean_environment(), capture_output=True, text=True, timeout=PATIENCE,
    )  # fmt: skip


@pytest.mark.long
@pytest.mark.multiprocess
def test_a_real_rank_0_names_the_lost_one_of_many_simulated() -> None:
    """Guards against a detector that is too slow, or names the wrong rank, where it reads hundreds of heartbeats."""
    ran = scale_control("--ranks", 150, "--seconds", 1)
    assert ran.returncode == 0 and ran.stderr == "", ran.stderr[-2000:]
    row = re.search(r"\| 150 \| .* \| (-?[0-9.]+) s \|\n", ran.stdout)
    assert row and float(row[1]) < 10  # seconds beyond silence_timeout: the bound that heartbeat.py promises
    assert re.search(
        r"error: rank 8 \(host .*\) sent no heartbeat for \d+ s; its last heartbeat came from step \d+, training: ", ran.stdout
    )


def test_a_number_out_of_bounds_is_named() -> None:
    """Guards against a benchmark that fills a machine with connections."""
    ran = scale_control("--ranks", 10**6)
    assert ran.returncode == 2 and ran.stderr.startswith("error: --ranks must be from 8 to 4096, got 1000000"), ran.stderr
