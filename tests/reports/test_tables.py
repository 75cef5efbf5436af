"""The papers' tables: runs fill the rows they belong to, in every format."""

from __future__ import annotations

import csv
import io
import json
import shutil
import subprocess
from pathlib import Path

import pytest

from pipeline.config.tables import paper_tables
from pipeline.errors import UserError
from pipeline.reports.comparison import mean_and_spread, results
from pipeline.reports.papers import find_table, list_tables
from pipeline.reports.row_runs import Filled, fill
from pipeline.reports.table_formats import latex_text, paper_table
from pipeline.runs.folder import find_runs, read_runs
from support.ranks import run_forked
from support.run_folders import write_run

IMAGENET = {"images": 1_281_167, "count": 50_000}
SMALL = ("model.image_size=64", "model.num_classes=10", "train.epochs=3", "train.global_batch_size=64")
QUARTER, QUARTER_WITHOUT_STEM = "model.switches.widths=[32,48,56,72]", "model.switches.widths=[52,76,92,116]"


def filled(table: str, *paths: Path, any_data: bool = False) -> Filled:
    runs, problems = read_runs(find_runs(list(paths))[0])
    assert not problems
    return fill(find_table(table), runs, any_data)


def test_a_run_belongs_to_a_row_by_its_config_and_its_data(tmp_path: Path) -> None:
    """Guards against a run that is taken for a row by its folder's name, though its schedule, its switches or its data differ."""
    row = "ablations/pervit_table1_b_no_phi_p"
    for seed, top1 in ((0, 77.0), (1, 77.5)):
        write_run(tmp_path / f"anything_{seed}", row, f"seed={seed}", top1=top1, **IMAGENET)
    write_run(tmp_path / "pervit_table1_b_no_phi_p", row, "train.epochs=100", top1=70.0, **IMAGENET)
    write_run(tmp_path / "a_part", row, top1=60.0, images=128_117, count=50_000)
    write_run(tmp_path / "goes_on", row, "seed=5", top1=None, **IMAGENET)
    write_run(tmp_path / "explicit", "pervit_t", top1=78.0, **IMAGENET)
    found = filled("pervit_table1", tmp_path)
    assert {key: [run.path.name for run in runs] for key, runs in found.runs.items()} == {
        (1, 0): ["anything_0", "anything_1"],
        (0, 0): ["explicit"],
    }
    assert mean_and_spread(results(found.runs[1, 0], "top1")) == pytest.approx((77.25, 0.3535533906))
    reasons = {Path(path).name: reason for reason, paths in found.unused.items() for path in paths}
    assert "train.epochs=100" in reasons["pervit_table1_b_no_phi_p"] and "128,117 training" in reasons["a_part"]
    assert reasons["goes_on"] == "it is not finished"
    assert [missing.config for missing in found.missing()][0] == "ablations/pervit_table1_c_no_phi_c"


def test_runs_of_other_data_stand_in_columns_by_themselves(tmp_path: Path) -> None:
    """Guards against accuracies of CIFAR-10 among those of ImageNet, and a mean over runs of two schedules."""
    write_run(tmp_path / "a", "pervit_t", *SMALL, QUARTER, top1=61.0)
    write_run(tmp_path / "b", "ablations/pervit_table1_b_no_phi_p", *SMALL, QUARTER, top1=60.0)
    write_run(tmp_path / "d", "ablations/pervit_table1_d_no_stem", *SMALL, QUARTER_WITHOUT_STEM, top1=55.0)
    write_run(tmp_path / "longer", "pervit_t", *SMALL, QUARTER, "train.epochs=6", top1=66.0)
    write_run(tmp_path / "paper", "pervit_t", top1=78.5, **IMAGENET)
    assert [run.path.name for runs in filled("pervit_table1", tmp_path).runs.values() for run in runs] == ["paper"]
    found = filled("pervit_table1", tmp_path, any_data=True)
    columns = [
        {number: [run.path.name for run in runs] for (number, its), runs in found.runs.items() if its == n} for n in range(3)
    ]
    assert columns[0] == {0: ["a"], 1: ["b"], 3: ["d"]}
    assert sorted(map(str, columns[1:])) == ["{0: ['longer']}", "{0: ['paper']}"]
    text = paper_table("pervit_table5", [tmp_path], "markdown", any_data=True)
    assert (
        "compare the differences" in text and "CIFAR-10 (10 classes, 50,000 training" in text and "64 pixels, 3 epochs" in text
    )
    command = next(line for line in text.splitlines() if "pervit_table5_euc_ml" in line and line.startswith("pervit "))
    assert "model.image_size=64" in command and "train.epochs=3.0" in command and "widths=[32, 48, 56, 72]" in command


