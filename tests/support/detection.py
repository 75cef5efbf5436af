"""Runs of the detection example: whether a detector can be built here, and a config of seconds."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import yaml

from pipeline.errors import install_extra


def needs_torchvision() -> None:
    """Skip the test where torchvision's operators do not load beside this PyTorch, or pycocotools is missing."""
    from examples.detection.model import import_torchvision
    from pipeline.errors import UserError

    try:
        import_torchvision()
    except UserError as error:
        pytest.skip(str(error))
    if importlib.util.find_spec("pycocotools") is None:
        pytest.skip(f"there is no package 'pycocotools': {install_extra('detection')}")


def write_config(folder: Path, **sections: dict) -> Path:
    """A config whose run takes seconds, with other keys in some sections."""
    config = {
        "output_dir": str(folder / "run"),
        "model": {"name": "posmlp_narrow", "image_size": 64, "pyramid_width": 16, "drop_path": 0.1},
        "data": {"short_side": 64, "long_side": 80, "num_threads": 1},
        "train": {"global_batch_size": 4, "micro_batch_size": 2, "max_steps": 6},
        "optim": {"lr": 1e-3, "warmup_steps": 2},
        "eval": {"every_epochs": None},
        "checkpoint": {"every_steps": 2},
        "log": {"every_steps": 1},
    }
    for name, keys in sections.items():
        config[name] = {**config[name], **keys}
    path = folder / "config.yaml"
    path.write_text(yaml.safe_dump(config))
    return path
