"""LSAT's chapter: weights of the shifted variants and attention distances, against loops over the papers' equations."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from pipeline.analysis.lsat import LSATChapter, pair_distances, place_name
from pipeline.models import create_model, load_reference_state_dict
from pipeline.models.common.probe import recorded
from pipeline.models.lsat.blocks import SHIFTS_32, roll
from pipeline.models.lsat.model import LSAT, LSATLayout, LSATSwitches
from pipeline.models.lsat.table6 import SwinBlock
from support.analysed import draw_all, findings_of, names
from support.golden import Golden, make_input

FIGURES = {"shift_weights", "shift_weights_by_place", "shift_offsets_on_images", "shift_weights_on_image", "attention_distance"}


def small_model(switches: dict | None = None) -> LSAT:
    """Narrow LSAT for 16 x 16 pixels on two levels: grids of 16 and 8, so that Swin has four windows."""
    torch.manual_seed(0)
    layout = LSATLayout((16, 16), (2, 4), (2, 1), 3, 1, 1, SHIFTS_32, kv_heads="shared")
    model = LSAT(layout, num_classes=3, image_size=16, switches=LSATSwitches(**(switches or {}))).double()
    for parameter in model.parameters():  # fresh weights attend all but evenly
        parameter.data += 0.3 * torch.randn_like(parameter)
    return model


def images(count: int, size: int = 16) -> torch.Tensor:
    return torch.randn(count, 3, size, size, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("rule", "AB")
def test_shift_weights_of_the_authors_weights_by_loops(rule: str) -> None:
    """Guards against another order of shifts, heads or places, another scale, and sums that do not weigh images alike: Eq. 1 to 3 of
    every patch and head by hand, with the golden weights."""
    golden = Golden("lsat_cifar_tiny")
    model = load_reference_state_dict(
        create_model("lsat_t_32", num_classes=10, image_size=32).double(), golden.weights(rule)
    ).eval()
    found = findings_of(LSATChapter, model, 32, make_input(32).double(), batch=1).measures

    attention, level = model.levels[0].blocks[0].attention, model.levels[0]
    width, heads = 192, 4
    with torch.no_grad():
        tokens = model.embedding(make_input(32).double()) + level.position.table.transpose(0, 1)  # (2, 1024, 18, 192)
        tokens = F.layer_norm(tokens, (width,), level.norm1.weight, level.norm1.bias, 1e-6)
        queries = (tokens[:, :, 0] @ attention.query.weight.T + attention.query.bias).numpy()
        keys = (tokens @ attention.key_value.weight[: width // heads].T + attention.key_value.bias[: width // heads]).numpy()
    mean = np.zeros((heads, 1024, 18))
    distance, used = np.zeros(heads), np.zeros(heads)
    lengths = [math.hypot(down, right) for down, right in SHIFTS_32.shifts]
    for image in range(2):
        for patch in range(1024):
            for head in range(heads):
                query = queries[image, patch, head * width // heads : (head + 1) * width // heads]
                scores = [float(query @ key) / math.sqrt(width / heads) for key in keys[image, patch]]
                shares = [math.exp(score - max(scores)) for score in scores]
                shares = [share / sum(shares) for share in shares]
                mean[head, patch] += np.array(shares) / 2
                distance[head] += sum(share * length for share, length in zip(shares, lengths)) / 2048
                used[head] += math.exp(-sum(share * math.log(share) for share in shares)) / 2048
    np.testing.assert_allclose(found["shift_weights"], [mean.mean(1)], rtol=1e-6)
    np.testing.assert_allclose(
        np.array(found["shift_weights_by_place"]).reshape(heads, 18, 1024), mean.transpose(0, 2, 1), atol=1e-6
    )
    np.testing.assert_allclose(found["shift_distance"], [distance], rtol=1e-6)
    np.testing.assert_allclose(found["used_shifts"], [used], rtol=1e-6)
    assert found["shifts"] == [list(shift) for shift in SHIFTS_32.shifts]


def test_offsets_of_an_example_by_loops() -> None:
    """Guards against down taken for right, and against arrows that point where the content moved instead of where the patch lies."""
    model, batch = small_model().eval(), images(1)
    found = findings_of(LSATChapter, model, 16, batch).measures["shift_examples"]
    with torch.no_grad(), recorded("attention") as values:
        model(batch)
    weights = values["attention"][0][0]  # (heads, 256, 1, 18)
    for head in range(2):
        for row in range(16):
            for column in range(16):
                down = right = 0.0
                for weight, (y, x) in zip(weights[head, 16 * row + column, 0].tolist(), SHIFTS_32.shifts):
                    down -= (weight - 1 / 18) * y
                    right -= (weight - 1 / 18) * x
                assert found["offsets"][0][head][row][column] == pytest.approx([down, right], abs=1e-4)


@pytest.mark.parametrize("shift", SHIFTS_32.shifts)
def test_a_variant_is_named_by_where_its_patch_lies(shift: tuple[int, int]) -> None:
    """Guards against a sign that turns the figures around: the shifted image shows, in a patch's place, the pixel of that name."""
    image = torch.arange(64.0).view(1, 1, 8, 8)
    down, right = (int(each) for each in place_name(shift).split(", "))
    assert roll(image, shift)[0, 0, 4, 4] == image[0, 0, 4 + down, 4 + right]


