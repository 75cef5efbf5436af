"""Fixtures of the authors' code (``tests/parity/``), and the numbers that both sides of a comparison make for themselves.

Imported by the tests and by ``tests/parity/make_fixtures.py``, which runs beside the authors' code: nothing of ``pipeline`` here.
"""

from __future__ import annotations

import json
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

FOLDER = Path(__file__).parents[1] / "parity" / "fixtures"
STEPS = 5
LEARNING_RATES = (1e-3, 8e-4, 6e-4, 4e-4, 2e-4)  # of the steps of a trajectory
SMOOTHING = 0.1
CLASSES = 10
BATCH = 4


@dataclass(frozen=True)
class Variant:
    """A small model of a family that both sides can build, for a trajectory.

    Attributes:
        recipe: the config that gives weight decay, betas and epsilon.
        image_size: side of the images.
        branches: residual branches, in order of execution.
        undropped: leading branches whose drop rate is 0 in training.
        drop_path: stochastic depth rate.
    """

    recipe: str
    image_size: int
    branches: int
    undropped: int
    drop_path: float = 0.3


VARIANTS = {
    "pervit": Variant("pervit_t", image_size=64, branches=24, undropped=2),
    "convit": Variant("convit_ti", image_size=64, branches=8, undropped=2),
    "deit": Variant("deit_t", image_size=64, branches=6, undropped=2),
    "lsat_224": Variant("lsat_t_224", image_size=64, branches=12, undropped=0),
    "lsat_32": Variant("lsat_t_32_cifar10", image_size=16, branches=16, undropped=0),
    "posmlp": Variant("posmlp_t", image_size=64, branches=24, undropped=1),
    "gmlp": Variant("gmlp_s", image_size=64, branches=4, undropped=0),
}


def load(name: str) -> dict[str, Any]:
    """A ``.json`` of the fixtures."""
    return json.loads((FOLDER / f"{name}.json").read_text())


def uniforms(name: str, *shape: int) -> np.ndarray:
    """Numbers in [0, 1) that depend on name and shape only. ``RandomState``'s streams are frozen (NumPy's NEP 19)."""
    return np.random.RandomState(zlib.crc32(name.encode())).random_sample(shape)


def noise_like(name: str, *shape: int) -> np.ndarray:
    """Uniform numbers of mean 0 and variance 1."""
    return (uniforms(name, *shape) - 0.5) * 12**0.5


def weight(name: str, shape: tuple[int, ...]) -> np.ndarray:
    """What both sides fill a tensor of the state dict with.

    Args:
        name: in the authors' state dict.
        shape: of the tensor.
    """
    leaf = name.rsplit(".", 1)[-1]
    values = noise_like(name, *shape)
    if leaf == "num_batches_tracked":
        return np.zeros(shape, dtype=np.int64)
    if leaf == "running_var" or (leaf == "weight" and len(shape) == 1):  # the 1-D weights are those of norms
        return 1 + 0.1 * values
    if leaf == "attention_spreads":  # PosMLP: near the unit covariance
        return np.eye(2) + 0.1 * values
    if leaf == "weight":
        return values / np.sqrt(np.prod(shape[1:]))
    return 0.1 * values


@dataclass(frozen=True)
class StepInput:
    """What one step of a trajectory trains on. Image i is mixed with image B - 1 - i (in the labels alone)."""

    images: np.ndarray  # (B, 3, S, S)
    labels: np.ndarray  # (B,)
    own_share: float  # of the image's own label
    noise: np.ndarray  # (B, branches) in [0, 1), for stochastic depth


def step_input(variant: Variant, step: int) -> StepInput:
    """The input of a step, 0 to STEPS - 1."""
    size = variant.image_size
    return StepInput(
        images=noise_like(f"images {step}", BATCH, 3, size, size),
        labels=(uniforms(f"labels {step}", BATCH) * CLASSES).astype(np.int64),
        own_share=float(uniforms(f"share {step}", 1)[0]),
        noise=uniforms(f"noise {step}", BATCH, variant.branches),
    )


def fingerprint(name: str, values: np.ndarray) -> tuple[float, float]:
    """Two numbers that tell a tensor: its norm, and its product with a fixed random tensor of the same shape."""
    return float(np.linalg.norm(values)), float((values * noise_like(f"direction {name}", *values.shape)).sum())


def folded(names: list[str]) -> dict[str, int]:
    """How many names there are of each form, with ``*`` for numbers: ``blocks.*.norm1.weight`` -> 12."""
    forms: dict[str, int] = {}
    for name in names:
        form = ".".join("*" if part.isdigit() else part for part in name.split("."))
        forms[form] = forms.get(form, 0) + 1
    return dict(sorted(forms.items()))
