"""Measure attention maps. They are (..., N, N), query before key, on a grid of N = rows · columns tokens, row by row.

Φa is the mixed attention Φc ⊙ Φp as PerViT defines it below its Eq. 5, before its rows are normalized. Φc is exp(τ Q Kᵀ - row
maximum), as in the authors' code and as Appendix D says ("the input to the exponential function is normalized"): the factor cancels
in the layer's output, but not in a measure of Φc or Φa.
"""

from __future__ import annotations

import math
from typing import Any, Literal

import torch
from torch import Tensor

Region = Literal["c", "p", "m", "f"]  # central, para-central, mid and far peripheral
REGIONS: tuple[Region, ...] = ("c", "p", "m", "f")
_ANGLES, _FIELD = (5, 40, 120, 220), 220  # degrees of the visual field (PerViT, Appendix B)


def query_key_distances(rows: int, columns: int, device: torch.device | None = None) -> Tensor:
    """R^euc: Euclidean distance of every query from every key, in patches.

    Returns:
        (N, N) float64.
    """
    y, x = torch.meshgrid(torch.arange(rows), torch.arange(columns), indexing="ij")
    places = torch.stack([y, x], dim=-1).flatten(0, 1).double().to(device)  # (N, 2)
    return torch.cdist(places, places, compute_mode="donot_use_mm_for_euclid_dist")


def nonlocality(phi: Tensor, distances: Tensor) -> Tensor:
    """Ω: mean over all pairs of attention times distance, in patches (PerViT, Eq. 13).

    Args:
        phi: (..., N, N).
        distances: (N, N), see :func:`query_key_distances`.

    Returns:
        (...) float64.
    """
    return (phi.double() * distances).mean(dim=(-2, -1))


def mean_attention_distance(attention: Tensor, distances: Tensor) -> Tensor:
    """D_loc: distance from the query at which a head looks, in patches, mean over queries (ConViT, Eq. 8).

    Args:
        attention: (..., N, N), rows sum to 1.
        distances: (N, N).

    Returns:
        (...) float64: N times :func:`nonlocality`.
    """
    return (attention.double() * distances).sum(dim=(-2, -1)) / distances.shape[0]


def impact(phi: Tensor, mixed: Tensor) -> Tensor:
    """Ψ: inverse of the Frobenius distance of one attention from the mixed one (PerViT, Eq. 12).

    Args:
        phi: (..., N, N), Φp or Φc.
        mixed: (..., N, N), Φa.

    Returns:
        (...) float64; infinite where both are equal.
    """
    return torch.linalg.matrix_norm(mixed.double() - phi.double()).reciprocal()


def region_radii(rows: int, columns: int) -> tuple[float, float, float, float]:
    """Outer radii of the four peripheral regions, in patches (PerViT, Eq. 37 and 38): a disc of radius r covers the part of the
    grid that its angle is of the visual field's 220°. 1.19, 3.37, 5.83 and 7.90 on 14 x 14."""
    return tuple(math.sqrt(rows * columns * angle / (_FIELD * math.pi)) for angle in _ANGLES)  # type: ignore[return-value]


def region_scores(phi: Tensor, rows: int, columns: int) -> Tensor:
    """The bracket of PerViT's Eq. 11: attention that falls into each region, mean over all pairs.

    Args:
        phi: (..., N, N).
        rows, columns: of the grid.

    Returns:
        (..., 4) float64, in the order of :data:`REGIONS`. Pairs beyond the last radius count nowhere.
    """
    distances = query_key_distances(rows, columns, phi.device)
    inner, scores = 0.0, []
    for outer in region_radii(rows, columns):
        inside = (distances >= inner) & (distances < outer)  # (N, N)
        scores.append((phi.double() * inside).mean(dim=(-2, -1)))
        inner = outer
    return torch.stack(scores, dim=-1)


def rounded(values: Tensor, digits: int = 5) -> Any:
    """Nested lists with so many significant digits, for ``analysis.json``; None for what is not finite, which JSON cannot hold."""

    def convert(value: Any) -> Any:
        if isinstance(value, list):
            return [convert(item) for item in value]
        return float(f"{value:.{digits}g}") if math.isfinite(value) else None

    return convert(values.tolist())


def finite(values: Tensor) -> Any:
    """Nested lists, in full precision; None for what is not finite."""
    return rounded(values, 17)
