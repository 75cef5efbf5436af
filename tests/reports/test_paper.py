"""The recipe that a run is compared with: the nearest one, and no figure for a training that is another."""

from __future__ import annotations

from pathlib import Path

import pytest

from pipeline.config import config_to_yaml, load_config
from pipeline.reports.papers import paper_recipe
from pipeline.runs.folder import RunFolder


@pytest.mark.parametrize(
    ("config", "overrides", "name", "top1", "decisive"),
    [
        ("pervit_t", ["data.path=/shards", "train.micro_batch_size=64"], "pervit_t", 78.8, []),
        ("ablations/pervit_table1_e_no_cpe", ["seed=3"], "ablations/pervit_table1_e_no_cpe", 78.1, []),
        ("convit_s_plus", ["train.epochs=100"], "convit_s_plus", 82.2, ["train.epochs"]),
        ("convit_s_plus", ["model.switches.gpsa_layers=0"], "ablations/convit_table3_e_no_gpsa", 79.1, []),
        ("pervit_m_cifar10", [], "pervit_m_cifar10", 99.1, []),
        ("pervit_t", ["model.switches.widths=[16,16,16,16]"], "pervit_t", 78.8, ["model.switches.widths"]),
    ],
)
def test_the_nearest_recipe(
    config: str, overrides: list[str], name: str, top1: float, decisive: list[str], tmp_path: Path
) -> None:
    """Guards against a run beside the figure of another training, with nothing that says so."""
    (tmp_path / "config.yaml").write_text(config_to_yaml(load_config(config, overrides)))
    found = paper_recipe(RunFolder(tmp_path))
    assert found is not None
    assert (found.name, found.top1, found.decisive) == (name, top1, decisive)
    assert found.comparable == (not decisive)


def test_a_damaged_config_has_no_recipe(tmp_path: Path) -> None:
    """Guards against a traceback, and against PerViT-T's figure beside a run of which nothing is known."""
    assert paper_recipe(RunFolder(tmp_path)) is None
    (tmp_path / "config.yaml").write_text("train: 3")
    assert paper_recipe(RunFolder(tmp_path)) is None
