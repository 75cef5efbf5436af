"""The benchmark of a training step, in miniature: that it runs, and that its forms compute the same."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from benchmarks.step_authors import authors_form
from pipeline.models import create_model
from pipeline.models.pervit.model import PerViT
from support.launching import run_module

TINY = ("--models", "pervit_t", "--batch", 8, "--rounds", 1, "--threads", 1, "--compile", "off", "model.image_size=32")


def test_the_authors_form_is_the_same_function() -> None:
    """Guards against a comparison with something else: outputs and all gradients agree in float64."""
    results = []
    for form in (lambda model: model, authors_form):
        torch.manual_seed(0)
        model = create_model("pervit_t", num_classes=3, image_size=64, switches={"widths": [8, 8, 8, 8]}).double()
        assert isinstance(model, PerViT)
        generator = torch.Generator().manual_seed(1)
        with torch.no_grad():
            for parameter in model.phi_parameters():  # at their initialization the heads are equal
                parameter += 0.1 * torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)
        model = form(model)
        scores = model(torch.randn(2, 3, 64, 64, generator=generator, dtype=torch.float64))
        scores.square().sum().backward()
        results.append([scores.detach(), *(parameter.grad for parameter in model.parameters())])
    for ours, theirs in zip(*results):
        torch.testing.assert_close(ours, theirs, rtol=1e-8, atol=1e-8)


def test_the_miniature(digits_shards: Path) -> None:
    """Guards against a benchmark that no longer starts, and against a table without one of its forms."""
    lines = run_module("benchmarks.step", *TINY, "--precisions", "fp32", "--shards", digits_shards).stdout.splitlines()
    rows = {cells[3].strip(): cells for cells in (line.split("|") for line in lines) if len(cells) == 12}
    assert {"ours", "plain PyTorch", "authors' form"} <= rows.keys()
    for name in ("ours", "plain PyTorch", "authors' form"):
        wall, cpu, share, peak = (float(rows[name][column].strip(" %")) for column in (6, 7, 9, 10))
        assert wall > 0 and cpu > 0 and 0 <= share < 100 and peak > 0
    assert float(rows["ours"][7]) == 1
    assert any(line.startswith("| pervit_t | fp32 |") and line.count("|") == 6 for line in lines), "the engine's own time"
    assert any("waiting for data" in line for line in lines)


@pytest.mark.parametrize("option", [("--rounds", 0), ("--models", "pervit_x")])
def test_refuses_in_a_sentence(option: tuple) -> None:
    """Guards against a traceback for a wrong argument."""
    result = run_module("benchmarks.step", *option, check=False)
    assert result.returncode == 2 and "Traceback" not in result.stderr and str(option[1]) in result.stderr
