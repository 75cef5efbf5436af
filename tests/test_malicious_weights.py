"""A pickle is a program. Given as weights, wherever weights are read, it is refused and not run."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from pipeline import load
from pipeline.cluster.world import World
from pipeline.config import Config, ModelConfig, TrainConfig, config_from_dict
from pipeline.errors import UserError
from pipeline.inference.teacher import load_teacher
from pipeline.inference.trained import read_trained
from pipeline.training.building import build_model
from support.launching import REPOSITORY

WORLD = World(rank=0, size=1, device=torch.device("cpu"), cpu_threads=1)
CPU = torch.device("cpu")


class Planted:
    """Unpickling it runs a command."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Callable, tuple]:
        return os.system, (f"touch {self.marker}",)


class PlantedCode(Planted):
    """Unpickling it runs Python."""

    def __reduce__(self) -> tuple[Callable, tuple]:
        return exec, (f"open({str(self.marker)!r}, 'w')",)


class PlantedPickle(Planted):
    """Unpickling it unpickles something else, without restriction."""

    def __reduce__(self) -> tuple[Callable, tuple]:
        return pickle.loads, (pickle.dumps(Planted(self.marker)),)


def _zip(path: Path, content: Any) -> None:
    torch.save(content, path)


def _legacy(path: Path, content: Any) -> None:
    torch.save(content, path, _use_new_zipfile_serialization=False)


def _bare(path: Path, content: Any) -> None:
    path.write_bytes(pickle.dumps(content))


def bait(marker: Path, kind: str) -> dict[str, Any]:
    """A state dict with something beside its tensors."""
    weights: dict[str, Any] = {"head.weight": torch.zeros(10, 192), "head.bias": torch.zeros(10)}
    planted = {"code": PlantedCode, "nested": PlantedPickle}.get(kind, Planted)(marker)
    if kind == "namespace":
        return {"model": weights, "args": Namespace(lr=1e-3, hook=planted)}
    return {"model": weights, "optimizer": planted}


FILES = {
    "command": _zip,
    "code": _zip,
    "nested": _zip,
    "namespace": _zip,
    "legacy": _legacy,
    "bare": _bare,
}


@pytest.fixture(params=FILES)
def planted(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Path, Path]:
    """A malicious file, and the marker that reading it without care would leave."""
    marker, path = tmp_path / "marker", tmp_path / "weights.pth"
    FILES[request.param](path, bait(marker, request.param))
    return path, marker


def test_the_bait_works(planted: tuple[Path, Path]) -> None:
    """Without this, a file that never does anything would pass all tests below."""
    path, marker = planted
    code = "import sys, pickle, torch\ntry: torch.load(sys.argv[1], weights_only=False)\nexcept Exception: pickle.load(open(sys.argv[1], 'rb'))"
    subprocess.run(
        [sys.executable, "-c", code, str(path)], check=True, env={**os.environ, "PYTHONPATH": "tests"}, cwd=REPOSITORY
    )
    assert marker.exists()


def _refused(use: Callable[[], object], marker: Path, path: Path) -> None:
    with pytest.raises(UserError) as error:
        use()
    assert not marker.exists()
    assert str(path) in str(error.value) and "cannot be read" in str(error.value) and "\n" not in str(error.value)


def test_as_a_checkpoint(planted: tuple[Path, Path]) -> None:
    path, marker = planted
    _refused(lambda: read_trained(path), marker, path)
    _refused(lambda: load(path), marker, path)


def test_as_the_beginning_of_a_run(planted: tuple[Path, Path]) -> None:
    path, marker = planted
    config = config_from_dict({"train": {"init_from": str(path)}}, source="a test")
    _refused(lambda: build_model(config, WORLD, [], fresh=True), marker, path)


def test_as_a_teacher(planted: tuple[Path, Path]) -> None:
    path, marker = planted
    config = Config(output_dir="run", train=TrainConfig(teacher=str(path)))
    _refused(lambda: load_teacher(config, CPU), marker, path)


@pytest.mark.parametrize("teacher", ["torchvision:regnet_y_400mf", "timm:regnety_002"])
def test_as_the_weights_of_a_teacher_of_another_library(teacher: str, planted: tuple[Path, Path]) -> None:
    library = teacher.partition(":")[0]
    pytest.importorskip(library, reason=f"{library} is not installed", exc_type=Exception)  # type: ignore[arg-type]
    path, marker = planted
    model = ModelConfig(num_classes=10, image_size=32)
    config = Config(output_dir="run", model=model, train=TrainConfig(teacher=teacher, teacher_weights=str(path)))
    _refused(lambda: load_teacher(config, CPU), marker, path)


def test_under_another_name(planted: tuple[Path, Path], tmp_path: Path) -> None:
    """As model.safetensors or pytorch_model.bin of a folder in timm's layout, and as an exported file."""
    path, marker = planted
    config = '{"architecture": "deit_tiny_patch16_224", "num_classes": 10, "pretrained_cfg": {}}'
    for name in ("model.safetensors", "pytorch_model.bin"):
        folder = tmp_path / f"folder of {name}"
        folder.mkdir()
        (folder / "config.json").write_text(config)
        path.replace(folder / name)
        start = config_from_dict({"train": {"init_from": str(folder)}}, source="a test")
        _refused(lambda: read_trained(folder), marker, folder / name)  # noqa: B023
        _refused(lambda: build_model(start, WORLD, [], fresh=True), marker, folder / name)  # noqa: B023
        (folder / name).replace(path)
    exported = path.replace(tmp_path / "exported.safetensors")
    _refused(lambda: read_trained(exported), marker, exported)


@pytest.mark.parametrize("command", ["pipeline.evaluate --checkpoint {} --data {}", "pipeline.predict {} {}"])
def test_the_commands_end_with_one_sentence(command: str, tmp_path: Path, digits_shards: Path) -> None:
    marker, path = tmp_path / "marker", tmp_path / "weights.pth"
    _zip(path, bait(marker, "command"))
    Image.new("RGB", (8, 8)).save(tmp_path / "cat.png")
    there = tmp_path / "cat.png" if "predict" in command else digits_shards
    done = subprocess.run(
        [sys.executable, "-m", *command.format(path, there).split()], cwd=REPOSITORY, capture_output=True, text=True
    )
    assert done.returncode == 2 and not marker.exists()
    assert done.stderr.count("\n") == 1 and "system, which could run code" in done.stderr
