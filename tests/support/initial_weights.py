"""Distributions of initial weights, tensor by tensor, the same for the authors' side and ours.

A model is made with :data:`SEEDS` seeds. Each statistic of a tensor has a mean over the seeds and a standard error, which says how
near another set of draws must come; where nothing is drawn the error is 0 and the values themselves are compared.
Imported by ``tests/parity/make_fixtures.py`` too: nothing of ``pipeline`` here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
import torch

from support import parity

SEEDS = 32
TABLES = ("rel_indices",)  # of ConViT and PosMLP: computed, not learned
STATISTICS = ("mean", "std", "min", "max", "product")  # of a tensor's elements; product: with a fixed random tensor
# Standard errors by which a mean may be off. It has the error of both sides; Student's t of 31 degrees of freedom exceeds 6 once
# in 800,000 times, and about 3,000 statistics are compared.
ERRORS = 6 * 2**0.5
ROUNDING = 1e-6  # of the largest element: a value that is not drawn is computed in single precision on both sides


def summarize(make: Callable[[], Mapping[str, torch.Tensor]]) -> dict[str, np.ndarray]:
    """The statistics of each floating-point tensor.

    Args:
        make: a state dict with the authors' names, newly drawn from PyTorch's default generator; :data:`TABLES` are left out.

    Returns:
        ``names`` (P,); ``sizes`` (P,), numbers of elements; ``means`` and ``errors`` (P, 5) of :data:`STATISTICS` over the seeds.
    """
    found: dict[str, list[list[float]]] = {}
    sizes: dict[str, int] = {}
    for seed in range(SEEDS):
        torch.manual_seed(seed)
        for name, value in make().items():
            if value.is_floating_point() and not name.endswith(TABLES):
                found.setdefault(name, []).append(_statistics(name, value.detach().double().numpy()))
                sizes[name] = value.numel()
    names = sorted(found)
    per_seed = np.array([found[name] for name in names])  # (P, seeds, 5)
    return {
        "names": np.array(names),
        "sizes": np.array([sizes[name] for name in names]),
        "means": per_seed.mean(1).astype(np.float32),
        "errors": (per_seed.std(1, ddof=1) / SEEDS**0.5).astype(np.float32),
    }


def _statistics(name: str, values: np.ndarray) -> list[float]:
    product = (values * parity.noise_like(f"direction {name}", *values.shape)).sum()
    return [values.mean(), values.std(), values.min(), values.max(), product]


def differences(ours: Mapping[str, np.ndarray], theirs: Mapping[str, np.ndarray]) -> list[str]:
    """A line for each statistic that differs by more than chance and rounding."""
    alone = set(ours["names"].tolist()) ^ set(theirs["names"].tolist())
    if alone:
        return [f"{name} is on one side only" for name in sorted(alone)]
    largest = np.abs(theirs["means"][:, 2:4]).max(1)  # (P,) of min and max
    rounding = ROUNDING * largest[:, None] * np.ones(len(STATISTICS))  # (P, 5)
    rounding[:, STATISTICS.index("product")] *= theirs["sizes"] ** 0.5
    limits = ERRORS * theirs["errors"] + rounding
    return [
        f"{ours['names'][row]}: {STATISTICS[column]} is {ours['means'][row, column]:.5g}, that of the authors' code "
        f"{theirs['means'][row, column]:.5g} +- {limits[row, column]:.2g}"
        for row, column in zip(*np.nonzero(np.abs(ours["means"] - theirs["means"]) > limits))
    ]
