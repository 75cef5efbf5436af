"""config.yaml and environment.json: how a run was started."""

from __future__ import annotations

import json
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import pytest
import torch

from pipeline.cluster.world import World
from pipeline.config import Config
from pipeline.logs import run_files

WORLD = World(rank=0, size=1, device=torch.device("cpu"), cpu_threads=1)


@pytest.fixture(autouse=True)
def group() -> Iterator[None]:
    """A process group of this process alone."""
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


def packages(folder: Path) -> list[dict[str, str]]:
    return [start["packages"] for start in json.loads((folder / "environment.json").read_text())]


def test_either_build_of_dali(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against a run that cannot start where DALI for CUDA 12 is installed, which has another name."""

    def with_cuda_12(name: str) -> str:
        if name == "nvidia-dali-cuda130":
            raise PackageNotFoundError(name)
        return "2.4.0" if name == "nvidia-dali-cuda120" else version(name)

    monkeypatch.setattr(run_files, "version", with_cuda_12)
    run_files.write_run_files(Config(output_dir=str(tmp_path)), WORLD, 1, "a test", 2)
    (found,) = packages(tmp_path)
    assert found["nvidia-dali-cuda120"] == "2.4.0" and found["torch"] == version("torch")
    assert "nvidia-dali-cuda130" not in found and "timm" not in found


def test_a_changed_version_is_said(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    """Guards against a resume with other operators, or another network of timm's, that nobody notices."""
    config = Config(output_dir=str(tmp_path))
    run_files.write_run_files(config, WORLD, 1, "a test", 2)
    run_files.write_run_files(config, WORLD, 2, "a test", 2)
    assert "note:" not in capsys.readouterr().out
    starts = json.loads((tmp_path / "environment.json").read_text())
    starts[-1]["packages"] |= {"torch": "2.0.0"}
    (tmp_path / "environment.json").write_text(json.dumps(starts))
    run_files.write_run_files(config, WORLD, 3, "a test", 2)
    said = capsys.readouterr().out
    assert f"note: since the run's last start torch 2.0.0 has become {version('torch')}: results may differ" in said
    assert len(packages(tmp_path)) == 3


def test_the_version_of_timm_is_kept_for_its_models(tmp_path: Path) -> None:
    pytest.importorskip("timm", reason="timm is not installed")
    config = Config(output_dir=str(tmp_path), model={"name": "timm:resnet18"})
    run_files.write_run_files(config, WORLD, 1, "a test", 2)
    assert packages(tmp_path)[0]["timm"] == version("timm")


def test_a_start_says_what_an_audit_asks_for(tmp_path: Path) -> None:
    """Settings that any start may change, of one whose checkpoints may be gone by then; one process has nobody to share with."""
    config = Config(output_dir=str(tmp_path)).with_values(
        {"eval.every_epochs": 2.0, "train.max_steps": 7, "train.zero_stage": 1}
    )
    run_files.write_run_files(config, WORLD, 1, "a test")
    (start,) = json.loads((tmp_path / "environment.json").read_text())
    settings = {"eval.every_epochs": 2.0, "log.samples": False, "train.max_steps": 7, "train.micro_batch_size": 128}
    assert start["settings"] == settings and start["zero_stage"] == 0
