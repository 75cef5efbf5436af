"""The ConViT chapter: its numbers against slow implementations of the paper's equations, and what its ablations leave out."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from pipeline.analysis.chapter import Example, Findings, Request
from pipeline.analysis.convit import ConViTChapter, gates, initial_positions, positions
from pipeline.analysis.measures import (
    AttentionDistance,
    look,
)
from pipeline.analysis.session import chapters_of
from pipeline.models import create_model, load_reference_state_dict
from pipeline.models.common.probe import recorded
from pipeline.models.convit import ConViT
from support.golden import Golden, make_input

GOLDEN = Golden("convit_tiny")
CENTRE = 7 * 14 + 7


@pytest.fixture(scope="module")
def golden() -> ConViT:
    return load_reference_state_dict(create_model("convit_ti").double(), GOLDEN.weights("B")).eval()


def small(**switches: object) -> ConViT:
    """ConViT-Ti on 4 x 4 patches."""
    torch.manual_seed(0)
    return create_model("convit_ti", num_classes=5, image_size=64, switches=switches).eval()


def found(model: ConViT, images: torch.Tensor | None = None, query: tuple[int, int] | None = None) -> tuple[Findings, list]:
    """What the chapter finds, with all images averaged and the first as an example; and its collectors."""
    size = 64 if images is None else images.shape[-1]
    examples = [] if images is None else [Example("a/1.JPEG", "a", torch.rand(3, size, size), images[0])]
    chapter = ConViTChapter(Request(model, size, query, examples))
    collectors = chapter.collectors
    if images is not None:
        with torch.no_grad():
            look(model, images, torch.ones(len(images), dtype=torch.bool), collectors)
        for each in collectors:
            each.count = len(images)
    findings = Findings()
    chapter.add_findings(findings)
    return findings, collectors


def slow_distance(attention: torch.Tensor, side: int) -> float:
    """Eq. 8 for one head: (1 / L) Σ_ij A_ij |δ_ij|."""
    total = 0.0
    rows = attention.tolist()
    for i in range(side * side):
        for j in range(side * side):
            total += rows[i][j] * math.hypot(i // side - j // side, i % side - j % side)
    return total / side**2


def test_gates_are_those_of_equation_7(golden: ConViT) -> None:
    """Guards against raw λ instead of σ(λ), and against gates of layers that have none."""
    weights = GOLDEN.weights("B")
    expected = [
        [1 / (1 + math.exp(-value)) for value in weights[f"blocks.{layer}.attn.gating_param"].tolist()] for layer in range(10)
    ]
    measured = gates(golden)
    np.testing.assert_allclose(np.array(measured[:10]), expected, rtol=1e-6)
    assert measured[10:] == [None, None]
    masked = small(mask_content_layers=2)
    assert gates(masked)[:3] == [[1.0] * 4, [1.0] * 4, pytest.approx([1 / (1 + math.exp(-1))] * 4)]


def test_nonlocality_is_that_of_equation_8(golden: ConViT) -> None:
    """Guards against another distance, another normalization, and a class token that counts: GPSA layers have none, the last
    two have one first, whose row and column are left out and the rest normalized again."""
    collector = AttentionDistance((14, 14))
    images = make_input(224).double()
    with torch.no_grad(), recorded("attention") as values:
        golden(images)
    with torch.no_grad():
        look(golden, images, torch.tensor([True, False]), [collector])  # the second is padding
    collector.count = 1
    measured = collector.mean("distance")
    for layer, head in ((0, 1), (9, 3), (10, 0), (11, 2)):
        attention = values["attention"][layer][0, head]
        if len(attention) == 197:
            patches = attention[1:, 1:]
            attention = torch.stack([row / sum(row.tolist()) for row in patches])
        assert measured[layer, head].item() == pytest.approx(slow_distance(attention, 14), rel=1e-6), (layer, head)


def test_positions_reproduce_the_authors_code(golden: ConViT) -> None:
    """Guards against offsets that are mirrored or transposed: after training, and at initialization with the paper's strength."""
    np.testing.assert_allclose(positions(golden, (14, 14))[0, :, CENTRE], GOLDEN.arrays["gpsa0_pos_rowq77_B"], rtol=1e-9)
    maps = initial_positions(4, (14, 14), 1.0)
    np.testing.assert_allclose(maps[:, CENTRE], GOLDEN.arrays["init_gpsa0_pos_rowq77_f64"], rtol=1e-9)