@pytest.mark.parametrize("switches", [{}, {"shifts": "none"}, {"local": "swin_pair"}, {"local": "cvt"}], ids=str)
def test_attention_distance_by_loops(switches: dict) -> None:
    """Guards against distances on another grid, within wrong windows or to wrong places of CvT's keys: ConViT's Eq. 8, all pairs."""
    model, batch = small_model(switches).eval(), images(2)
    measures = findings_of(LSATChapter, model, 16, batch).measures
    found = measures["mean_attention_distance"]
    with torch.no_grad(), recorded("attention") as values:
        model(batch)
    maps = [each.numpy() for each in values["attention"]]
    assert len(found) == len(maps) == len(measures["mean_attention_distance_uniform"])
    for layer, each in enumerate(maps):  # (2, heads, groups, L, S)
        if layer == 0 and not switches:  # the shifted variants of one patch
            assert found[0] is None and measures["mean_attention_distance_uniform"][0] is None
            continue
        groups, length, keys = each.shape[2:]
        expected = np.zeros(each.shape[1])
        for group in range(groups):
            for query in range(length):
                for key in range(keys):
                    if groups > 1:  # Swin at 16 x 16: windows of 8, the second layer's moved by 4; wrapped pairs have no weight
                        shift = 4 * (layer == 1)
                        corner = np.array(divmod(group, 2)) * 8 + shift
                        y, x = ((corner + np.array(divmod(token, 8))) % 16 for token in (query, key))
                    else:
                        side = math.isqrt(length)
                        y, x = (
                            np.array(divmod(query, side)),
                            np.array(divmod(key, math.isqrt(keys))) * (2 if keys < length else 1),
                        )
                    expected += each[:, :, group, query, key].mean(0) * math.dist(y, x) / (groups * length)
        np.testing.assert_allclose(found[layer], expected, rtol=1e-6)


def test_the_padding_of_swins_windows_is_no_query() -> None:
    """Guards against zeros beyond the image that pull the mean distance."""
    _, queries = pair_distances(SwinBlock(8, 2, 12, shifted=True), (12, 12))
    assert queries.shape == (4, 64) and queries.sum() == 144


def test_numbers_do_not_depend_on_the_batch_or_its_padding() -> None:
    """Guards against padding that counts, and against means of batches instead of images."""
    found = [findings_of(LSATChapter, small_model(), 16, images(5), batch).measures for batch in (1, 3)]
    for name in ("shift_weights", "shift_distance", "used_shifts"):
        np.testing.assert_allclose(found[0][name], found[1][name], rtol=1e-9)
    for one, three in zip(*(each["mean_attention_distance"][1:] for each in found)):
        np.testing.assert_allclose(one, three, rtol=1e-9)


@pytest.mark.parametrize(
    ("switches", "variants"),
    [
        ({}, 18),
        ({"shifts": "axes"}, 9),
        ({"shifts": "none"}, 0),
        ({"shift_by": "translation"}, 18),
        ({"shift_by": "translation", "position": "shared"}, 18),
        ({"position": "shared"}, 18),
        ({"local": "swin"}, 0),
        ({"local": "swin_pair"}, 0),
        ({"local": "cvt"}, 0),
    ],
    ids=str,
)
def test_every_variant_of_tables_5_and_6_has_figures_or_reasons(switches: dict, variants: int) -> None:
    """Guards against an ablation that ends an analysis, or loses a figure without a word; and against JSON that is not JSON."""
    findings = findings_of(LSATChapter, small_model(switches), 16, images(2))
    assert names(findings) == FIGURES
    assert len(findings.measures.get("shifts", [])) == variants
    if not variants:
        assert set(findings.omitted) == FIGURES - {"attention_distance"}
        assert all("model.switches." in reason for reason in findings.omitted.values())
    assert "NaN" not in json.dumps(findings.measures)
    if switches.get("position") is None and switches.get("shift_by") is None:  # those are drawn as the first
        draw_all(findings)

    without = findings_of(LSATChapter, small_model(switches), 16)
    assert set(without.omitted) == FIGURES and "--data" in without.omitted["attention_distance"]
