"""The page about several runs: seeds in one group, other data in another table, what is damaged named; sorted in a browser."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest

from pipeline.errors import UserError
from pipeline.reports.comparison import by_data, differing_keys, group_runs, mean_curve, results
from pipeline.reports.comparison_page import comparison_page
from pipeline.runs.folder import find_runs, read_runs
from support.browser import open_page
from support.ranks import run_forked
from support.run_folders import write_run

SMALL = ("model.image_size=64", "model.num_classes=10", "train.epochs=3", "train.global_batch_size=64")
CLICK = """<script>
for (const head of document.querySelectorAll(".runs th")) if (head.textContent === "Top-1 (%)") head.click();
document.querySelector(".runs .fold").click();
document.querySelector(".chip").click();
</script>"""


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Ten runs of four configs on two data sets, one that is not finished, and two folders that cannot be used."""
    folder = tmp_path_factory.mktemp("runs")
    for seed in range(3):
        write_run(folder / f"pervit_{seed}", "pervit_t", *SMALL, f"seed={seed}", top1=60 + seed)
        write_run(folder / f"no_phi_p_{seed}", "pervit_t", *SMALL, "model.switches.phi_p=false", f"seed={seed}", top1=70 + seed)
    for seed in range(2):
        write_run(folder / f"deit_{seed}", "deit_t", *SMALL, f"seed={seed}", top1=50 + seed)
    write_run(folder / "imagenet", "pervit_t", top1=78.8, images=1_281_167, count=50_000)
    write_run(folder / "unfinished", "pervit_t", *SMALL, "optim.lr=0.002", top1=None)
    (folder / "damaged").mkdir()
    (folder / "damaged" / "metrics.jsonl").write_text('{"step": 1, "lo')
    return folder


def grouped(folder: Path) -> list:
    return group_runs(read_runs(find_runs([folder])[0])[0])


def test_runs_that_differ_only_in_their_seed_are_a_group(runs: Path) -> None:
    """Guards against seeds that are shown as configs, and a mean over configs."""
    groups = {group.name: group for group in grouped(runs)}
    sizes = {name: len(group.runs) for name, group in groups.items()}
    assert sorted(sizes.values()) == [1, 1, 2, 3, 3]
    assert sizes["phi_p=false"] == sizes["pervit_t"] == 3 and sizes["deit_t"] == 2 and sizes["lr=0.002"] == 1, sizes
    assert results(groups["phi_p=false"].runs, "top1") == [70, 71, 72]
    differing = differing_keys(list(groups.values()))
    assert {"model.name", "model.switches.phi_p", "model.image_size", "optim.lr"} <= set(differing)
    assert not {"seed", "output_dir", "optim.betas"} & set(differing)


def test_the_groups_of_a_sweep_are_named_by_what_it_varied(tmp_path: Path) -> None:
    """Guards against a group with the model's name, which all have, and one whose values are left out as the usual ones."""
    for number in range(4):
        varied = [f"optim.lr={(0.001, 0.004)[number // 2]}", f"augment.mixup={(0, 0.8)[number % 2]}"]
        write_run(tmp_path / str(number), "pervit_t", *SMALL, *varied, top1=60 + number)
    names = [group.name for group in grouped(tmp_path)]
    assert names == ["mixup=0, lr=0.001", "mixup=0.8, lr=0.001", "mixup=0, lr=0.004", "mixup=0.8, lr=0.004"]
    assert "4 different configs of pervit_t." in comparison_page([tmp_path])[0]
    write_run(tmp_path / "4", "pervit_t", *SMALL, "optim.lr=0.002", "augment.mixup=0", steps=0, top1=None)
    assert [group.name for group in grouped(tmp_path)] == [*names, "mixup=0, lr=0.002, no step yet"]
    for name in ("lamb", "adamw"):
        write_run(tmp_path / "two" / name, "pervit_t", *SMALL, f"optim.name={name}")
    assert {group.name for group in grouped(tmp_path / "two")} == {"optim.name=lamb", "optim.name=adamw"}


def test_other_data_has_a_table_of_its_own(runs: Path) -> None:
    """Guards against accuracies on 10 and on 1,000 classes in one column; a run without an evaluation goes with its classes."""
    sizes = {title: sum(len(group.runs) for group in same) for title, same in by_data(grouped(runs)).items()}
    assert sizes == {"10 classes, 10,000 validation images": 9, "1,000 classes, 50,000 validation images": 1}


def test_the_mean_curve_is_where_all_runs_are() -> None:
    """Guards against a mean that jumps where one of the runs ends."""
    x = np.arange(10.0)
    places, mean = mean_curve([(x, x), (x[:6], 3 * x[:6])]) or (None, None)
    assert places.tolist() == [0, 1, 2, 3, 4, 5] and mean.tolist() == [0, 2, 4, 6, 8, 10]
    assert mean_curve([(x, x), (x[:0], x[:0])]) is None