@pytest.mark.parametrize(("heads", "strength"), [(4, 0.3), (9, 2.0)])
def test_initial_positions_are_those_of_equation_5(heads: int, strength: float) -> None:
    """Guards against a locality strength that is not a factor of the scores: softmax over k of -α |δ - Δ|²."""
    side, kernel = 5, math.isqrt(heads)
    maps = initial_positions(heads, (side, side), strength)
    for head in range(heads):
        dx, dy = head // kernel - (kernel - 1) / 2, head % kernel - (kernel - 1) / 2
        for q in (0, 7, 12):
            scores = []
            for k in range(side * side):
                x, y = k % side - q % side, k // side - q // side
                scores.append(math.exp(-strength * ((x - dx) ** 2 + (y - dy) ** 2)))
            expected = [score / sum(scores) for score in scores]
            np.testing.assert_allclose(maps[head, q], expected, rtol=1e-6, err_msg=f"head {head} query {q}")


def test_maps_are_those_of_the_query() -> None:
    """Guards against another query, a class token taken for a patch, and an average that is none."""
    model, images = small(), torch.randn(3, 3, 64, 64, generator=torch.Generator().manual_seed(1))
    findings, _ = found(model, images, query=(1, 3))
    with torch.no_grad(), recorded("attention", "position") as values:
        model(images)
    maps, mean = findings.measures["attention_maps"][0], findings.measures["average_attention"]
    for layer, attention in enumerate(values["attention"]):
        patches = attention[:, :, -16:, -16:][:, :, 1 * 4 + 3].unflatten(-1, (4, 4))  # (3, heads, 4, 4)
        np.testing.assert_allclose(maps[layer], patches[0], rtol=1e-3)  # four digits are kept
        np.testing.assert_allclose(mean[layer], sum(patches.double()) / 3, rtol=1e-3)
    assert findings.measures["average_attention"][11][0] and len(findings.measures["position_maps"]) == 10
    distances = findings.measures["position_distance"]
    assert distances[10:] == [None, None]
    assert distances[3][2] == pytest.approx(slow_distance(values["position"][3][2], 4), rel=1e-5)
    assert set(findings.units) >= {"gate", "position_distance", "average_attention", "attention_maps"}


ALL = {"gates", "attention_maps_1", "average_maps", "position_maps", "position_distance", "initial_positions"}


@pytest.mark.parametrize(
    ("switches", "missing"),
    [
        ({}, {}),
        ({"gpsa_layers": 0}, dict.fromkeys(ALL - {"attention_maps_1", "average_maps"}, "gpsa_layers is 0")),
        ({"positional_gating": False}, {"gates": "positional_gating is false"}),
        ({"train_gating": False}, {"gates": "frozen at 0.5"}),
        ({"train_gpsa": False}, {"gates": "frozen at their initial value"}),
        ({"conv_init": False}, {"initial_positions": "conv_init is false"}),
        ({"gpsa_layers": 3, "locality_strength": 0.5}, {}),
    ],
)
def test_ablations_have_the_figures_that_apply(switches: dict, missing: dict[str, str]) -> None:
    """Guards against a figure that fails, or says something untrue, for a model without what it shows, and a gap without a reason."""
    findings, _ = found(small(**switches), torch.randn(2, 3, 64, 64))
    assert {plot.name for plot in findings.plots} == ALL - missing.keys()
    assert findings.omitted.keys() == missing.keys()
    for name, reason in missing.items():
        assert reason in findings.omitted[name]


def test_figures_are_drawn() -> None:
    """Guards against a figure that cannot be drawn, with and without images, and gates that are not at their maps."""
    pytest.importorskip("matplotlib")
    from pipeline.analysis.style import style

    model = small(gpsa_layers=2)
    findings, _ = found(model, torch.randn(2, 3, 64, 64))
    with style():
        figures = {plot.name: plot.draw() for plot in findings.plots}
    texts = [text.get_text() for text in figures["attention_maps_1"].axes[1].texts]
    assert texts == ["0.73"] * 8, "one gate for each head of the two GPSA layers"
    assert all(plot.caption and plot.title and plot.source for plot in findings.plots)

    without, _ = found(model)
    assert without.omitted == dict.fromkeys(("attention_maps", "average_maps"), "It needs images: pass --data.")
    with style():
        assert all(plot.draw() for plot in without.plots)


def test_chapter_is_of_convit_alone() -> None:
    """Guards against a chapter that nobody calls, or that a DeiT gets."""
    request = Request(small(), 64)
    assert any(isinstance(each, ConViTChapter) for each in chapters_of(request))
    assert not ConViTChapter.applies(create_model("deit_t", 5, 64))
