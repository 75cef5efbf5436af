"""Long and damaged metrics: every good row counts once, and a thinned curve loses no peak."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

from pipeline.reports.curves import smoothed, thinned
from pipeline.reports.run_page import run_page
from pipeline.runs.folder import read_run
from pipeline.runs.rows import read_metrics


def test_damaged_rows_are_counted_and_the_others_read(tmp_path: Path) -> None:
    """Guards against a row of junk that ends the report, or counts as a step."""
    rows = [
        b'{"step": 1, "loss": 2.5, "lr": 0.1}',
        b"\xff\xfe\x00",
        b"[1, 2]",
        b'{"loss": 1.0}',
        b'{"step": true, "loss": 1.0}',
        b'{"step": 2, "loss": null, "lr": "x"}',
        b'{"step": 3, "loss": 1e999, "lr": 0.3}',
        b'{"step": 3, "loss": 1.5, "lr": 0.3}',
        b'{"step": 3, "weights": "model", "top1": 50.0}',
        b'{"step": 3, "weights": "model"}',
        b'{"step": 3, "epoch": 1.0, "analysis": {"gate": [[0.5]]}}',
        b'{"step": 4, "lo',
    ]
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b"\n".join(rows))
    found = read_metrics(path)
    assert found.steps["step"].tolist() == [1, 2, 3]
    np.testing.assert_array_equal(found.steps["loss"], [2.5, np.nan, 1.5])
    np.testing.assert_array_equal(found.steps["lr"], [0.1, np.nan, 0.3])
    assert (found.damaged, found.repeated, found.half_a_line) == (5, 1, True)
    assert len(found.evaluations) == len(found.analyses) == 1


def test_a_thinned_curve_keeps_every_peak() -> None:
    """Guards against a spike of the loss that a page hides."""
    values = np.random.default_rng(0).normal(size=100_003)
    values[[5, 77_777]] = 50, -50
    steps = np.arange(len(values), dtype=float)
    x, y = thinned(steps, values, bins=500)
    assert len(x) <= 1000 and (np.diff(x) > 0).all()
    assert y.max() == 50 and y.min() == -50
    np.testing.assert_array_equal(values[x.astype(int)], y)
    np.testing.assert_allclose(smoothed(values, 5)[10], values[8:13].mean())
    np.testing.assert_allclose(smoothed(values, 5)[0], values[:3].mean())


def test_a_page_of_a_long_run_stays_small(tmp_path: Path) -> None:
    """Guards against a page that grows with the run."""
    row = {"epoch": 0.5, "loss": 2.0, "lr": 1e-3, "grad_norm": 1.0, "images_per_second": 100.0, "mfu": 0.4, "data_wait": 0.1}
    with open(tmp_path / "metrics.jsonl", "w") as file:
        for step in range(1, 60_001):
            file.write(json.dumps({"step": step, "time": 1e9 + step, **row, "memory_gib": 1.5 + step % 7}) + "\n")
    run = read_run(tmp_path)
    assert len(run.curve("loss")[0]) == 60_000
    page = run_page(run)
    assert len(page) < 6_000_000
    assert "60,000 steps are thinned" in page
