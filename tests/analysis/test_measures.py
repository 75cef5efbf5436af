"""The measures against the papers' equations, written as loops over queries, keys and heads."""

from __future__ import annotations

import math

import pytest
import torch

from pipeline.analysis.measures import (
    REGIONS,
    impact,
    mean_attention_distance,
    nonlocality,
    query_key_distances,
    region_radii,
    region_scores,
)

ROWS, COLUMNS = 3, 4  # not square: rows and columns must not be exchanged
TOKENS = ROWS * COLUMNS


def attention(layers: int = 2, heads: int = 3) -> torch.Tensor:
    """(layers, heads, N, N) float32, positive."""
    return torch.rand(layers, heads, TOKENS, TOKENS, generator=torch.Generator().manual_seed(1))


def distance(query: int, key: int) -> float:
    """Euclidean distance of two tokens, numbered row by row, in patches."""
    return math.hypot(query // COLUMNS - key // COLUMNS, query % COLUMNS - key % COLUMNS)


def assert_same(found: torch.Tensor, expected: list) -> None:
    """To 1e-12 of the value: both are float64."""
    assert found.dtype == torch.float64
    torch.testing.assert_close(found, torch.tensor(expected, dtype=torch.float64), rtol=1e-12, atol=1e-12)


def test_distances_are_those_of_a_grid_row_by_row() -> None:
    """Guards against exchanged axes and against distances from matrix products, which are not 0 on the diagonal."""
    assert_same(query_key_distances(ROWS, COLUMNS), [[distance(q, k) for k in range(TOKENS)] for q in range(TOKENS)])


def test_nonlocality_is_equation_13() -> None:
    """Ω = 1 / |I|² Σ_q Σ_k Φ_qk ‖q - k‖, for each layer and head: guards against another normalization."""
    phi = attention()
    expected = [
        [sum(float(head[q, k]) * distance(q, k) for q in range(TOKENS) for k in range(TOKENS)) / TOKENS**2 for head in layer]
        for layer in phi
    ]
    assert_same(nonlocality(phi, query_key_distances(ROWS, COLUMNS)), expected)


def test_the_attention_distance_is_convits_equation_8() -> None:
    """D_loc = 1 / L Σ_ij A_ij ‖δ_ij‖ of normalized rows; N times Ω of the same map."""
    rows = attention().double().softmax(-1)
    expected = [
        [sum(float(head[q, k]) * distance(q, k) for q in range(TOKENS) for k in range(TOKENS)) / TOKENS for head in layer]
        for layer in rows
    ]
    distances = query_key_distances(ROWS, COLUMNS)
    assert_same(mean_attention_distance(rows, distances), expected)
    torch.testing.assert_close(mean_attention_distance(rows, distances), TOKENS * nonlocality(rows, distances))


def test_impact_is_equation_12() -> None:
    """Ψ = 1 / ‖Φa - Φ‖_F: guards against another norm, and against losing the infinity of equal attentions."""
    phi, mixed = attention(), attention().flip(-1)
    expected = [
        [
            1 / math.sqrt(sum((float(m[q, k]) - float(p[q, k])) ** 2 for q in range(TOKENS) for k in range(TOKENS)))
            for p, m in zip(*layers)
        ]
        for layers in zip(phi, mixed)
    ]
    assert_same(impact(phi, mixed), expected)
    assert impact(phi, phi).isinf().all()


def test_regions_are_equation_11_with_the_intervals_of_appendix_b() -> None:
    """Each pair counts in the region whose interval [inner, outer) holds its distance; far pairs count nowhere."""
    phi, radii = attention(), region_radii(ROWS, COLUMNS)
    expected = [
        [
            [
                sum(float(head[q, k]) for q in range(TOKENS) for k in range(TOKENS) if inner <= distance(q, k) < outer)
                / TOKENS**2
                for inner, outer in zip((0.0, *radii), radii)
            ]
            for head in layer
        ]
        for layer in phi
    ]
    found = region_scores(phi, ROWS, COLUMNS)
    assert found.shape[-1] == len(REGIONS)
    assert_same(found, expected)


def test_the_radii_are_the_papers() -> None:
    """Appendix B's figures for 14 x 14 tokens; each disc covers its angle's share of the grid, which 220° fills."""
    assert region_radii(14, 14) == pytest.approx((1.19, 3.37, 5.83, 7.90), abs=5e-3)
    for radius, angle in zip(region_radii(7, 5), (5, 40, 120, 220)):
        assert math.pi * radius**2 / 35 == pytest.approx(angle / 220)
