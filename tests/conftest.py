"""Data sets and configs that several tests share; plain helpers are in ``support/``."""

from __future__ import annotations

import os
import shutil
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.launching import run_script
from support.runs import write_small_config
from support.slurm_cluster import Cluster, free_ports, running_cluster

IMAGENET_VARIABLE = "PERVIT_IMAGENET_SAMPLES"
pytest_plugins = ["support.skips"]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--quick", action="store_true", help="only tests that start no process and build no full-size model")


def pytest_configure(config: pytest.Config) -> None:
    """Make the tests independent of where they are started. A job in the background of a script has Ctrl-C ignored, one under nohup
    hang-ups, and both hand that down: also to the processes whose Ctrl-C and hang-up are tested."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    os.environ["PERVIT_QUIET"] = "1"
    if (
        "PYTEST_XDIST_WORKER" in os.environ
    ):  # beside another test, threads of small operations wait for each other: 40 % of the time
        os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ["COLUMNS"] = "80"  # of what commands print, whatever terminal the tests are started in
    if "PYTHONWARNINGS" in os.environ:  # the processes that tests start pass over what pyproject.toml does
        os.environ["PYTHONWARNINGS"] += ",ignore::DeprecationWarning"
    shares_out = config.getoption("numprocesses", default=None) and not hasattr(config, "workerinput")  # runs no test itself
    if config.getoption("--quick") and not shares_out:
        from support import quick  # imports PyTorch

        config.pluginmanager.register(quick.Quick())


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Of two workers each takes the next file: those with trainings first, so that both end at the same time."""
    if "PYTEST_XDIST_WORKER" in os.environ:
        trains = {item.path for item in items if any(map(item.get_closest_marker, ("multiprocess", "slurm")))}
        items.sort(key=lambda item: item.path not in trains)


def pytest_runtest_setup() -> None:
    """Give each test one thread beside another worker's: a plan of this machine, or a session of one rank, has taken more."""
    if "PYTEST_XDIST_WORKER" in os.environ and (torch := sys.modules.get("torch")):
        torch.set_num_threads(1)


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


@pytest.fixture
def copied_shards(digits_shards: Path, tmp_path: Path) -> Path:
    """A shard set that a test may damage."""
    return Path(shutil.copytree(digits_shards, tmp_path / "shards"))


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


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    """A Slurm of two nodes for all tests of a file."""
    with running_cluster(next(free_ports())) as started:
        yield started


@pytest.fixture
def small_run(digits_shards: Path, tmp_path: Path) -> Path:
    """:func:`write_small_config`, a file for this test alone."""
    return write_small_config(digits_shards, tmp_path)
