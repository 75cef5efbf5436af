"""Five steps in float64 of a small model of each family beside the authors' model, loss and optimizer.

Weights, images, labels and stochastic depth's numbers are given (``support/parity.py``); the fixtures hold losses and two numbers
for each tensor after each step.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from pipeline.config import load_config
from pipeline.models.weights.reference_names import authors_names, load_reference_state_dict, reference_state_dict
from pipeline.optim.build import build_optimizer
from pipeline.step.loss import cross_entropy
from support import parity
from support.small_models import build

CONFIGS = Path(__file__).parents[2] / "configs"
# Losses and scores differ by at most 6e-15. Tensors by at most 2e-8 of AdamW's steps: those are biases in front of a normalization,
# whose gradients are rounding errors, which AdamW divides by their own size plus epsilon. A missing weight decay is 1e-3.
LOSS, STEP = 1e-10, 1e-6


@pytest.fixture(autouse=True)
def float64() -> Iterator[None]:
    """Tables that models compute are of the default type."""
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("name", parity.VARIANTS)
def test_five_steps(name: str) -> None:
    """Guards against a model, a gradient, a parameter group or an optimizer that is not the authors'."""
    theirs, ours = np.load(parity.FOLDER / f"{name}.npz"), trajectory(name)
    assert ours["names"] == theirs["names"].tolist()
    np.testing.assert_allclose(ours["scores"], theirs["scores"], rtol=LOSS, atol=LOSS)
    np.testing.assert_allclose(ours["losses"], theirs["losses"], rtol=LOSS)
    np.testing.assert_allclose(ours["training_loss"], theirs["losses"][0], rtol=1e-6)  # float32
    for key in ("norms", "products"):
        off = np.abs(ours[key] - theirs[key]) / ours["scale"]
        step, tensor = np.unravel_index(off.argmax(), off.shape)
        assert off.max() < STEP, f"step {step + 1}, {ours['names'][tensor]}: {key} off by {off.max():.1e} of AdamW's steps"


def trajectory(name: str) -> dict[str, Any]:
    """What the fixture of that name has, from our side.

    Returns:
        Of the fixture ``names``, ``losses``, ``scores``, ``norms`` and ``products``. Also ``training_loss``, of the first step by the
        training's own function, and ``scale`` (steps, P): the length of AdamW's steps so far if each element moved by the learning
        rate.
    """
    variant, model = parity.VARIANTS[name], build(name).train()
    optimizer = build_optimizer(model, load_config(CONFIGS / f"{variant.recipe}.yaml").optim)
    state = model.state_dict()
    shapes = {theirs: state[own].shape for theirs, own in authors_names(model).items()}
    filled = {key: torch.as_tensor(parity.weight(key, tuple(shape))) for key, shape in shapes.items()}
    load_reference_state_dict(model, filled)
    names = sorted(key for key, value in filled.items() if value.is_floating_point())
    found: dict[str, Any] = {"names": names, "losses": []}
    prints = []
    for step, rate in enumerate(parity.LEARNING_RATES):
        given = parity.step_input(variant, step)
        images, noise, labels = (torch.from_numpy(each) for each in (given.images, given.noise, given.labels))
        scores = model(images, noise)
        if step == 0:
            share = torch.full((len(labels),), given.own_share)
            found["scores"] = scores.detach().numpy()
            found["training_loss"] = cross_entropy(scores.detach(), labels, labels.flip(0), share, parity.SMOOTHING).item()
        loss = _loss(scores, labels, given.own_share)
        optimizer.zero_grad()
        loss.backward()
        for group in optimizer.param_groups:
            group["lr"] = rate
        optimizer.step()
        found["losses"].append(loss.item())
        state = reference_state_dict(model)
        prints.append([parity.fingerprint(key, state[key].numpy()) for key in names])
    found["norms"], found["products"] = np.moveaxis(np.array(prints), -1, 0)  # (steps, P) each
    found["scale"] = np.cumsum(parity.LEARNING_RATES)[:, None] * np.sqrt([shapes[key].numel() for key in names])
    return found


def _loss(scores: torch.Tensor, labels: torch.Tensor, own_share: float) -> torch.Tensor:
    """:func:`cross_entropy` in float64, which computes in float32."""
    own, other = (F.cross_entropy(scores, each, label_smoothing=parity.SMOOTHING) for each in (labels, labels.flip(0)))
    return own_share * own + (1 - own_share) * other
