"""Commands answer at once: what takes seconds to import is imported when it is used."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from pipeline.__main__ import MODULES
from support.launching import PATIENCE, REPOSITORY, clean_environment

HEAVY = ("torch", "deepspeed", "nvidia.dali", "scipy", "fvcore", "tensorboard", "sklearn", "matplotlib")
COMMANDS = [*MODULES.values(), "data_prep.make_demo_dataset", "pipeline.training.restart"]

# What ``python -m COMMAND --help`` does, then the heavy modules that it has imported.
HELP = f"""
import runpy, sys
sys.argv = [sys.argv[1], "--help"]
try:
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
except SystemExit as end:
    print("IMPORTED", [name for name in {HEAVY} if name in sys.modules], end.code)
"""


def run_python(*arguments: object) -> subprocess.CompletedProcess:
    command = [sys.executable, *map(str, arguments)]
    return subprocess.run(
        command,
        cwd=REPOSITORY,
        env=clean_environment(PYTHONPATH=str(REPOSITORY)),
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )


@pytest.mark.parametrize("module", COMMANDS)
def test_help_needs_none_of_the_heavy_imports(module: str) -> None:
    """Guards against eleven seconds of silence before ``--help``; names the modules instead of measuring a busy machine."""
    result = run_python("-c", HELP, module)
    assert result.stdout.endswith("IMPORTED [] 0\n"), f"{result.stdout}\n{result.stderr}"
    if module != "pipeline.training.restart":  # the job script's own
        assert len(re.findall(rf"\n *(?:pervit [a-z]|python -m {module}|bash launch/local.sh) ?", result.stdout)) >= 2, (
            "two examples needed"
        )


def test_a_mistake_in_the_config_and_the_first_line_come_before_the_heavy_imports(tmp_path: Path) -> None:
    """Guards against a minute, on a busy machine, in which nothing shows whether the training has begun."""
    for override, hint in (
        ("train.epoch=1", "did you mean 'train.epochs'?"),
        ("model.name=pervit_x", "did you mean 'pervit_t'?"),
    ):
        wrong = run_python("-X", "importtime", "-m", "pipeline.train", "--config", "configs/demo.yaml", override)
        assert wrong.returncode == 2 and hint in wrong.stderr and wrong.stdout == ""
        assert "| torch\n" not in wrong.stderr and "pydantic\n" in wrong.stderr

    block = "import sys; sys.modules['torch'] = None; from pipeline.train import command; command()"
    (tmp_path / "manifest.json").touch()
    begun = run_python("-c", block, "--config", "configs/demo.yaml", f"data.path={tmp_path}")
    assert begun.returncode == 2 and "has no package 'torch': use the Python of the environment" in begun.stderr
    assert begun.stdout.endswith("pervit_t into runs/demo: loading PyTorch, DeepSpeed and DALI\n")


def test_output_that_nobody_reads_is_no_error() -> None:
    """Guards against `pervit config | head`, which once ended with a sentence about permissions and free space."""
    command = [sys.executable, "-m", "pipeline.config"]
    read, write = os.pipe()
    os.close(read)
    result = subprocess.run(command, cwd=REPOSITORY, env=clean_environment(), stdout=write, stderr=subprocess.PIPE)
    os.close(write)
    assert (result.returncode, result.stderr) == (1, b"")


def test_evaluate_answers_at_once() -> None:
    """Guards against an import that a mistyped option would wait for."""
    heavy = "{'torch', 'deepspeed', 'nvidia', 'numpy', 'PIL', 'safetensors'}"
    done = run_python("-c", f"import sys, pipeline.evaluate; print(sorted({heavy} & sys.modules.keys()))")
    assert done.stdout == "[]\n", done.stderr


def test_no_kernel_of_pytorchs_own_needs_a_compiler() -> None:
    """Guards against a backward pass that ends on a GPU machine without a C compiler: PyTorch replaces products by kernels that it
    compiles in the middle of it. tests/test_gpu.py has the backward pass."""
    look = "import pipeline, torch; from torch._native.common_utils import check_native_jit_disabled as off; print(off())"
    assert run_python("-c", look).stdout == "True\n"
