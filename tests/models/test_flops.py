"""FLOP counts are the papers' and nothing goes uncounted."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import nn

from pipeline.models import flops
from support.ranks import run_forked


def test_counts_of_all_sizes(tmp_path: Path) -> None:
    """Guards against counts that hide attention or charge Φp to every image."""
    run_forked("pipeline.flops", "pervit_t", "pervit_s", "pervit_m", "--json", tmp_path / "rows.json")
    rows = {row["name"]: row for row in json.loads((tmp_path / "rows.json").read_text())}
    expected = {  # parameters, modules only, with attention, Φp as the authors compute it
        "pervit_t": (7_591_000, 1.556, 1.752, 1.710),
        "pervit_s": (21_317_672, 4.428, 4.762, 6.726),
        "pervit_m": (43_723_936, 8.980, 9.457, 15.047),
    }
    for name, (params, modules, gmacs, authors_phi) in expected.items():
        row = rows[name]
        assert row["params"] == params
        assert row["gmacs_modules"] == pytest.approx(modules, abs=5e-4)
        assert row["gmacs"] == pytest.approx(gmacs, abs=5e-4)
        assert 0 < row["gmacs_phi"] < authors_phi / 3, "the folded first convolution saves most of it"


def test_a_switch_is_counted_without_the_papers_figures(tmp_path: Path) -> None:
    """Guards against another model's figures beside an ablation's count, and against a switch that is ignored."""
    shown = run_forked(
        "pipeline.flops", "lsat_t_32", "--switch", "kv_heads=per_head", "--json", tmp_path / "rows.json"
    ).stdout  # the smallest model to count
    (row,) = json.loads((tmp_path / "rows.json").read_text())
    assert row["switches"] == {"kv_heads": "per_head"} and row["params"] != 10_141_834
    assert "10.2" not in shown.splitlines()[1]
    refused = run_forked("pipeline.flops", "lsat_t_32", "--switch", "kv_heads", check=False)
    assert refused.returncode == 2 and "--switch 'kv_heads' is not of the form name=value" in refused.stderr


def test_an_uncounted_product_fails() -> None:
    """Guards against an operator that is silently counted as zero (fvcore #129, pytorch #195460)."""

    class Outer(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.cdist(x, x)

    with pytest.raises(RuntimeError, match="cdist"):
        flops._macs(Outer(), torch.zeros(1, 4, 4))


def test_training_flops_share_phi_over_the_batch() -> None:
    """Guards against an MFU that grows or shrinks with the batch because of Φp."""
    row = flops.count("pervit_t", 224)
    assert row.training_flops_per_image(128) == pytest.approx(6e9 * (row.gmacs + row.gmacs_phi / 128))
