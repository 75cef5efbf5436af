"""Ψ, Ω and the regions of PerViT are those of the paper's equations, for every batch size."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch
from torch import Tensor

from pipeline.analysis.measures import (
    REGIONS,
    PhiMeasures,
    impact,
    nonlocality,
    query_key_distances,
    region_radii,
    region_scores,
    unit_distances,
)
from pipeline.analysis.pervit import count_regions
from pipeline.models import create_model, load_reference_state_dict
from pipeline.models.common.probe import observed, recorded
from pipeline.models.common.vit import ViTLayout, content_scores, patch_grid, split_heads
from pipeline.models.deit import DeiT, DeiTSwitches
from pipeline.models.pervit.model import PerViT, PerViTLayout
from support.golden import RULES, Golden, make_input

GOLDEN = Golden("pervit_tiny")
SMALL = PerViTLayout(2, (8, 8, 12, 12), (4, 4, 4, 8), (1, 1, 1, 0))
NAMES = ("omega_c", "omega_a", "psi_p", "psi_c")


def small_model(kind: str = "pervit") -> PerViT | DeiT:
    torch.manual_seed(0)
    if kind == "deit":
        return (
            DeiT(ViTLayout(2, 12, 3, 2), num_classes=5, image_size=64, switches=DeiTSwitches(peripheral_position=True))
            .double()
            .eval()
        )
    model = PerViT(SMALL, num_classes=3, image_size=64).double().eval()
    for block in model.blocks:
        torch.nn.init.normal_(block.attn.qkv.weight, std=0.5)
        torch.nn.init.normal_(block.position.norm2.bias)
    return model


@torch.no_grad()
def collected(model: PerViT | DeiT, images: Tensor, batch: int, padding: int = 0) -> dict[str, Tensor]:
    """name -> (layers, heads), the means over the images in batches of this size, each with more images that do not count."""
    collector = PhiMeasures(patch_grid(*images.shape[-2:]), "phi_c", model.has_phi)

    def observe(name: str, value: Tensor) -> None:
        collector.see(name, value)
        collector.layer += name == collector.probes[-1]

    for chunk in images.split(batch):
        valid = torch.ones(len(chunk) + padding, dtype=torch.bool)
        valid[len(chunk) :] = False
        collector.begin(valid)
        with observed(observe, *collector.probes):
            model(torch.cat([chunk, 9 * torch.ones(padding, *chunk.shape[1:], dtype=chunk.dtype)]))
        collector.count += len(chunk)
    return {name: collector.mean(name) for name in collector.sums}


def places(side: int) -> list[tuple[int, int]]:
    return [(row, column) for row in range(side) for column in range(side)]


def slow_nonlocality(phi: np.ndarray, side: int) -> float:
    """Eq. 13, pair by pair."""
    total = 0.0
    for q, (qy, qx) in enumerate(places(side)):
        for k, (ky, kx) in enumerate(places(side)):
            total += phi[q, k] * math.sqrt((qy - ky) ** 2 + (qx - kx) ** 2)
    return total / side**4


def slow_impact(phi: np.ndarray, mixed: np.ndarray) -> float:
    """Eq. 12, pair by pair."""
    return sum((mixed[q, k] - phi[q, k]) ** 2 for q, k in np.ndindex(*phi.shape)) ** -0.5


def slow_region(phi: np.ndarray, side: int) -> tuple[str, list[float]]:
    """Eq. 11, pair by pair, with the radii of Eq. 38."""
    radii = [math.sqrt(side * side * angle / (220 * math.pi)) for angle in (5, 40, 120, 220)]
    sums = [0.0] * 4
    for q, (qy, qx) in enumerate(places(side)):
        for k, (ky, kx) in enumerate(places(side)):
            inside = [radius for radius in radii if math.hypot(qy - ky, qx - kx) < radius]
            if inside:
                sums[radii.index(min(inside))] += phi[q, k]
    scores = [each / side**4 for each in sums]
    return REGIONS[scores.index(max(scores))], scores


def test_measures_are_the_papers_sums() -> None:
    """Guards against another mean, distance or norm than Eq. 11, 12 and 13 have."""
    side = 6
    torch.manual_seed(0)
    phi, content = torch.rand(2, side**2, side**2, dtype=torch.float64)
    mixed = phi * content
    distances = query_key_distances(side, side)
    assert nonlocality(phi, distances).item() == pytest.approx(slow_nonlocality(phi.numpy(), side), rel=1e-6)
    assert impact(phi, mixed).item() == pytest.approx(slow_impact(phi.numpy(), mixed.numpy()), rel=1e-6)
    region, scores = slow_region(phi.numpy(), side)
    found = region_scores(phi, side, side)
    np.testing.assert_allclose(found, scores, rtol=1e-6)
    assert REGIONS[found.argmax()] == region


def test_radii_are_those_of_appendix_b() -> None:
    """Guards against other intervals than the paper's on its grid."""
    assert [round(radius, 2) for radius in region_radii(14, 14)] == [1.19, 3.37, 5.83, 7.90]