def test_what_cannot_be_used_is_named(runs: Path, tmp_path: Path) -> None:
    """Guards against one damaged folder that keeps ten runs from being compared, or is left out silently."""
    page, lost = comparison_page([runs, tmp_path / "gone", tmp_path])
    assert lost == [tmp_path / "gone", tmp_path] and "<h1>10 runs, 3 cannot be read</h1>" in page
    assert "damaged" in page and "gone does not exist." in page and f"{tmp_path} holds no run folder." in page
    result = run_forked("pipeline.report", runs, tmp_path / "gone", "--output", tmp_path / "page.html", check=False)
    assert result.returncode == 1 and result.stderr == f"warning: {tmp_path / 'gone'} is left out: the page says why\n"
    assert (tmp_path / "page.html").exists()
    with pytest.raises(UserError, match="pass the output_dir of runs"):
        comparison_page([tmp_path])


def test_the_page_in_a_browser(runs: Path, tmp_path: Path) -> None:
    """Guards against a page whose scripts fail, whose sorting moves a run away from its group, or that is too large to send."""
    path = tmp_path / "report.html"
    run_forked("pipeline.report", runs, "--output", path)
    assert path.stat().st_size < 8_000_000
    text = path.read_text()
    path.write_text(text.replace("</body>", f"{CLICK}</body>"))
    document, complaints = open_page(path)
    assert not complaints
    first = document.partition('class="runs"')[2].partition("</table>")[0]
    bodies = [[re.sub(r"<[^>]*>", "", row) for row in re.findall(r"<tr.*?</tr>", body)] for body in first.split("<tbody>")[1:]]
    means = [float(found[1]) for body in bodies if (found := re.search(r"(\d\d\.\d\d) ±", body[0]))]
    assert means == [71.0, 61.0, 50.5] and len(bodies) == 4  # sorted, what has no value last
    assert all("seed" in row for body in bodies for row in body[1:])
    assert first.count('aria-expanded="true"') == 1 and 'aria-pressed="false"' in document
    assert document.count("js-plotly-plot") >= 4


def test_accuracy_stands_beside_what_the_papers_print(tmp_path: Path) -> None:
    """Guards against a run at another model's size or speed, and figures of other data or of a part of it among ImageNet's."""
    imagenet = {"images": 1_281_167, "count": 50_000}
    write_run(tmp_path / "runs" / "a", "deit_s", top1=79.5, **imagenet)
    write_run(tmp_path / "runs" / "b", "ablations/pervit_table1_b_no_phi_p", top1=77.0, **imagenet)
    speed = {"model": "deit_s", "switches": {}, "image_size": 224, "batch_size": 1, "device": "a GPU", "fp32": 500.0}
    (tmp_path / "speeds.json").write_text(json.dumps([speed]))
    page, lost = comparison_page([tmp_path / "runs", tmp_path / "speeds.json"])
    assert not lost
    drawn = [json.loads(text) for text in re.findall(r'<script type="application/json">(.*?)</script>', page)]
    by_title = {each["layout"]["title"]["text"]: each["data"] for each in drawn}
    points = {}
    for title in ("Parameters (M)", "GMACs", "Images/s"):
        traces = by_title[f"Top-1 (%) by {title}"]
        points[title] = {trace["name"]: list(zip(trace["x"], trace["y"])) for trace in traces if trace["mode"] == "markers"}
        ours = [(trace["x"][0], trace["y"][0]) for trace in traces if trace["mode"] != "markers"]
        expected = {"Parameters (M)": [(22.05, 79.5), (7.6, 77.0)], "GMACs": [(4.3, 79.5)], "Images/s": [(500.0, 79.5)]}[title]
        np.testing.assert_allclose(ours, expected, rtol=0.01)
    assert (21, 82.1) in points["Parameters (M)"]["PerViT"] and (18.6, 83.6) in points["GMACs"]["PosMLP"]
    assert (382, 82.2) in points["Images/s"]["ConViT"] and (298.9, 82.2) in points["Images/s"]["LSAT"]
    every = [point for its in points["Parameters (M)"].values() for point in its]
    assert (10.2, 97.0) not in every and (19.4, 72.18) not in every  # CIFAR-10, and half of ImageNet


def test_of_several_runs_there_are_no_pictures(runs: Path) -> None:
    """Guards against options that are silently without effect."""
    result = run_forked("pipeline.report", runs, "--data", runs, check=False)
    assert result.returncode == 2 and f"--data requires one run, but {runs} holds several" in result.stderr
    result = run_forked("pipeline.report", check=False)
    assert result.returncode == 2 and "a report requires at least one run" in result.stderr
    assert json.dumps(result.stdout) == '""'