def test_a_test_time_row_has_the_evaluation_with_its_switch(tmp_path: Path) -> None:
    """Guards against the training's own accuracy in a masked row, and an evaluation of another run, mask or set (ConViT, Table 6)."""
    write_run(tmp_path / "runs" / "a", "convit_ti", top1=73.0, **IMAGENET)
    evaluation = {
        "checkpoint": str(tmp_path / "runs" / "a"),
        "switches": {"mask_content_layers": 3},
        "count": 50_000,
        "top1": 62.5,
    }
    others = [
        {**evaluation, "switches": {"mask_position_layers": 5}, "checkpoint": str(tmp_path / "runs" / "b"), "top1": 1.0},
        {**evaluation, "switches": {"mask_content_layers": 10}, "count": 10_000, "top1": 2.0},
    ]
    files = {"one.json": evaluation, "two.json": others, "three.json": {"else": 1}}
    for name, content in files.items():
        (tmp_path / name).write_text(json.dumps(content))
    text = paper_table("convit_table6", [tmp_path / "runs", *(tmp_path / name for name in files)], "csv")
    rows = {(row["layers_masked"], row["mask"]): row["ours_top1"] for row in csv.DictReader(io.StringIO(text))}
    assert rows[("3", "content")] == "62.5000" and rows[("–", "none")] == "73.0000"
    assert [value for value in rows.values() if value] == ["62.5000", "73.0000"]
    text = paper_table("convit_table6", [tmp_path / "runs", tmp_path / "three.json"], "markdown")
    command = (
        f"pervit evaluate --checkpoint {tmp_path / 'runs' / 'a'} --data data/imagenet --switch mask_position_layers=5 --json"
    )
    assert command in text and "three.json holds no result of" in text


def test_speeds_come_from_throughput(tmp_path: Path) -> None:
    """Guards against a speed of another size or of other heads than the row's (ConViT, Table 1; LSAT, Table 3)."""
    about = {"image_size": 32, "batch_size": 128, "device": "Quadro GP100"}
    rows = [
        {**about, "model": "lsat_t_32", "switches": {"heads": 3}, "fp32": 1700.0},
        {**about, "model": "lsat_s_32", "switches": {}, "fp32": 9.0},  # the published code's keys, not the table's
        {**about, "model": "lsat_t_32", "switches": {"heads": 3}, "image_size": 64, "fp32": 8.0},
    ]
    (tmp_path / "speeds.json").write_text(json.dumps(rows))
    text = paper_table("lsat_table3", [tmp_path / "speeds.json"], "csv")
    ours = {row["model"]: row["ours_speed"] for row in csv.DictReader(io.StringIO(text))}
    assert {model: speed for model, speed in ours.items() if speed} == {"LSAT-T": "1700.0000"}
    text = paper_table("lsat_table3", [tmp_path / "speeds.json"], "markdown")
    assert "of Quadro GP100 with batches of 128" in text
    assert "pervit throughput ablations/lsat_table3_s_32_cifar100 ablations/lsat_table3_b_32_cifar100 --json" in text


def test_rows_of_a_table_may_be_of_several_data_sets(tmp_path: Path) -> None:
    """Guards against CIFAR-10's run in CIFAR-100's row (PerViT, Table S4), and a hundred classes among a thousand (ConViT, Fig. 8)."""
    write_run(tmp_path / "a", "pervit_m_cifar10", top1=99.0, images=50_000, count=10_000)
    write_run(tmp_path / "b", "pervit_m_cifar100_sgd", top1=91.0, images=50_000, count=10_000)
    write_run(tmp_path / "c", "ablations/convit_figure8_9_strength_2", top1=80.0, images=129_395, count=5_000)
    found = filled("pervit_tableS4", tmp_path)
    assert {found.table.rows[number].labels: runs[0].name for (number, _), runs in found.runs.items()} == {
        ("PerViT-M", "CIFAR-10"): "a",
        ("PerViT-M, SGD", "CIFAR-100"): "b",
    }
    found = filled("convit_figure8", tmp_path)
    assert {found.table.rows[number].labels: runs[0].name for (number, _), runs in found.runs.items()} == {("9", "2"): "c"}


def test_a_later_run_of_a_seed_replaces_the_earlier(tmp_path: Path) -> None:
    """Guards against a seed that counts twice."""
    for name in ("one", "two"):
        write_run(tmp_path / name, "pervit_t", **IMAGENET)
    found = filled("pervit_table5", tmp_path)
    assert len(found.runs[0, 0]) == len(found.runs[3, 0]) == 1  # the two rows of one config
    assert [len(paths) for paths in found.unused.values()] == [1]


