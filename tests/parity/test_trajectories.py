"""Five steps in float64 of a small model of each family beside the authors' model, loss and optimizer.

Weights, images, labels and stochastic depth's numbers are given (``support/parity.py``); the fixtures hold losses and two numbers
for each tensor after each step.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from pipeline.config import load_config
from pipeline.models.common.base import VisionModel
from pipeline.models.common.vit import ViTLayout
from pipeline.models.convit.model import ConViT, ConViTSwitches
from pipeline.models.deit import DeiT
from pipeline.models.gated_mlp.gmlp import GMLP
from pipeline.models.gated_mlp.posmlp import PosMLP, PosMLPSwitches
from pipeline.models.lsat.model import LSAT, LSATLayout
from pipeline.models.lsat.shifts import SHIFTS_32, SHIFTS_224
from pipeline.models.pervit.model import PerViT, PerViTLayout
from pipeline.models.weights.reference_names import authors_names, load_reference_state_dict, reference_state_dict
from pipeline.optim.adamw import build_optimizer
from pipeline.run.loss import mixture_of_two
from support import parity

CONFIGS = Path(__file__).parents[2] / "configs"
# Shares of the scale named at each. Measured with AVX-512 and without: at most 1e-11 of each.
LOSS, STEP = 1e-9, 1e-7


def build(name: str) -> VisionModel:
    """The small model as the authors' side builds it, in ``recording/models.py``."""
    variant = parity.VARIANTS[name]
    common = dict(num_classes=parity.CLASSES, image_size=variant.image_size, drop_path=variant.drop_path)
    if name == "pervit":
        return PerViT(PerViTLayout(2, (16, 24, 32, 40), (8, 8, 12, 16)), **common)
    if name == "convit":
        return ConViT(ViTLayout(4, 32, depth=4), switches=ConViTSwitches(gpsa_layers=2), **common)
    if name == "deit":
        return DeiT(ViTLayout(2, 32, depth=3), **common)
    if name == "lsat_224":
        return LSAT(LSATLayout((16, 24, 32), (2, 2, 4), (2, 2, 2), 4, 4, 0, SHIFTS_224, "per_head"), **common)
    if name == "lsat_32":
        return LSAT(LSATLayout((16,) * 4, (2,) * 4, (2,) * 4, 3, 1, 1, SHIFTS_32, "shared"), **common)
    if name == "posmlp":
        return PosMLP(8, switches=PosMLPSwitches(groups=(2, 4, 8, 16), block_dropout=0, head_dropout=0), **common)
    return GMLP(32, 4, 6, **common)


@pytest.fixture(autouse=True)
def float64() -> Iterator[None]:
    """Tables that models compute are of the default type."""
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("name", parity.VARIANTS)
def test_five_steps(name: str) -> None:
    """Guards against a model, a gradient, a parameter group or an optimizer that is not the authors'."""
    fixture, variant = np.load(parity.FOLDER / f"{name}.npz"), parity.VARIANTS[name]
    config, model = load_config(CONFIGS / f"{variant.recipe}.yaml"), build(name).train()
    state = model.state_dict()
    shapes = {theirs: state[own].shape for theirs, own in authors_names(model).items()}
    filled = {key: torch.as_tensor(parity.weight(key, tuple(shape))) for key, shape in shapes.items()}
    load_reference_state_dict(model, filled)
    names = sorted(key for key, value in filled.items() if value.is_floating_point())
    assert names == fixture["names"].tolist()
    optimizer = build_optimizer(model, config.optim)
    scale = np.cumsum(parity.LEARNING_RATES)[:, None] * np.sqrt(
        [shapes[key].numel() for key in names]
    )  # AdamW's steps: (steps, P)

    losses, prints = [], []
    for step, rate in enumerate(parity.LEARNING_RATES):
        given = parity.step_input(variant, step)
        images, noise, labels = (torch.from_numpy(each) for each in (given.images, given.noise, given.labels))
        scores = model(images, noise)
        if step == 0:
            _compare_scores_and_loss(scores.detach(), labels, given.own_share, fixture)
        loss = _loss(scores, labels, given.own_share)
        optimizer.zero_grad()
        loss.backward()
        for group in optimizer.param_groups:
            group["lr"] = rate
        optimizer.step()
        losses.append(loss.item())
        state = reference_state_dict(model)
        prints.append([parity.fingerprint(key, state[key].numpy()) for key in names])

    norms, products = np.moveaxis(np.array(prints), -1, 0)  # (steps, P) each
    np.testing.assert_allclose(losses, fixture["losses"], rtol=LOSS)
    for found, expected in ((norms, fixture["norms"]), (products, fixture["products"])):
        off = np.abs(found - expected) / scale
        worst = np.unravel_index(off.argmax(), off.shape)
        assert off.max() < STEP, f"step {worst[0] + 1}, {names[worst[1]]}: {off.max():.1e} of AdamW's steps"


def _loss(scores: torch.Tensor, labels: torch.Tensor, own_share: float) -> torch.Tensor:
    """:func:`mixture_of_two` in float64, which computes in float32."""
    own, other = (F.cross_entropy(scores, each, label_smoothing=parity.SMOOTHING) for each in (labels, labels.flip(0)))
    return own_share * own + (1 - own_share) * other


def _compare_scores_and_loss(
    scores: torch.Tensor, labels: torch.Tensor, own_share: float, fixture: np.lib.npyio.NpzFile
) -> None:
    """The first step's scores, and the training's own loss on them."""
    np.testing.assert_allclose(scores, fixture["scores"], rtol=LOSS, atol=LOSS)
    ours = mixture_of_two(scores, labels, labels.flip(0), torch.full((len(labels),), own_share), parity.SMOOTHING)
    assert float(ours) == pytest.approx(float(fixture["losses"][0]), rel=1e-6)
