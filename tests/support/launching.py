"""The package's commands and the repository's scripts, run as a user runs them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]
PYTHON_BIN = Path(sys.executable).parent
PATIENCE = 1500.0  # seconds after which something hangs, also beside other work on two slow cores; no test measures by it


def clean_environment(**extra: str) -> dict[str, str]:
    """This process's environment with our Python first on the PATH and no trace of a surrounding job."""
    kept = {
        k: v
        for k, v in os.environ.items()
        if not k.startswith(("SLURM_", "PERVIT_"))
        and k not in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
    }
    kept["CUDA_VISIBLE_DEVICES"] = ""  # several processes must not meet on one GPU; test_gpu.py says so where it wants one
    kept["PERVIT_QUIET"] = "1"  # on a busy machine anything takes long: tests that compare stderr would meet lines of progress
    kept["OMP_WAIT_POLICY"] = "PASSIVE"  # threads that spin while they wait slow a busy machine down tenfold
    if "PYTHONPATH" in extra and "PYTHONPATH" in kept:  # packages of a machine without network may lie there
        extra["PYTHONPATH"] += f":{kept['PYTHONPATH']}"
    return {**kept, "PATH": f"{PYTHON_BIN}:{os.environ['PATH']}", **extra}


def run_module(
    module: str, *arguments: object, processes: int = 1, check: bool = True, timeout: float = PATIENCE, **environment: str
) -> subprocess.CompletedProcess:
    """``python -m module arguments``, in several processes through ``launch/local.sh``, with variables more than usual."""
    command = [sys.executable, "-m"] if processes == 1 else ["bash", "launch/local.sh", str(processes), "--"]
    result = subprocess.run(
        [*command, module, *map(str, arguments)],
        cwd=REPOSITORY,
        env=clean_environment(**environment),
        capture_output=True,
        text=True,
        timeout=timeout,
    )
    if check and result.returncode != 0:
        pytest.fail(f"{module} exited with {result.returncode}:\n{result.stdout[-2000:]}\n{result.stderr[-4000:]}")
    return result


def run_script(script: str, *arguments: object, check: bool = True) -> subprocess.CompletedProcess:
    """``python script arguments``, from the repository's root."""
    result = subprocess.run(
        [sys.executable, script, *map(str, arguments)],
        cwd=REPOSITORY,
        env=clean_environment(),
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )
    if check and result.returncode != 0:
        pytest.fail(f"{script} exited with {result.returncode}:\n{result.stdout[-2000:]}\n{result.stderr[-4000:]}")
    return result
