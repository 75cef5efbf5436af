"""Small models as folders in timm's layout."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch

from pipeline.exporting import Subject, Training, weights_file
from pipeline.models import create_model
from pipeline.models.common.base import VisionModel
from pipeline.models.weights.exported import Description

CLASSES = [*"abcde"]


def small(name: str, image_size: int = 32, switches: Mapping[str, Any] = MappingProxyType({})) -> Subject:
    """A model of that name with random weights, its zeros included, as if it had been trained."""
    torch.manual_seed(0)
    model = create_model(name, len(CLASSES), image_size, switches=switches).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.02 * torch.randn_like(parameter)
    mean, std = [0.4, 0.5, 0.6], [0.2, 0.25, 0.3]
    its = Description(name, len(CLASSES), image_size, dict(switches), CLASSES, mean, std, 0.9, "bf16", 7, "ema", "ours")
    return Subject(model, its, Training())


def export_small(name: str, folder: Path, image_size: int = 32, switches: Mapping[str, Any] = MappingProxyType({})) -> Path:
    """Export :func:`small` into a new folder."""
    folder.mkdir(parents=True)
    weights_file.export_timm(small(name, image_size, switches), folder)
    return folder


def scores(model: torch.nn.Module | VisionModel, image_size: int = 32) -> torch.Tensor:
    """Of two random images, the same for all models."""
    with torch.no_grad():
        return model(torch.randn(2, 3, image_size, image_size, generator=torch.Generator().manual_seed(1)))
