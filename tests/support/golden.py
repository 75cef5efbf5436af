"""Golden vectors: what the authors' code computes with weights and images that are functions of their names and shapes.

In ``tests/golden/`` each variant has a ``.json`` (the authors' key names and shapes, and figures) and a ``.npz`` (arrays). Two rules
fill the weights: A with small values, whose outputs tell the epsilons apart, and B with a stronger signal.
"""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import numpy as np
from torch import Tensor

FOLDER = Path(__file__).parents[1] / "golden"
RULES = ("A", "B")

_spec = importlib.util.spec_from_file_location("fill_rule", FOLDER / "fill_rule.py")
_fill_rule = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(_fill_rule)


class Golden:
    """One variant.

    Attributes:
        meta: the ``.json``.
        arrays: name -> array of the ``.npz``.
    """

    def __init__(self, variant: str) -> None:
        self.meta: dict = json.loads((FOLDER / f"{variant}.json").read_text())
        self.arrays: dict[str, np.ndarray] = dict(np.load(FOLDER / f"{variant}.npz"))

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The authors' key name -> shape of everything in their state dict."""
        return {key: tuple(shape) for key, shape, *_ in self.meta["keys"]}

    def weights(self, rule: str) -> dict[str, Tensor | None]:
        """The authors' key name -> what the rule fills it with; None for a fixed table."""
        return {key: _fill_rule.fill(key, shape, rule) for key, shape in self.shapes().items()}


def make_input(size: int) -> Tensor:
    """The two images (2, 3, size, size) that the golden outputs belong to."""
    return _fill_rule.make_input(size)


def assert_close(found: Tensor, expected: np.ndarray, tolerance: float) -> None:
    """All differences at most ``tolerance`` times the largest magnitude expected."""
    assert np.abs(found.double().numpy() - expected).max() <= tolerance * np.abs(expected).max()
