"""PerViT's chapters say what applies to each of its models, and draw it; Appendix C's layers are what it says they are."""

from __future__ import annotations

import json

import pytest
import torch
from torch import nn

from pipeline.analysis.chapter import Example, Findings, Request
from pipeline.analysis.pervit import PerViTChapter, RegionsChapter
from pipeline.analysis.pervit_extremes import ExtremesChapter, as_convolution, as_self_attention, convolved
from pipeline.analysis.pervit_maps import ImagesChapter, MapsChapter, initial_maps
from pipeline.analysis.session import check_query
from pipeline.analysis.style import style
from pipeline.errors import UserError
from pipeline.models import create_model
from pipeline.models.common.probe import observed
from pipeline.models.common.vit import SelfAttention

CHAPTERS = (MapsChapter, RegionsChapter, ImagesChapter, PerViTChapter, ExtremesChapter)
GRID = (3, 4)


def small_model(name: str = "pervit_t", **switches: object) -> nn.Module:
    torch.manual_seed(0)
    widths = {"widths": (8, 8, 8, 12)} if name == "pervit_t" else {}
    return create_model(name, num_classes=3, image_size=64, switches=widths | switches).eval()


@torch.no_grad()
def analysed(model: nn.Module, images: int = 2, query: tuple[int, int] | None = None) -> Findings:
    """What all chapters find; the examples are the images, ``images`` of them."""
    pixels = torch.rand(images, 3, 64, 64)
    request = Request(model, 64, query, [Example(f"n{i}.JPEG", "a class", each, each) for i, each in enumerate(pixels)])
    chapters = [chapter(request) for chapter in CHAPTERS]
    for collector in [each for chapter in chapters for each in chapter.collectors] if images else []:
        collector.begin(torch.ones(images, dtype=torch.bool))
        collector.count = images

        def observe(name: str, value: torch.Tensor, to: object = collector) -> None:
            to.see(name, value)
            to.layer += name == to.probes[-1]

        with observed(observe, *collector.probes):
            model(pixels)
    findings = Findings()
    for chapter in chapters:
        chapter.add_findings(findings)
    json.dumps(findings.measures, allow_nan=False)
    return findings


def test_figures_and_measures_of_the_published_model() -> None:
    """Guards against a figure that cannot be drawn, and against other keys than those that the reports read."""
    findings = analysed(small_model(), query=(0, 3))
    assert not findings.omitted
    assert {plot.name for plot in findings.plots} == {
        "phi_p", "initialization", "initialization_norm", "regions", "attention_images", "attention_image_1", "attention_image_2",
        "nonlocality", "impact", "nonlocality_by_component", "extremes",
    }  # fmt: skip
    measures = findings.measures
    for name in ("nonlocality.phi_p", "nonlocality.phi_c", "nonlocality.attention", "impact.phi_p", "impact.phi_c"):
        group, part = name.split(".")
        assert torch.tensor(measures[group][part]).shape == (12, 4)
        assert findings.units[name].startswith("[layer][head]")
        if group == "nonlocality":  # of 4 x 4 tokens: a side of 3 patches is 2 units
            in_patches = torch.tensor(measures["nonlocality_in_patches"][part])
            torch.testing.assert_close(in_patches, 1.5 * torch.tensor(measures[group][part]))
    assert measures["patches_per_unit"] == 1.5 and "1 is 1.5 patches" in str(findings.plots)
    assert {each for layer in measures["regions"] for each in layer} <= set("cpmf") and len(measures["regions"][0]) == 4
    assert sum(measures["region_counts"]["model"]) == 12 * (4 + 3)
    assert measures["components"]["table_1"] == "a" and measures["query"] == [0, 3]
    with style():
        for plot in findings.plots:
            plot.draw()


