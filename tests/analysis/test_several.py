"""Several models on one page: the numbers of each one's own analysis, and a reason where a model has none."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from pipeline.analysis.several import compared, model_names
from pipeline.analysis.style import style
from pipeline.models import create_model
from pipeline.models.weights.exported import Description, write_exported
from support.ranks import run_forked

SIZE = 48


def exported(path: Path, name: str, classes: list[str], **switches: object) -> Path:
    torch.manual_seed(0)
    model = create_model(name, len(classes), SIZE, switches=switches)
    crop = {"mean": [0.5] * 3, "std": [0.2] * 3, "eval_crop": 1.0}
    about = Description(
        name, len(classes), SIZE, switches, classes, **crop, precision="fp32", step=7, weights="model", names="ours"
    )
    write_exported(path, model.state_dict(), about)
    return path


@pytest.mark.long
def test_the_page_has_the_numbers_of_each_model(digits_shards: Path, tmp_path: Path) -> None:
    """Guards against a curve of another model's numbers, other images for one of them, and a model that is left out in silence."""
    classes = json.loads((digits_shards / "manifest.json").read_text())["classes"]
    models = {
        "pervit": ("pervit_t", {"widths": [8, 8, 8, 12]}),
        "irpe": ("deit_t", {"relative_position": True}),
        "convit": ("convit_ti", {}),
    }
    files = [
        exported(tmp_path / f"{label}.safetensors", name, classes, **switches) for label, (name, switches) in models.items()
    ]
    output = tmp_path / "out"
    run_forked("pipeline.analyze", *files, "--data", digits_shards, "--images", 5, "--examples", 0, "--output", output)
    page, all_ = (output / "index.html").read_text(), json.loads((output / "analysis.json").read_text())
    alone = {label: json.loads((output / label / "analysis.json").read_text()) for label in models}
    assert all(f'href="{label}/index.html"' in page for label in models)
    for label, name, keys in (
        ("pervit", "nonlocality_attention", ("nonlocality", "attention")),
        ("irpe", "nonlocality_attention", ("nonlocality", "attention")),
        ("irpe", "impact_phi_p", ("impact", "phi_p")),
        ("convit", "attention_distance", ("mean_attention_distance",)),
        ("pervit", "attention_distance", ("mean_attention_distance",)),
    ):
        value = alone[label]["measures"]
        for key in keys:
            value = value[key]
        np.testing.assert_allclose(all_["measures"][name][label], np.mean(value, axis=1), rtol=1e-12)
    counts = alone["pervit"]["measures"]["region_counts"]["model"]
    np.testing.assert_allclose(all_["measures"]["region_shares"]["pervit"], 100 * np.array(counts) / sum(counts))
    captions = {figure["name"]: figure["caption"] for figure in all_["figures"]}
    assert "Without convit: it has no such quantity." in captions["nonlocality_attention"]
    assert "gates" in captions and "eval.analyses" in all_["omitted"]["attention_distance_over_training"]


def test_curves_of_a_training_are_those_of_its_rows(tmp_path: Path) -> None:
    """Guards against ConViT's Fig. 5 and 10 of another run's rows, layers for heads, and a run without any."""
    run = tmp_path / "run"
    run.mkdir()
    rows = [
        {
            "step": n,
            "time": 1.0,
            "epoch": float(n),
            "samples": 9,
            "analysis": {"mean_attention_distance": [[n, n + 2], [0, None]]},
        }
        for n in (1, 2)
    ]
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))

    def result(checkpoint: Path | str) -> dict:
        return {
            "model": "deit_t",
            "origin": {"checkpoint": str(checkpoint)},
            "measures": {},
            "omitted": {"nonlocality": "It needs images."},
        }

    found = compared({"run": result(run), "other": result("deit_t")})
    assert found.measures["attention_distance_over_training"] == {"run": [[1.0, [2.0, 0.0]], [2.0, [3.0, 0.0]]]}
    (plot,) = found.plots
    assert "Without other" in plot.caption and "run, other: It needs images." in found.omitted["nonlocality_attention"]
    with style():
        axes = plot.draw().axes[0]
    assert [line.get_ydata().tolist() for line in axes.lines] == [[2.0, 3.0], [0.0, 0.0]]


@pytest.mark.parametrize(
    ("sources", "names"),
    [(["deit_t", "deit_t"], ["deit_t_1", "deit_t_2"]), (["timm:vit a", "x/.."], ["timm_vit_a", "x_"]), (["a/b"], ["a_b"])],
)
def test_every_model_has_a_folder_of_its_own(sources: list[str], names: list[str]) -> None:
    assert model_names(sources, ["m"] * len(sources)) == names
