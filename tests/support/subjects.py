"""Small models as subjects of an export."""

from __future__ import annotations

import torch

from pipeline.exporting import Subject, Training
from pipeline.models.common.base import VisionModel
from pipeline.models.weights.exported import Description

CLASSES = ["cat", "dog", "a | b"]


def subject_of(model: VisionModel, name: str, image_size: int, classes: int) -> Subject:
    """A subject of a model whose weights are moved away from their initial values, of which many are zero."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn(parameter.shape, generator=generator))
    names = [*CLASSES, *map(str, range(classes))][:classes]
    described = (name, classes, image_size, {}, names, [0.5] * 3, [0.25] * 3, 0.9, "fp32", 7, "model", "ours")
    return Subject(model.eval(), Description(*described), Training())
