"""A row of ``configs/tables/*.yml`` is a config like a file: as a base, in messages, and where it is written wrongly."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from pipeline.config import load_config, load_recipe, shipped_recipes, tables
from pipeline.config.tables import read_tables
from pipeline.errors import UserError
from support.launching import run_module

ROW = "{labels: [x], name: pervit_table1_x, base: pervit_t, change: model.switches.cpe=false}"
PAGE = "paper: P\ntables:\n  pervit_table1:\n    title: T\n    columns: [A]\n    figures: []\n    rows:\n"


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Write the rows of a table among a copy of the shipped configs, which are then the shipped ones; returns the table's file."""
    folder = tmp_path / "recipes"
    shutil.copytree(shipped_recipes(), folder)
    monkeypatch.setattr(tables, "_PACKAGE", tmp_path)

    def to_file(*rows: str) -> Path:
        file = folder / "tables" / "pervit.yml"
        file.write_text(PAGE + "".join(f"      - {row}\n" for row in rows))
        read_tables.cache_clear()
        return file

    yield to_file
    read_tables.cache_clear()


def test_a_file_may_begin_from_a_row(tmp_path: Path) -> None:
    """Guards against rows that a user's config cannot take for its base, and a run of it that is told another recipe."""
    (tmp_path / "mine.yaml").write_text("base: ablations/pervit_table5_lrn\ntrain: {epochs: 3}\n")
    config, row = load_config(tmp_path / "mine.yaml"), load_config("ablations/pervit_table5_lrn")
    assert config.model == row.model and config.train.epochs == 3
    recipe = load_recipe(tmp_path / "mine.yaml")
    assert recipe and recipe.config == row
    assert recipe.name == f"{shipped_recipes() / 'tables' / 'pervit.yml'}, row pervit_table5_lrn"


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        (["{labels: [x], name: pervit_table1_x}"], "row pervit_table1_x must have a base and no config, got labels, name"),
        ([ROW, ROW], "row pervit_table1_x: the name must be of one row, got two"),
        ([ROW.replace("table1_x", "table2_x")], "row pervit_table2_x: the name must begin with pervit_table1_"),
        ([ROW.replace("change", "chanje")], "row pervit_table1_x: unknown key 'chanje'"),
        (["{labels: [x], base: pervit_t}"], "row ['x']: base requires a name, got none"),
        ([ROW.replace("cpe=false", "cpe=false, top1: 1, top1: 2")], "is not valid YAML (the key 'top1' is given 2 times"),
        (
            [ROW.replace("base: pervit_t", "base: pervit_z")],
            "base must be a shipped config, got pervit_z: did you mean pervit_",
        ),
        ([ROW.replace("model.switches.cpe=false", "train.epoch=3")], "row pervit_table1_x: unknown key 'train.epoch'"),
        ([ROW.replace("model.switches.cpe=false", "train.epochs=many")], "row pervit_table1_x: train.epochs must be a number"),
        (
            [ROW.replace("model.switches.cpe=false", "train.epochs")],
            "row pervit_table1_x: override 'train.epochs' is not of the form",
        ),
        ([ROW.replace("base: pervit_t", "base: ablations/pervit_table1_x")], "row pervit_table1_x is its own base"),
    ],
)
def test_a_row_that_is_written_wrongly(rows: list[str], said: str, write) -> None:
    """Guards against a row that trains something else than it says, and a message without its place."""
    file = write(*rows)
    with pytest.raises(UserError) as error:
        load_config("ablations/pervit_table1_x")
    assert said in str(error.value) and str(file) in str(error.value)


def test_values_are_those_of_a_command_line(write) -> None:
    """Guards against a number that becomes text, and a list that is cut at its commas."""
    write(
        ROW.replace("change: model", 'subset: 0.05, change: "optim.lr=1e-3 model.switches.widths=[16,16,16,16] model').replace(
            "}", '"}'
        )
    )
    config = load_config("ablations/pervit_table1_x")
    assert config == load_config(
        "pervit_t",
        ["optim.lr=1e-3", "model.switches.widths=[16,16,16,16]", "model.switches.cpe=false", "data.path=data/imagenet_05"]
        + ["output_dir=runs/pervit_table1_x"],
    )  # fmt: skip


def test_the_command_prints_a_config() -> None:
    """Guards against a row that nobody can have as a file."""
    said = run_module("pipeline.config", "--config", "ablations/pervit_table5_lrn").stdout
    assert (
        said.startswith("# sbatch launch/train.slurm ablations/pervit_table5_lrn ")
        and "\n    phi_p_distance: learned\n" in said
    )
    wrong = run_module("pipeline.config", "--config", "ablations/pervit_table5_lnr", check=False)
    assert wrong.returncode == 2 and "did you mean ablations/pervit_table5_lrn?" in wrong.stderr
