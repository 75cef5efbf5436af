"""What a step frees serves the next step."""

from __future__ import annotations

import subprocess
import sys

import pytest

from support.launching import REPOSITORY, clean_environment

# A process of its own: the setting cannot be taken back. New pages are counted, not timed.
PROGRAM = """
import resource, sys, torch
from pipeline.cluster.host import keep_freed_memory
done = keep_freed_memory() if sys.argv[1] == "keep" else None
for repetition in range(16):  # the first ones make room: small blocks between lie in the way
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    torch.zeros(16 << 20).add_(1)  # 64 MiB
    faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
print(done, faults)
"""


def run(argument: str, **environment: str) -> list[str]:
    result = subprocess.run(
        [sys.executable, "-c", PROGRAM, argument],
        cwd=REPOSITORY,
        env={**clean_environment(), "THP_MEM_ALLOC_ENABLE": "0", **environment},
        capture_output=True,
        text=True,
        check=True,
    )
    return result.stdout.split()


def test_freed_memory_is_kept() -> None:
    """Guards against a setting that glibc ignores: then every repetition gets new pages."""
    done, faults = run("keep")
    if done == "False":
        pytest.skip("not glibc")
    assert int(faults) < 100
    assert int(run("leave")[1]) > 10 * max(1, int(faults))


def test_the_users_settings_stay() -> None:
    """Guards against a command that overrides what its user has set for malloc."""
    assert run("keep", MALLOC_ARENA_MAX="2")[0] == "False"