@pytest.mark.parametrize("kind", ["pervit", "deit"])
def test_means_over_images_are_means_of_the_measure(kind: str) -> None:
    """Guards against the measure of a mean, normalized attention for Φa, and a class token among the patches."""
    model, first = small_model(kind), int(kind == "deit")  # the first patch
    torch.manual_seed(1)
    images = torch.randn(3, 3, 64, 64, dtype=torch.float64)
    found = collected(model, images, batch=3)
    inputs: list[Tensor] = []
    for block in model.blocks:
        block.attn.register_forward_pre_hook(lambda _, args: inputs.append(args[0]))
    with torch.no_grad():
        model(images)
        for layer, (block, x, log_phi) in enumerate(zip(model.blocks, inputs, model.log_phi((4, 4)))):
            q, k, _ = split_heads(block.attn.qkv(x), 3, 2)
            scores = content_scores(q, k)
            content = (scores - scores.amax(-1, keepdim=True)).exp()[..., first:, first:].numpy()
            for head in range(2):
                position, mean = log_phi[head].exp().numpy(), dict.fromkeys(NAMES, 0.0)
                for image in content[:, head]:
                    mixed = image * position
                    mean["omega_c"] += slow_nonlocality(image, 4) / 3
                    mean["omega_a"] += slow_nonlocality(mixed, 4) / 3
                    mean["psi_p"] += slow_impact(position, mixed) / 3
                    mean["psi_c"] += slow_impact(image, mixed) / 3
                unit = {"omega_c": 1.5, "omega_a": 1.5}  # patches in a unit of [-1, 1] on 4 x 4
                for name, value in mean.items():
                    value /= unit.get(name, 1)
                    assert found[name][layer, head].item() == pytest.approx(value, rel=1e-6), (name, layer, head)


def test_batches_and_padding_change_nothing() -> None:
    """Guards against images that count twice, and padding that counts."""
    model, images = small_model(), torch.randn(5, 3, 64, 64, dtype=torch.float64)
    whole = collected(model, images, batch=5)
    for batch, padding in itertools.product((1, 2), (0, 2)):
        other = collected(model, images, batch, padding)
        for name in NAMES:
            torch.testing.assert_close(other[name], whole[name], rtol=1e-12, atol=0)


def test_a_model_without_phi_p_has_omega_of_its_content() -> None:
    """Guards against a collector that waits for a Φp which no layer offers, and so counts layers wrongly."""
    torch.manual_seed(0)
    model = create_model("pervit_t", num_classes=3, image_size=32, switches={"phi_p": False}).eval()
    found = collected(model, torch.randn(2, 3, 32, 32), batch=1)
    assert set(found) == {"omega_c", "omega_a"} and found["omega_c"].shape == (12, 4)
    assert torch.equal(found["omega_c"], found["omega_a"])


def test_phi_c_of_deit_is_its_attention_without_the_position() -> None:
    """Guards against a Φc that holds Φp already: normalized, Φc ⊙ Φp must be the attention that the layer uses."""
    model = small_model("deit")
    with torch.no_grad(), recorded("phi_p", "phi_c", "attention") as values:
        model(torch.randn(2, 3, 64, 64, dtype=torch.float64))
    for phi_p, phi_c, attention in zip(values["phi_p"], values["phi_c"], values["attention"], strict=True):
        mixed = phi_c.clone()
        mixed[..., 1:, 1:] *= phi_p
        torch.testing.assert_close(mixed / mixed.sum(-1, keepdim=True), attention)


