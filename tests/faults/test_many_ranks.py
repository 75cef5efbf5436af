"""The control plane with more ranks than a test has processes for, by ``benchmarks/scale_control.py``."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

from support.launching import PATIENCE, REPOSITORY, clean_environment

SENTENCE = r"error: rank {} \(host .*\) gave no sign of life for \d+ s; its last heartbeat came from step \d+, training: "


def scale_control(*arguments: object) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-m", "benchmarks.scale_control", *map(str, arguments)],
        cwd=REPOSITORY, env=clean_environment(), capture_output=True, text=True, timeout=PATIENCE,
    )  # fmt: skip


def cells(output: str, first: str) -> list[str]:
    """Of the rows that begin with a number of ranks, the last one."""
    return [row.strip("| ").split(" | ") for row in output.splitlines() if row.startswith(f"| {first} |")][-1]


@pytest.mark.multiprocess
def test_a_real_rank_0_names_the_lost_one_of_many_simulated() -> None:
    """Guards against groups that lose a rank's signs, and against requests of rank 0 that grow with the number of ranks."""
    ran = scale_control("--ranks", "--signs", 150, "--seconds", 1)
    assert ran.returncode == 0 and ran.stderr == "", ran.stderr[-2000:]
    row = cells(ran.stdout, "150")
    assert 0 < float(row[1]) < 4 * 150  # requests per second
    assert float(row[6].split()[0]) < 10  # seconds beyond silence_timeout: the bound that heartbeat.py promises
    assert re.search(SENTENCE.format(76), ran.stdout)


@pytest.mark.soak
def test_64_real_processes_end_with_one_sentence() -> None:
    """Guards against a start, an agreement by rows and columns, a checkpoint, or a lost rank that 64 processes do not get through."""
    ran = scale_control("--ranks", 64, "--signs")
    assert ran.returncode == 0, ran.stderr[-2000:]
    row = cells(ran.stdout, "64")
    assert row[5].startswith("65, ") and row[6].endswith(" s, 1 sentence")
    assert float(row[6].split()[0]) < 5 + 10
    assert re.search(SENTENCE.format(33), ran.stdout)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("--ranks", 1), "--ranks is 1, 2 to 256 needed"),
        (("--ranks", "--signs", 10**6), "--signs is 1000000, 8 to 16384 needed"),
    ],
)
def test_a_number_out_of_bounds_is_named(arguments: tuple, sentence: str) -> None:
    """Guards against a benchmark that fills a machine with processes."""
    ran = scale_control(*arguments)
    assert ran.returncode == 2 and ran.stderr.startswith(f"error: {sentence}"), ran.stderr
