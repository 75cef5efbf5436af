"""Histograms of what augmentation draws, the same for the authors' side and ours."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

BINS = 12
SIDE = 224  # of the images


def histogram(values: Sequence[float] | np.ndarray, low: float, high: float, bins: int = BINS) -> list[int]:
    """Counts in equal bins from ``low`` to ``high``."""
    counts = np.histogram(np.clip(values, low, high), bins=bins, range=(low, high))[0]
    return counts.tolist()


def crop_histograms(boxes: np.ndarray, rows: int, columns: int, ratio: tuple[float, float]) -> dict[str, list[int]]:
    """Of (n, 4) top, left, height, width."""
    top, left, height, width = boxes.T.astype(float)
    low, high = np.log(ratio)
    return {
        "area": histogram(height * width / (rows * columns), 0, 1),
        "aspect": histogram(np.log(width / height), low - 0.1, high + 0.1),
        "top": histogram(top / np.maximum(rows - height, 1), 0, 1),
        "left": histogram(left / np.maximum(columns - width, 1), 0, 1),
    }


def mixing_histograms(blended: np.ndarray, boxes: np.ndarray, shares: np.ndarray) -> dict[str, list[int]]:
    """Of the weights under Mixup, and of the boxes (n, 4) and weights (n,) under CutMix."""
    top, left, height, width = boxes.T
    return {
        "method": [len(blended), len(boxes)],
        "mixup_weight": histogram(blended, 0, 1),
        "cutmix_weight": histogram(shares, 0, 1),
        "height": histogram(height, 0, SIDE),
        "width": histogram(width, 0, SIDE),
        "top": histogram(top, 0, SIDE),
        "left": histogram(left, 0, SIDE),
        "empty": [int((height * width == 0).sum()), int((height * width > 0).sum())],
    }


def erasing_histograms(boxes: np.ndarray, untouched: int) -> dict[str, list[int]]:
    """Of (n, 4) top, left, height, width."""
    top, left, height, width = boxes.T.astype(float)
    return {
        "erased": [len(boxes), untouched],
        "area": histogram(height * width / SIDE**2, 0, 0.35),
        "aspect": histogram(np.log(height / width), -1.3, 1.3),
        "top": histogram(top / (SIDE - height), 0, 1),
        "left": histogram(left / (SIDE - width), 0, 1),
    }
