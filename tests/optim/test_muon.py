"""Muon: its iteration's precision, what it takes for a matrix, and its memory. ``test_optimizers.py`` compares it with PyTorch's."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from pipeline.config import OptimConfig
from pipeline.models import create_model
from pipeline.optim.description import MATRICES
from pipeline.optim.muon import DESCRIPTION, MuonAdamW
from pipeline.planning.trace import Trace


@pytest.mark.parametrize(("precision", "rounding"), [("bf16", 2e-2), ("fp32", 1e-5)])
def test_the_iteration_has_the_trainings_precision(precision: str, rounding: float) -> None:
    """Guards against an iteration in bf16 where the training is in fp32: it takes ten times as long on a CPU without bf16 instructions."""
    matrix = nn.Parameter(torch.zeros(64, 96))
    matrix.grad = torch.randn(64, 96, generator=torch.Generator().manual_seed(0))
    group = {"params": [matrix], "names": ["matrix"], "weight_decay": 0.0, MATRICES: True}
    optimizer = DESCRIPTION.build([group], OptimConfig(name="muon", warmup_lr=1.0), precision)
    optimizer.step()
    exact = matrix.grad.double() / matrix.grad.double().norm()
    for _ in range(5):
        gram = exact @ exact.T
        exact = 3.4445 * exact + (-4.7750 * gram + 2.0315 * gram @ gram) @ exact
    distance = (-matrix.double() / (0.2 * math.sqrt(96)) - exact).norm() / exact.norm()
    assert (rounding / 20 if precision == "bf16" else 0) < distance < rounding


def test_it_takes_convolutions_as_matrices() -> None:
    """Guards against a stem that AdamW updates, and against Muon for the layer that sees the image, and for depthwise convolutions."""
    model = create_model(
        "pervit_t", image_size=64, switches={"stem_widths": [8, 12], "stem_strides": [2, 2, 2], "depths": [1, 1, 1, 1]}
    )
    of_stem = {"stem.layers.1.0.weight", "stem.layers.2.0.weight", "stem.projection.weight"}
    matrices = DESCRIPTION.matrices(model)
    assert {name for name in matrices if name.startswith("stem")} == of_stem
    assert not {name for name in matrices if ".cpe." in name}
    kernel = dict(model.named_parameters())["stem.layers.1.0.weight"]  # (12, 8, 3, 3)
    steps = []
    for shape in (kernel.shape, (12, 72)):
        weight = nn.Parameter(kernel.detach().reshape(shape).clone())
        weight.grad = torch.randn(kernel.shape, generator=torch.Generator().manual_seed(0)).reshape(shape)
        group = {"params": [weight], "names": ["weight"], "weight_decay": 0.1, MATRICES: True}
        DESCRIPTION.build([group], OptimConfig(name="muon", warmup_lr=0.1), "fp32").step()
        steps.append(weight.detach().flatten())
    assert torch.equal(*steps) and not torch.equal(steps[0], kernel.detach().flatten())
    assert DESCRIPTION.matrix_flops((12, 8, 3, 3)) == DESCRIPTION.matrix_flops((12, 72)) > 0


def test_it_keeps_its_momentum_alone() -> None:
    """Guards against a step's scratch, with the updates that it is a view of, in the memory of the next step."""
    matrix = nn.Parameter(torch.randn(32, 16))
    group = {"params": [matrix], "names": ["matrix"], "weight_decay": 0.1, MATRICES: True}
    optimizer = MuonAdamW([group], lr=0.1, momentum=0.95, betas=(0.9, 0.999), eps=1e-8, iterates=torch.bfloat16)
    matrix.grad = torch.randn_like(matrix)
    with Trace() as live:
        optimizer.step()
        assert 2 * matrix.nbytes <= live.total < 2.1 * matrix.nbytes  # the matrix and its momentum