@pytest.mark.parametrize("rule", RULES)
def test_the_authors_nonlocality_of_phi_p(rule: str) -> None:
    """Guards against other distances than the authors', whose coordinates go from -1 to 1: 13 patches are 2 of their units."""
    model = load_reference_state_dict(create_model("pervit_t").double(), GOLDEN.weights(rule)).eval()
    axis = torch.linspace(-1, 1, 14, dtype=torch.float64)
    points = torch.cartesian_prod(axis, axis)  # (196, 2)
    offsets = (points[None] - points[:, None]).norm(dim=-1)  # (196, 196)
    with torch.no_grad():
        for log_phi in model.log_phi((14, 14)):
            theirs = (offsets * log_phi.exp()).mean(dim=(-1, -2))
            ours = nonlocality(log_phi.exp(), unit_distances(14, 14))
            torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=0)


def test_the_authors_nonlocality_at_initialization() -> None:
    """Guards against the same with what the authors' own code computed."""
    model = create_model("pervit_t").double().eval()
    with torch.no_grad():
        ours = torch.stack([nonlocality(each.exp(), unit_distances(14, 14)) for each in model.log_phi((14, 14))])
    np.testing.assert_allclose(ours.mean(1), GOLDEN.meta["init_nonlocality_f64"], rtol=1e-5)


def test_regions_count_the_other_layers_as_central() -> None:
    """Guards against a pie of the heads alone (Fig. 5 counts the CPE and the MLP's linear layers as central)."""
    counts = count_regions(torch.tensor([[0, 1, 3, 3], [2, 2, 2, 1]]), other_layers=3)
    assert counts.tolist() == [[4, 1, 0, 2], [3, 1, 3, 0]]


@pytest.mark.parametrize("rule", RULES)
def test_golden_weights_on_the_golden_images(rule: str) -> None:
    """Guards against any change of Ω and Ψ: layers 1, 6 and 12, all heads, of the golden weights on the two golden images."""
    model = load_reference_state_dict(create_model("pervit_t").double(), GOLDEN.weights(rule)).eval()
    found = collected(model, make_input(224).double(), batch=2)
    for name, expected in FIXED[rule].items():
        unit = 6.5 if name.startswith("omega") else 1  # recorded in patches
        np.testing.assert_allclose(unit * found[name][[0, 5, 11]], expected, rtol=1e-6, err_msg=name)


FIXED: dict[str, dict[str, list[list[float]]]] = {
    "A": {
        "omega_c": [
            [7.2475953, 7.2442376, 7.2709903, 7.2737044],
            [7.1536516, 7.0543589, 7.0452975, 6.9551507],
            [7.0431944, 7.0634758, 6.9943709, 7.0419871],
        ],
        "omega_a": [
            [2.9500408, 2.9511194, 4.3267927, 3.2881354],
            [3.1358644, 2.9803595, 3.3763138, 3.556373],
            [3.3930361, 4.1237692, 2.8433016, 4.0589115],
        ],
        "psi_p": [
            [1.9180262, 1.8286217, 6.1487541, 9.8693937],
            [0.50394565, 0.27553869, 0.26008962, 0.19222254],
            [0.26728652, 0.28028047, 0.21005135, 0.26464131],
        ],
        "psi_c": [
            [0.0093387132, 0.0092766835, 0.009493032, 0.0096971659],
            [0.0099592398, 0.009839285, 0.0097394344, 0.0096475448],
            [0.0098953731, 0.0099288764, 0.0096744136, 0.0096360399],
        ],
    },
    "B": {
        "omega_c": [
            [1.5580793, 1.8914866, 1.3200136, 1.0638117],
            [2.0944212, 2.0519559, 2.3217011, 2.7132616],
            [2.1747221, 2.3387714, 2.3281541, 2.5160234],
        ],
        "omega_a": [
            [0.61581801, 0.76298163, 0.79852563, 0.44642837],
            [0.91617216, 0.81147216, 1.1355801, 1.3986501],
            [1.085208, 1.3781439, 0.92805295, 1.462617],
        ],
        "psi_p": [
            [0.011509795, 0.01272819, 0.011092561, 0.01107082],
            [0.012682395, 0.012589474, 0.013270065, 0.014653685],
            [0.013211031, 0.0133882, 0.013209927, 0.013903744],
        ],
        "psi_c": [
            [0.034165663, 0.030654782, 0.044213251, 0.045820783],
            [0.026634982, 0.028166216, 0.027321506, 0.022593359],
            [0.028254183, 0.028772971, 0.025586703, 0.025112307],
        ],
    },
}