def test_every_format_has_every_row(tmp_path: Path) -> None:
    """Guards against a cell that ends a row early: pipes, ampersands, commas and percent signs are escaped."""
    write_run(
        tmp_path / "run_with_100%|&", "ablations/posmlp_table6_free", "data.path=x", top1=77.61, images=640_583, count=50_000
    )
    text = {form: paper_table("posmlp_table6", [tmp_path], form) for form in ("markdown", "latex", "csv", "html")}
    rows = [line for line in text["markdown"].splitlines() if line.startswith("|")]
    assert len(rows) == 6 and len({len(row) for row in rows}) == 1 and len({row.count("|") for row in rows}) == 1
    body = text["latex"].partition(r"\midrule")[2].partition(r"\bottomrule")[0].strip().splitlines()
    assert len(body) == 4 and {line.count("&") for line in body} == {4} and r"$\Gamma$$\Gamma$$^\top$" in body[2]
    assert latex_text("a_b & 10 % #") == r"a\_b \& 10 \% \#" and latex_text("Φp ± 1") == r"$\Phi_{\mathrm{p}}$ $\pm$ 1"
    for each in paper_tables().values():
        cells = [each.paper, each.title, each.note, *each.columns, *(label for row in each.rows for label in row.labels)]
        assert all(latex_text(cell).isascii() for cell in cells), each.name  # plain LaTeX may not know other characters
    table = list(csv.DictReader(io.StringIO(text["csv"])))
    assert [row["paper_top1"] for row in table] == ["76.49", "77.61", "77.40", "77.20"]
    assert [row["ours_top1"] for row in table] == ["", "77.6100", "", ""] and table[1]["ours_seeds"] == "1"
    assert text["html"].count("<tr>") == 6 and "<script src" not in text["html"]


@pytest.mark.skipif(shutil.which("pdflatex") is None, reason="needs pdflatex (Debian: texlive-latex-recommended)")
@pytest.mark.parametrize("name", paper_tables())
def test_latex_compiles(name: str, tmp_path: Path) -> None:
    """Guards against a character that LaTeX does not know."""
    packages = r"\usepackage{booktabs}\usepackage{amssymb}"
    body = paper_table(name, [], "latex", any_data=True)
    (tmp_path / "t.tex").write_text(rf"\documentclass{{article}}{packages}\begin{{document}}{body}\end{{document}}")
    result = subprocess.run(["pdflatex", "-halt-on-error", "t.tex"], cwd=tmp_path, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout[-1500:]


def test_unknown_tables_and_folders_without_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Guards against a misspelt table that is a traceback, and a folder that is passed over silently."""
    with pytest.raises(UserError, match="did you mean pervit_table1"):
        find_table("pervit_tabel1")
    assert all(name in list_tables() for name in paper_tables())
    text = paper_table("lsat_table6", [tmp_path, tmp_path / "gone"], "markdown")
    assert f"{tmp_path} holds no run folder." in text.replace("\\", "") and "does not exist." in text
    assert "gone" not in paper_table("lsat_table6", [tmp_path / "gone"], "csv")
    assert f"{tmp_path / 'gone'} does not exist." in capsys.readouterr().err


def test_the_command(tmp_path: Path) -> None:
    """Guards against a table that the command prints with something else, or that is not written."""
    write_run(tmp_path / "run", "ablations/lsat_table6_ii_cvt", top1=95.5, images=50_000, count=10_000)
    printed = run_forked("pipeline.report", "--table", "lsat_table6", tmp_path, "--format", "markdown").stdout
    assert printed.startswith("## LSAT") and "95.50" in printed and "--config ablations/lsat_table6_i_swin seed=0" in printed
    said = run_forked("pipeline.report", "--table", "lsat_table6", tmp_path, "--output", tmp_path / "t.html").stdout
    assert "95.50" in (tmp_path / "t.html").read_text()
    assert said == f"{tmp_path / 't.html'}: {(tmp_path / 't.html').stat().st_size / 1e3:.1f} kB\n"


def test_options_of_one_run_do_not_go_with_a_table(tmp_path: Path) -> None:
    """Guards against options that are silently without effect."""
    result = run_forked("pipeline.report", "--table", "lsat_table6", "--analysis", tmp_path, check=False)
    assert result.returncode == 2 and "--analysis requires one run, but --table is given" in result.stderr
