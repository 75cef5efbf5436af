"""An exported file of a small model with random weights."""

from __future__ import annotations

from pathlib import Path

import torch

from pipeline.models import create_model
from pipeline.models.weights.exported import Description, write_exported


def write_model(path: Path, classes: list[str]) -> Path:
    """A small PerViT with random weights; scores far enough apart that rounding changes no order."""
    torch.manual_seed(0)
    switches = {"widths": [16, 16, 16, 16]}
    weights = create_model("pervit_t", len(classes), 32, switches=switches).state_dict()
    weights["head.weight"] *= 50
    described = ("pervit_t", len(classes), 32, switches, classes, [0.5] * 3, [0.25] * 3, 0.9, "fp32", 0, "model", "ours")
    write_exported(path, weights, Description(*described))
    return path
