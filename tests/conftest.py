"""Data sets and process launching that several tests share."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from precisions import FP32

REPOSITORY = Path(__file__).parent.parent
PYTHON_BIN = Path(sys.executable).parent
PATIENCE = 1500.0  # seconds after which something hangs, also beside other work on two slow cores; no test measures by it
IMAGENET_VARIABLE = "PERVIT_IMAGENET_SAMPLES"


def pytest_configure() -> None:
    """A job in the background of a script has Ctrl-C ignored, one under nohup hang-ups, and both hand that down: also to the
    processes whose Ctrl-C and hang-up are tested."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


def clean_environment(**extra: str) -> dict[str, str]:
    """This process's environment with our Python first on the PATH and no trace of a surrounding job."""
    kept = {
        k: v
        for k, v in os.environ.items()
        if not k.startswith(("SLURM_", "PERVIT_")) and k not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")
    }
    kept["CUDA_VISIBLE_DEVICES"] = ""  # several processes must not meet on one GPU; test_gpu.py says so where it wants one
    kept["OMP_WAIT_POLICY"] = "PASSIVE"  # threads that spin while they wait slow a busy machine down tenfold
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


def step_rows(run_dir: Path) -> list[dict]:
    """The rows of metrics.jsonl that are training steps."""
    return [row for row in _rows(run_dir) if "lr" in row]


def evaluation_rows(run_dir: Path) -> list[dict]:
    """The rows of metrics.jsonl that are evaluations."""
    return [row for row in _rows(run_dir) if "top1" in row]


def _rows(run_dir: Path) -> list[dict]:
    return [json.loads(line) for line in (Path(run_dir) / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture(scope="session")
def digits_images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo's digits as a tree of JPEG files."""
    folder = tmp_path_factory.mktemp("digits") / "images"
    run_script("data_prep/make_demo_dataset.py", "--output", folder)
    return folder


@pytest.fixture(scope="session")
def digits_shards(digits_images: Path) -> Path:
    """The digits as a shard set: 10 classes, train in 4 shards, val in 1."""
    folder = digits_images.parent / "shards"
    run_script("data_prep/shard_imagenet.py", "--source", digits_images, "--output", folder, "--samples-per-shard", 400)
    return folder


@pytest.fixture(scope="session")
def imagenet_samples() -> Path:
    """A folder <wnid>/*.JPEG of real ImageNet images."""
    folder = os.environ.get(IMAGENET_VARIABLE)
    if not folder or not Path(folder).is_dir():
        pytest.skip(f"needs real ImageNet images: set {IMAGENET_VARIABLE} to a folder <wnid>/*.JPEG")
    return Path(folder)


@pytest.fixture(scope="session")
def imagenet_shards(imagenet_samples: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The real images as a shard set, the same images as train and val."""
    folder = tmp_path_factory.mktemp("imagenet") / "shards"
    for split in ("train", "val"):
        run_script(
            "data_prep/shard_imagenet.py",
            "--source",
            imagenet_samples,
            "--output",
            folder,
            "--split",
            split,
            "--samples-per-shard",
            128,
        )
    return folder


@pytest.fixture
def small_run(digits_shards: Path, tmp_path: Path) -> Path:
    """:func:`write_small_config`, a file for this test alone."""
    return write_small_config(digits_shards, tmp_path)


def write_small_config(digits_shards: Path, folder: Path) -> Path:
    """A config file for a run of seconds in ``folder``: PerViT-T at 32 pixels on the digits, every randomness on."""
    config = {
        "output_dir": str(folder / "run"),
        "model": {"name": "pervit_t", "image_size": 32, "num_classes": 10, "drop_path": 0.1},
        "data": {"path": str(digits_shards), "num_threads": 1},
        "augment": {"rand_augment_ops": 2, "erasing": 0.25, "mixup": 0.8, "cutmix": 1.0, "mix_group": 4},
        "train": {"epochs": 10, "global_batch_size": 16, "micro_batch_size": 4, "precision": FP32},
        "optim": {"warmup_epochs": 0.1},
        "eval": {"every_epochs": None},
        "checkpoint": {"every_steps": None},
    }
    path = folder / "config.yaml"
    path.write_text(yaml.safe_dump(config))
    return path
