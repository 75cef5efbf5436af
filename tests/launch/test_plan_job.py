"""``--plan`` among the words of a job script: what ``pipeline.plan`` is asked, with Slurm and without. test_slurm.py has a real job."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from support.launching import PATIENCE, REPOSITORY, clean_environment

TIMES = {"SLURM_JOB_START_TIME": "1767225600", "SLURM_JOB_END_TIME": "1767232800"}
JOB = {**TIMES, "SLURM_JOB_ID": "7", "SLURM_JOB_NAME": "name", "SLURM_JOB_NUM_NODES": "3", "SLURM_NTASKS_PER_NODE": "4"}


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """The scripts beside a ``pipeline.plan`` that prints its words, and a ``srun`` that says so."""
    root = tmp_path / "a repository"
    for name in ("launch", "configs"):
        shutil.copytree(REPOSITORY / name, root / name)
    shutil.copytree(REPOSITORY / "examples" / "detection", root / "examples" / "detection")
    (root / "pipeline").mkdir()
    (root / "pipeline" / "__init__.py").touch()
    (root / "pipeline" / "plan.py").write_text("import json, sys\nprint(json.dumps(sys.argv[1:]))\nsys.exit(1)\n")
    (root / "slurm").mkdir()
    (root / "slurm" / "srun").write_text('#!/bin/sh\nwhile [ "${1#--}" != "$1" ]; do shift; done\necho srun; exec "$@"\n')
    (root / "slurm" / "srun").chmod(0o755)
    return root


def launch(root: Path, script: str, *words: str, **variables: str) -> subprocess.CompletedProcess:
    path = f"{Path(sys.executable).parent}:{root / 'slurm'}:/usr/bin:/bin"
    environment = clean_environment(**{"PATH": path, "PERVIT_ROOT": str(root), **variables})
    command = ["bash", str(root / script), *words]
    return subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True, timeout=PATIENCE)


def asked(root: Path, script: str, *words: str, **variables: str) -> list[str]:
    """The words that pipeline.plan gets; its exit code, 1 for what does not fit, is the script's."""
    result = launch(root, f"launch/{script}", *words, **variables)
    assert result.returncode == 1, result
    return json.loads(result.stdout.splitlines()[-1])


def test_on_a_login_node(repository: Path) -> None:
    """Guards against a plan for which one has to queue, and one of another job than the script's #SBATCH lines ask for."""
    size = ["--nodes", "1", "--gpus-per-node", "8", "--time-limit"]
    folders = ["data.path=data/imagenet", "output_dir=runs/pervit_m"]
    said = asked(repository, "pervit_m.slurm", "--plan")
    assert said == ["--config", "configs/pervit_m.yaml", *size, "3-00:00:00", *folders]
    words = ["--gpu", "a100-80g", "train.zero_stage=2"]
    said = asked(repository, "train.slurm", "launch/train.slurm", "seed=1", "--plan", *words, PERVIT_DATA="/a b")
    assert said == ["--config", "launch/train.slurm", *size, "1-00:00:00", "data.path=/a b", "seed=1", *words]


def test_in_a_job(repository: Path) -> None:
    """Guards against a plan that ignores what sbatch was given, and one of GPUs for a job without."""
    size = ["--nodes", "3", "--gpus-per-node", "4", "--time-limit", "120"]  # minutes
    folders = ["data.path=data/imagenet", "output_dir=runs/name"]
    config = ["--config", "configs/pervit_t.yaml"]
    on_gpus = asked(repository, "pervit_t.slurm", "--plan", **JOB, SLURM_GPUS_PER_NODE="h100:4")
    assert on_gpus == [*config, *size, *folders]
    on_cpus = asked(repository, "pervit_t.slurm", "--plan", "seed=2", **JOB, SLURM_GPUS_PER_NODE="0", SLURM_CPUS_ON_NODE="96")
    assert on_cpus == [*config, *size, "--gpu", "cpu", "--cpus", "96", *folders, "seed=2"]


def test_in_a_container(repository: Path) -> None:
    """Guards against a plan with a Python that is not there."""
    command = {"PERVIT_SRUN": "env MARK=1"}
    assert launch(repository, "launch/pervit_s.slurm", "--plan", **command).stdout.startswith("[")
    assert launch(repository, "launch/pervit_s.slurm", "--plan", **command, **JOB).stdout.startswith("srun\n[")
    refused = launch(repository, "launch/pervit_s.slurm", "--plan", PERVIT_SRUN="--container-image=x")
    assert refused.returncode == 2 and "--plan does not take PERVIT_SRUN" in refused.stderr


def test_a_training_that_cannot_be_planned(repository: Path) -> None:
    """Guards against a plan of the classifier's training for the detector's."""
    words = ("examples/detection/configs/retinanet_posmlp_t.yaml", "--plan")
    result = launch(repository, "examples/detection/detection.slurm", *words)
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr.startswith("error: --plan requires pipeline.train, got examples.detection")