@pytest.mark.parametrize(
    ("name", "switches", "omitted", "measured"),
    [
        ("pervit_t", {"phi_p": False}, {"phi_p", "initialization", "regions", "impact"}, {"phi_c", "attention"}),
        ("pervit_t", {"phi_c": False}, {"attention_images", "attention_image", "impact"}, {"phi_p", "attention"}),
        ("pervit_t", {"phi_p_distance": "learned"}, {"initialization_norm"}, {"phi_p", "phi_c", "attention"}),
        (
            "pervit_t",
            {"phi_p_neighbours": False, "phi_p_layers": 1, "phi_p_init": "random"},
            {"initialization_norm"},
            {"phi_p", "phi_c", "attention"},
        ),
        ("deit_t", {"peripheral_position": True}, set(), {"phi_p", "phi_c", "attention"}),
    ],
)
def test_ablated_models_get_what_applies(name: str, switches: dict, omitted: set[str], measured: set[str]) -> None:
    """Guards against a traceback for a model of the paper's tables, and a figure that is neither drawn nor explained."""
    findings = analysed(small_model(name, **switches))
    assert set(findings.omitted) == omitted
    assert all(len(reason) > 20 for reason in findings.omitted.values())
    assert set(findings.measures["nonlocality"]) == measured
    with style():
        for plot in findings.plots:
            if plot.name in ("initialization", "nonlocality", "attention_images"):  # those that differ
                plot.draw()


def test_without_images_the_figures_of_the_weights_remain() -> None:
    """Guards against maps that wait for data, and measures of no image."""
    findings = analysed(small_model(), images=0)
    assert {"phi_p", "initialization", "regions", "nonlocality", "extremes"} <= {plot.name for plot in findings.plots}
    assert set(findings.omitted) == {"attention_images", "attention_image", "impact", "nonlocality_by_component"}
    assert set(findings.measures["nonlocality"]) == {"phi_p"} and "impact" not in findings.measures


def test_a_query_outside_the_grid_is_refused() -> None:
    """Guards against an index error, or another token's maps."""
    with pytest.raises(UserError, match="--query is 4,0, but at 64 pixels there are 4 x 4 patches of 16 pixels"):
        check_query(Request(small_model(), 64, (4, 0)))


@torch.no_grad()
def test_heads_are_sorted_by_nonlocality() -> None:
    """Guards against another order than the authors', who sort each layer's heads."""
    model = small_model()
    for block in model.blocks:
        nn.init.normal_(block.position.norm2.bias, std=3)
    chapter = MapsChapter(Request(model, 64))
    omega = chapter.omega_p
    assert (omega.gather(1, chapter.order).diff(dim=1) >= 0).all()
    assert (omega.diff(dim=1) < 0).any()


@torch.no_grad()
def test_initial_maps_are_those_of_a_new_model() -> None:
    """Guards against another initialization in the figure than in the model."""
    model = small_model()
    maps = torch.stack([log_phi[:, 10].exp().unflatten(1, (4, 4)) for log_phi in model.log_phi((4, 4))])
    torch.testing.assert_close(initial_maps(model, (4, 4), (2, 2)), maps)


@pytest.mark.parametrize(("channels", "outputs", "bias"), [(3, 5, True), (1, 9, False)])
@torch.no_grad()
def test_a_layer_of_peripheral_attention_is_a_convolution(channels: int, outputs: int, bias: bool) -> None:
    """Guards against flipped taps, borders and content that shows through (Appendix C: Φc may be anything)."""
    torch.manual_seed(0)
    convolution = nn.Conv2d(channels, outputs, 3, padding=1, bias=bias).double()
    layer = as_convolution(convolution)
    nn.init.normal_(layer.attention.qkv.weight[: 18 * channels])  # queries and keys
    images = torch.randn(2, channels, *GRID, dtype=torch.float64)
    found = convolved(layer, images)
    torch.testing.assert_close(found[:, :outputs], convolution(images), rtol=1e-12, atol=1e-12)
    assert not found[:, outputs:].any()


@torch.no_grad()
def test_a_layer_of_peripheral_attention_is_self_attention() -> None:
    """Guards against a Φp that is only nearly 1."""
    torch.manual_seed(0)
    attention = SelfAttention(18, 9, qkv_bias=False).double()
    nn.init.normal_(attention.qkv.weight)
    x = torch.randn(2, GRID[0] * GRID[1], 18, dtype=torch.float64)
    layer = as_self_attention(attention)
    assert not layer.log_phi(GRID).any()
    torch.testing.assert_close(layer(x, GRID), attention(x), rtol=1e-12, atol=1e-12)
