"""The distributions of initial weights of a small model of each family beside those that the authors' code draws."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import nn

from pipeline.models.common.base import VisionModel
from pipeline.models.pervit.position import PeripheralPosition
from pipeline.models.weights.reference_names import reference_state_dict
from support import parity
from support.initial_weights import differences, summarize
from support.small_models import build


def drawn(name: str, change: Callable[[VisionModel], None] | None = None) -> dict[str, np.ndarray]:
    """The statistics of ours."""

    def make() -> dict[str, torch.Tensor]:
        model = build(name)
        if change:
            with torch.no_grad():
                change(model)
        return reference_state_dict(model)

    return summarize(make)


def recorded(name: str) -> dict[str, np.ndarray]:
    return dict(np.load(parity.FOLDER / f"{name}_initial.npz"))


@pytest.mark.parametrize("name", parity.VARIANTS)
def test_initial_weights_are_drawn_alike(name: str) -> None:
    """Guards against another standard deviation, a bias that is not zero, and a layer that lost its own initialization."""
    assert differences(drawn(name), recorded(name)) == []


def _another_std(model: VisionModel) -> None:
    _linear(model).weight.mul_(1.1)


def _another_shape(model: VisionModel) -> None:
    weight = _linear(model).weight
    weight.uniform_(-1, 1).mul_(0.02 * 3**0.5)  # of the same standard deviation


def _a_bias_of_pytorch(model: VisionModel) -> None:
    linear = _linear(model)
    linear.bias.uniform_(-(linear.in_features**-0.5), linear.in_features**-0.5)


def _linear(model: VisionModel) -> nn.Linear:
    return next(each for each in model.modules() if isinstance(each, nn.Linear) and each.bias is not None)


def _an_open_gate(model: VisionModel) -> None:
    for name, parameter in model.named_parameters():
        if name.endswith("gating"):
            parameter.zero_()


def _no_local_initialization(model: VisionModel) -> None:
    for name, parameter in model.named_parameters():
        if name.endswith("position_projection.weight"):
            nn.init.trunc_normal_(parameter, std=0.02)


def _random_peripheral_position(model: VisionModel) -> None:
    next(each for each in model.modules() if isinstance(each, PeripheralPosition))._randomize()


CHANGES = {
    _another_std: ("deit", {"std"}),
    _another_shape: ("deit", {"min", "max"}),
    _a_bias_of_pytorch: ("gmlp", {"std"}),
    _an_open_gate: ("convit", {"mean"}),
    _no_local_initialization: ("convit", {"mean", "std"}),
    _random_peripheral_position: ("pervit", {"std"}),
}


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__.strip("_"))
def test_a_change_is_noticed(change: Callable[[VisionModel], None]) -> None:
    """Guards against tolerances that let another initialization pass."""
    name, statistics = CHANGES[change]
    found = differences(drawn(name, change), recorded(name))
    assert found and statistics <= {line.partition(": ")[2].split()[0] for line in found}
