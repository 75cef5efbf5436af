"""``pervit throughput``: a row for each model, beside what the papers print."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from support.ranks import run_forked


@pytest.mark.long
def test_a_row_for_each_model(tmp_path: Path) -> None:
    """Guards against images per batch that are not counted, and a paper's figure beside another image size than its own."""
    options = ("--batch-size", 3, "--json", tmp_path / "rows.json")
    shown = run_forked("pipeline.throughput", "convit_ti", "deit_t", "--image-size", 32, *options).stdout.splitlines()
    rows = json.loads((tmp_path / "rows.json").read_text())
    assert [(row["model"], row["image_size"], row["batch_size"], row["paper"]) for row in rows] == [
        ("convit_ti", 32, 3, None),
        ("deit_t", 32, 3, None),
    ]
    assert all(row["fp32"] > 0 and (row["bf16"] is None or row["bf16"] > 0) and row["params"] > 5e6 for row in rows)
    assert f"{rows[1]['fp32']:,.1f}" in shown[2] and shown[2].startswith("deit_t")
    wrong = run_forked("pipeline.throughput", "deit_x", check=False)
    assert wrong.returncode == 2 and "did you mean 'deit_" in wrong.stderr


def test_the_papers_figures() -> None:
    """ConViT's Table 1, LSAT's Tables 3 and 4; PerViT's and PosMLP's papers print none."""
    from pipeline.models import model_entry

    printed = {"convit_s": 305, "deit_b_plus": 114, "deit_t": 1442, "lsat_s_224": 298.9, "lsat_t_32": 1700.2, "pervit_t": None}
    assert {name: model_entry(name).paper_speed for name in printed} == printed
