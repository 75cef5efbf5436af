"""Φp of all layers as one network is what the layers compute one after the other, with a fraction of the operators."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from torch import Tensor

from pipeline.models import create_model
from pipeline.models.common import vit
from pipeline.models.pervit.phi_model import PhiModel
from support.launches import Launches
from support.launching import REPOSITORY, clean_environment

SMALL = {"widths": [8, 8, 8, 8]}


def small_model(name: str = "pervit_t", **switches: object) -> PhiModel:
    torch.manual_seed(0)
    own = SMALL if name.startswith("pervit") else {}
    model = create_model(name, num_classes=3, image_size=64, switches={**own, **switches})
    assert isinstance(model, PhiModel)
    return model


def maps_and_gradients(model: PhiModel, grouped: bool) -> list[Tensor]:
    model.groups_phi = grouped
    model.zero_grad()
    maps = torch.stack([layer for layer in model.log_phi((4, 4)) if layer is not None])  # (12, heads, 16, 16)
    maps.backward(torch.linspace(0, 300, maps.numel(), dtype=maps.dtype).sin().view(maps.shape))
    return [maps.detach(), *(p.grad for p in model.phi_parameters() if p.grad is not None)]


@pytest.mark.parametrize(
    ("name", "switches"),
    [
        ("pervit_t", {}),
        ("pervit_t", {"phi_p_distance": "learned"}),
        ("pervit_t", {"phi_p_neighbours": False, "phi_p_init": "random"}),
        ("pervit_t", {"phi_p_layers": 1}),
        ("deit_t", {"peripheral_position": True}),
    ],
)
def test_maps_and_gradients_are_those_of_the_layers(name: str, switches: dict) -> None:
    """Guards against layers that get another's channels, and against a parameter without its gradient."""
    model = small_model(name, **switches).double()
    with torch.no_grad():
        for parameter in model.phi_parameters():  # at their initialization the heads are equal
            parameter += 0.1 * torch.randn_like(parameter)
    own, grouped = maps_and_gradients(model, False), maps_and_gradients(model, True)
    assert len(own) == len(grouped) == 1 + sum(1 for _ in model.phi_parameters())
    for expected, found in zip(own, grouped):
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)


def test_a_changed_weight_is_seen_in_eval() -> None:
    """Guards against cached maps of old weights, which only the parameters' versions show: hooks of the layers do not run."""
    model = small_model().eval()
    model.groups_phi = True
    with torch.no_grad():
        before = model.log_phi((4, 4))
        assert model.log_phi((4, 4)) is before
        model.blocks[3].position.norm2.bias += 3.0
        after = model.log_phi((4, 4))
    changed = [not torch.equal(old, new) for old, new in zip(before, after)]
    assert changed == [layer == 3 for layer in range(12)]


def test_operators_of_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against a step that again starts hundreds of small kernels on a GPU. The image's size changes none of these."""
    monkeypatch.setattr(vit, "suits_chunks", lambda *_: False)  # a CPU's form of attention
    model = create_model("pervit_t", num_classes=3, image_size=32, switches=SMALL)
    images = torch.randn(2, 3, 32, 32)
    counted = {}
    for grouped in (False, True):
        model.groups_phi = grouped
        with Launches() as step:
            model(images).sum().backward()
        model.zero_grad()  # else gradients are added
        with Launches() as phi:
            torch.stack([layer for layer in model.log_phi((2, 2)) if layer is not None]).sum().backward()
        counted[grouped] = step.count, phi.count
        model.zero_grad()
    print(f"operators forward and backward, in all and of Φp: by layers {counted[False]}, grouped {counted[True]}")
    assert counted[True][0] <= 720 and counted[True][1] <= 75
    assert counted[False][0] - counted[True][0] >= 300


ZERO_3 = """
import torch, deepspeed
from pipeline.cluster.rendezvous import disconnect, init_world
from pipeline.models import create_model

world = init_world()
losses, images = [], torch.randn(2, 3, 64, 64, generator=torch.Generator().manual_seed(1))
for stage in (0, 3):
    torch.manual_seed(0)
    model = create_model("pervit_t", num_classes=3, image_size=64, switches={"widths": [8, 8, 8, 8]}).to(world.device)
    model.groups_phi = True
    config = {
        "train_batch_size": 2,
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        "zero_allow_untested_optimizer": True,
    }
    engine = deepspeed.initialize(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), config=config)[0]
    for step in range(3):
        loss = engine(images.to(world.device)).square().mean()
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
print("losses", *losses)
disconnect()
"""


@pytest.mark.long
def test_under_zero_3_the_layers_are_called_one_by_one() -> None:
    """Guards against parameters that DeepSpeed gathers only for the call of their own module: they are empty before."""
    command = [sys.executable, "-c", ZERO_3]
    result = subprocess.run(command, cwd=REPOSITORY, env=clean_environment(), capture_output=True, text=True)
    assert result.returncode == 0, result.stderr[-3000:]
    losses = [float(word) for word in result.stdout.split("losses")[1].split()[:6]]
    assert losses[:3] == pytest.approx(losses[3:], rel=1e-5)
    assert losses[0] != losses[2]
