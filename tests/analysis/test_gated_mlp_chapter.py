"""Chapter of gMLP and PosMLP: maps, distances and g(Σ), against loops over PosMLP's equations."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
import torch

from pipeline.analysis.chapter import Request
from pipeline.analysis.gated_mlp import SINGULAR, GatedMLPChapter, covariance_gain, mixing_layers, token_mixing_distance
from pipeline.analysis.session import check_query
from pipeline.config import section_from_dict
from pipeline.errors import UserError
from pipeline.models import create_model, load_reference_state_dict
from pipeline.models.gated_mlp.gmlp import GMLP, GMLPSwitches
from pipeline.models.gated_mlp.posmlp import PosMLP, PosMLPSwitches
from support.analysed import draw_all, findings_of, names
from support.golden import Golden

MIXINGS = ("sgu", "lrpe_m", "lrpe", "glrpe", "ggqpe")
FIGURES = {"token_mixing_maps", "token_mixing_distance", "token_mixing_rows", "bias_maps", "covariance_gain"}


def small_posmlp(**switches) -> PosMLP:
    """The whole pyramid, narrow; windows of 4, 4, 4 and 2 tokens."""
    return PosMLP(16, num_classes=5, image_size=64, switches=section_from_dict(PosMLPSwitches, switches, key="model.switches"))


def small_gmlp(**switches) -> GMLP:
    """Windows of 5 x 5 tokens."""
    of_gmlp = section_from_dict(GMLPSwitches, switches, key="model.switches")
    model = GMLP(16, 3, 2, num_classes=5, image_size=80, switches=of_gmlp)
    for parameter in model.parameters():
        parameter.data += 0.1 * torch.randn_like(parameter)
    return model


@pytest.fixture(scope="module")
def golden_posmlp() -> PosMLP:
    model = load_reference_state_dict(create_model("posmlp_t").double(), Golden("posmlp_t").weights("B"))
    assert isinstance(model, PosMLP)
    return model


def test_maps_of_the_centre_are_the_authors(golden_posmlp: PosMLP) -> None:
    """Guards against maps of another query, transposed maps, and groups under wrong numbers: the authors' rows of the centre query."""
    measures = findings_of(GatedMLPChapter, golden_posmlp, 224).measures
    shown, arrays = measures["token_mixing_maps"], Golden("posmlp_t").arrays
    for place, name in ((0, "first"), (-1, "last")):
        side = len(shown["weights"][place][0])
        assert tuple(shown["queries"][place]) == (side // 2, side // 2)
        for group, weights in zip(shown["groups"][place], shown["weights"][place]):
            expected = arrays[f"posmap_{name}_rowqc_B"][:, group - 1]
            np.testing.assert_allclose(np.ravel(weights), expected, atol=1e-6)
    assert shown["layers"][0] == 1 and shown["layers"][-1] == 24
    assert shown["groups"][-1][0] == 1 and shown["groups"][-1][-1] == 64

    rows = measures["token_mixing_rows"]
    assert (rows["rows"][0], rows["rows"][-1]) == (105, 24)  # the centre of 14 x 14 and of 7 x 7
    np.testing.assert_allclose(rows["weights"][0]["A, group 8"], arrays["posmap_first_rowqc_B"][:, 7], atol=1e-6)


def test_distance_and_gain_of_the_authors_weights_by_loops(golden_posmlp: PosMLP) -> None:
    """Guards against distances of transposed maps, and a g(Σ) other than Eq. 16: Eq. 5 (with Σ for its inverse, as in the authors'
    code), ConViT's Eq. 8 and the eigenvalues by hand, layer 24."""
    measures = findings_of(GatedMLPChapter, golden_posmlp, 224).measures
    mixing = golden_posmlp.stages[3].blocks[1].gate.mixing
    gains = []
    for group in range(64):
        gamma, (center_x, center_y) = mixing.spreads[group].detach().numpy(), mixing.centers[group].tolist()
        a, b, c, d = gamma.ravel().tolist()
        sigma = np.array([[a * a + b * b, a * c + b * d], [a * c + b * d, c * c + d * d]])
        smallest, product = min(np.linalg.eigvals(sigma)), np.prod(np.linalg.eigvals(sigma))
        gains.append(math.sqrt(product) if smallest >= SINGULAR else None)
        if group % 16:
            continue
        distance = 0.0
        for query in range(49):
            weights, lengths = [], []
            for key in range(49):
                down, right = key // 7 - query // 7, key % 7 - query % 7
                delta = np.array([right - center_x, -down - center_y])  # the authors' second axis points up
                weights.append(math.exp(-0.5 * delta @ sigma @ delta))
                lengths.append(math.hypot(down, right))
            distance += sum(w * length for w, length in zip(weights, lengths)) / sum(weights) / 49
        assert measures["token_mixing_distance"][-1][group] == pytest.approx(distance, rel=1e-6)
        assert measures["token_mixing_centers"][-1][group] == pytest.approx([center_x, -center_y])
    assert measures["covariance_gain"][-1] == [gain if gain is None else pytest.approx(gain, rel=1e-6) for gain in gains]
    counted = [gain for gain in gains if gain is not None]
    assert measures["covariance_gain_mean"][-1] == pytest.approx(sum(counted) / len(counted), rel=1e-6)
    assert measures["covariance_left_out"][-1] == 64 - len(counted)


def test_gain_of_every_form_of_sigma() -> None:
    """Guards against roots of negative numbers and wrong groups left out: αI, a singular Σ, no Gaussian at all, and Γ, of which the
    quadratic form sees the symmetric part."""
    alpha, singular, saddle, hill = ([[3.0, 0], [0, 3.0]], [[1, 1], [1, 1 + SINGULAR]], [[1, 0], [0, -1]], [[-1, 0], [0, -2]])
    free = [[2.0, 5.0], [-3.0, 4.0]]  # symmetric part [[2, 1], [1, 4]]
    gains = covariance_gain(torch.tensor([alpha, singular, saddle, hill, free])).tolist()
    assert gains[0] == pytest.approx(3) and gains[4] == pytest.approx(math.sqrt(7))
    assert all(math.isnan(gain) for gain in gains[1:4])
    model = small_posmlp(covariance="isotropic")
    found = findings_of(GatedMLPChapter, model, 64).measures["covariance_gain"]
    assert found[0] == pytest.approx((model.stages[0].blocks[0].gate.mixing.spreads ** 2).tolist())


@pytest.mark.parametrize("mixing", ["sgu", "lrpe_m", "glrpe"])
def test_distance_of_signed_maps_by_loops(mixing: str) -> None:
    """Guards against weights of opposite sign that cancel, and a table read at another relative position."""
    model = small_gmlp(mixing=mixing, **({"groups": 4} if mixing == "glrpe" else {}))
    found = findings_of(GatedMLPChapter, model, 80).measures["token_mixing_distance"]
    for block, of_layer in zip(model.blocks, found):
        weight, table = block.gate.mixing.weight, block.gate.mixing.table
        for group, value in enumerate(of_layer):
            total = 0.0
            for query in range(25):
                magnitudes, lengths = [], []
                for key in range(25):
                    down, right = query // 5 - key // 5, query % 5 - key % 5
                    w = weight[query, key].item() if weight is not None else 0.0
                    r = table[(down + 4) * 9 + right + 4, group].item() if table is not None else 0.0
                    magnitudes.append(abs(w + r))
                    lengths.append(math.hypot(down, right))
                total += sum(m * length for m, length in zip(magnitudes, lengths)) / sum(magnitudes) / 25
            assert value == pytest.approx(total, rel=1e-6)


def test_distance_of_equal_weights_and_of_none() -> None:
    """Guards against a reference line that is not that of equal weights, and a division by zero."""
    assert token_mixing_distance(torch.ones(4, 4), 2).item() == pytest.approx((2 + math.sqrt(2)) / 4)
    assert token_mixing_distance(torch.zeros(4, 4), 2).item() == 0
    uniform = findings_of(GatedMLPChapter, small_posmlp(), 64).measures["token_mixing_distance_uniform"]
    assert uniform[-1] == pytest.approx((2 + math.sqrt(2)) / 4)


def test_w_and_r_add_up_to_the_map() -> None:
    """Guards against Fig. 7's parts of another layer or another formula."""
    rows = findings_of(GatedMLPChapter, small_gmlp(mixing="lrpe_m"), 80, query=(0, 3)).measures["token_mixing_rows"]
    assert rows["rows"] == [3, 3, 3]
    for of_layer in rows["weights"]:
        np.testing.assert_allclose(np.add(of_layer["W"], of_layer["r"]), of_layer["W + r"], atol=1e-5)


def test_biases_are_maps_row_by_row() -> None:
    """Guards against transposed maps, and shapes of the two published codes that differ."""
    for model, size, side in ((small_gmlp(), 80, 5), (small_gmlp(mixing="ggqpe"), 80, 5), (small_posmlp(mixing="sgu"), 64, 4)):
        gate = mixing_layers(model)[0].gate
        gate.bias.data = torch.arange(float(side * side)).view_as(gate.bias)
        bias = findings_of(GatedMLPChapter, model, size).measures["token_bias"][0]
        assert bias[1][2] == side + 2


@pytest.mark.parametrize(
    ("query", "expected"), [((0, 0), [(2, 2), (1, 1), (0, 0), (0, 0)]), ((1, 2), [(2, 2), (3, 1), (1, 2), (0, 1)])]
)
def test_a_query_is_followed_into_the_windows_of_each_stage(query: tuple[int, int], expected: list[tuple[int, int]]) -> None:
    """Guards against a patch of 16 pixels that is looked up in another window: at 64 pixels the stages have grids of 16, 8, 4, 2."""
    queries = [layer.query(query) for layer in mixing_layers(small_posmlp())]
    assert [queries[0], queries[2], queries[4], queries[-1]] == expected


def test_a_query_outside_of_the_image_is_refused() -> None:
    """Guards against the map of another query without a word."""
    with pytest.raises(UserError, match="--query is 1,4, but at 64 pixels there are 4 x 4 patches of 16 pixels"):
        check_query(Request(small_posmlp(), 64, (1, 4)))


@pytest.mark.parametrize("mixing", MIXINGS)
def test_every_map_of_table_1_has_figures_or_reasons(mixing: str) -> None:
    """Guards against a map that ends an analysis, or loses a figure without a word, with both backbones."""
    for model, size in ((small_gmlp(mixing=mixing), 80), (small_posmlp(mixing=mixing), 64)):
        findings = findings_of(GatedMLPChapter, model, size)
        assert names(findings) == FIGURES
        assert set(findings.omitted) == (set() if mixing == "ggqpe" else {"covariance_gain"})
        assert all(mixing in reason for reason in findings.omitted.values())
        json.dumps(findings.measures, allow_nan=False)
        if isinstance(model, GMLP) or mixing == "glrpe":
            draw_all(findings)


@pytest.mark.parametrize(
    ("switches", "omitted"),
    [
        ({"covariance": "isotropic"}, set()),
        ({"covariance": "free"}, set()),
        ({"learned_centers": False}, set()),
        ({"token_bias": False}, {"bias_maps"}),
        ({"token_bias": False, "absolute_position": True}, {"bias_maps"}),
        ({"absolute_position": True}, set()),
        ({"windows": [8, 4, 4, 2]}, set()),
        ({"groups": [1, 1, 1, 1]}, set()),
        ({"shift_windows": True, "windows": [4, 4, 2, 1]}, set()),
        ({"combine": "concatenate", "norm": True}, set()),
        ({"split": False}, set()),
        ({"patch_embedding": "linear", "patch_merging": "linear"}, set()),
    ],
    ids=str,
)
def test_every_variant_of_the_other_tables_has_figures_or_reasons(switches: dict, omitted: set[str]) -> None:
    """Guards against an ablation of Tables 4 to 7, 10 or Fig. 3 that ends an analysis."""
    findings = findings_of(GatedMLPChapter, small_posmlp(**switches), 64)
    assert names(findings) == FIGURES and set(findings.omitted) == omitted
    json.dumps(findings.measures, allow_nan=False)
    if "shift_windows" in switches or switches == {"token_bias": False}:  # the others are drawn as those of Table 1 or as these
        draw_all(findings)
