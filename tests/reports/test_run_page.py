"""The page about one run: what it tells of a run with a story, in progress, without parts, damaged; opened in a browser."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from PIL import Image

from pipeline.errors import UserError
from pipeline.reports.run_page import run_page
from pipeline.runs.folder import read_run, starts_of
from support.browser import open_page
from support.predictions import BAD, write_predictions
from support.ranks import run_forked

MOST_BYTES = 8_000_000
HOLD = """
import os, sys, time
from pathlib import Path
from pipeline.files import lock_bytes

lock = Path(sys.argv[1])
print(lock_bytes(os.open(lock, os.O_RDWR), lock), flush=True)
time.sleep(600)
"""


def made(run: Path, folder: Path, **sources: Path) -> Path:
    """The page as a file."""
    path = folder / "report.html"
    path.write_text(run_page(read_run(run), **sources))
    assert path.stat().st_size < MOST_BYTES
    return path


def words(page: str) -> str:
    """The page's text without its scripts, its style and its tags."""
    bare = re.sub(r"<(script|style)\b.*?</\1>", " ", page, flags=re.DOTALL)
    return re.sub(r"\s+", " ", re.sub(r"<[^>]*>", " ", bare))


@pytest.mark.long
def test_the_story_of_a_run_with_three_restarts_and_a_bad_sample(storied_run: Path) -> None:
    """Guards against a story that is not what happened: ends, repeated steps and the bad sample are those of the files."""
    run = read_run(storied_run)
    starts = starts_of(run)
    assert [start.whole for start in starts] == [False, True, False, True]
    assert "killed" in starts[0].end and "killed" in starts[2].end
    assert starts[1].end == "stopped by SIGTERM" and starts[3].end == "train.max_steps"
    assert (
        starts[1].step == 5 * ((starts[0].reached or 0) // 5) or starts[1].step == 0
    )  # a save was not done when it was killed
    assert all(a.repeated == a.reached - b.step for a, b in zip(starts, starts[1:]))
    assert starts[1].repeated == 0  # stopped by a signal, it has saved all
    assert [start.zero_stage for start in starts] == [0] * 4 and starts[0].world_size == 1
    assert run.state.finished and run.state.step == run.state.last_step == 60 and not run.problems
    text = words(run_page(run))
    assert "4 starts" in text and "2 ended by a failure" in text
    assert f"sample 000000-{BAD:06d} was changed after it was written" in text
    assert "intact, checksums match" in text
    assert "pervit evaluate --checkpoint" in text  # no predictions yet


@pytest.mark.parametrize("dark", [False, True])
def test_a_browser_opens_the_page(dark: bool, storied_run: Path, damaged_shards: Path, tmp_path: Path) -> None:
    """Guards against a page that is blank, fetches something, or whose scripts fail: every figure is drawn."""
    predictions = write_predictions(tmp_path / "predictions.csv", damaged_shards)
    page = made(storied_run, tmp_path, predictions=predictions)
    document, console = open_page(page, *["--force-dark-mode"] * dark)
    assert console == []
    source = page.read_text()
    assert source.count('<div class="plot"') == len(re.findall(r'<div class="plot js-plotly-plot', document)) >= 9
    assert len(re.findall(r'<img alt="\d{6}-\d{6}" src="data:image/jpeg', document)) == 24
    assert not re.search(r'(src|href)="(?!data:|#)', source.split("<script")[0])


def test_names_from_files_are_text(copied_run: Path, tmp_path: Path, digits_images: Path) -> None:
    """Guards against a class or a key that runs as a script in the browser of whom the page is sent to."""
    evil = "<script>document.title='owned'</script><img src=x onerror=\"document.title='owned'\">"
    folder = tmp_path / "images" / "val"
    shutil.copytree(digits_images / "val", folder)
    rows = ["file,label,top1,top5,probabilities,label_probability,loss"]
    rows += [f'"{evil.replace(chr(34), chr(34) * 2)}",{i % 2},1,1 0,0.9 0.1,0.5,1.0' for i in range(4)]
    predictions = tmp_path / "predictions.csv"
    predictions.write_text("\n".join(rows))
    environment = json.loads((copied_run / "environment.json").read_text())
    environment[-1]["hosts"] = [evil]
    environment[-1]["python"] = evil
    (copied_run / "environment.json").write_text(json.dumps(environment))
    run = read_run(copied_run)
    for checkpoint in run.checkpoints:
        checkpoint.manifest.state.classes[:] = [evil] * 10
    page = tmp_path / "report.html"
    page.write_text(run_page(run, predictions=predictions))
    assert evil not in page.read_text()
    document, console = open_page(page)
    assert console == []
    title = re.search(r"<title>(.*?)</title>", document)
    assert title and title[1] == "run"
    assert not re.search(r"<img[^>]*onerror", document) and "&lt;img src=x onerror" in document


def test_a_run_in_progress(copied_run: Path) -> None:
    """Guards against a page that calls a run finished or killed while it trains. Another process holds the lock."""
    lines = [line for line in (copied_run / "events.jsonl").read_text().splitlines() if '"end"' not in line]
    (copied_run / "events.jsonl").write_text("\n".join(lines) + "\n")
    holder = subprocess.Popen([sys.executable, "-c", HOLD, str(copied_run / ".lock")], stdout=subprocess.PIPE, text=True)
    try:
        assert holder.stdout and holder.stdout.readline() == "True\n"
        run = read_run(copied_run)
        assert run.state.name == "running"
        assert starts_of(run)[-1].end == "is running"
        assert "running at step 60" in words(run_page(run))
    finally:
        holder.kill()
        holder.wait()
    assert not read_run(copied_run).state.alive


def test_without_tensorboard_and_with_it(copied_run: Path) -> None:
    """Guards against a page that needs the event files."""
    with_images = run_page(read_run(copied_run))
    shutil.rmtree(copied_run / "tensorboard")
    without = run_page(read_run(copied_run))
    assert "The first batch of a start" in words(with_images) and "The first batch of a start" not in words(without)


def test_a_damaged_folder_shows_what_is_left(copied_run: Path, tmp_path: Path) -> None:
    """Guards against a traceback, or silence, over a folder that was copied in part."""
    (copied_run / "config.yaml").write_text("train: [")
    (copied_run / "environment.json").write_text('[{"started"')
    (copied_run / "events.jsonl").unlink()
    metrics = copied_run / "metrics.jsonl"
    whole = metrics.read_bytes()
    metrics.write_bytes(whole[: len(whole) // 2].replace(b'"step": 7,', b'"step": '))
    newest = sorted((copied_run / "checkpoints").glob("step-*"))[-1]
    part = next(newest.glob("part-*"))
    part.write_bytes(part.read_bytes()[:-10])
    for events in (copied_run / "tensorboard").iterdir():
        events.write_bytes(events.read_bytes()[:1000] + b"junk")
    run = read_run(copied_run)
    said = " ".join(run.problems)
    assert "config.yaml is damaged" in said and "environment.json is damaged" in said
    assert "1 line of metrics.jsonl cannot be read" in said and "has no end" in said
    page = made(copied_run, tmp_path)
    text = words(page.read_text())
    assert f"{part.name} has" in text and "Curves" in text
    _, console = open_page(page)
    assert console == []


def test_what_is_no_run_is_one_sentence(tmp_path: Path) -> None:
    """Guards against a page about nothing, and against a traceback."""
    for place, found in ((tmp_path / "none", "does not exist"), (tmp_path, "is not a run folder")):
        result = run_forked("pipeline.report", place, "--output", tmp_path / "report.html", check=False)
        assert result.returncode == 2 and len(result.stderr.splitlines()) == 1
        assert found in result.stderr and str(place) in result.stderr
    assert not (tmp_path / "report.html").exists()
    (tmp_path / "metrics.jsonl").write_text("")
    with pytest.raises(UserError, match="--predictions .* does not exist"):
        run_page(read_run(tmp_path), predictions=tmp_path / "no.csv")
    bad = tmp_path / "bad.csv"
    bad.write_text("key,label\na,1\n")
    with pytest.raises(UserError, match="must have the columns .* got no 'file'"):
        run_page(read_run(tmp_path), predictions=bad)


def test_figures_of_an_analysis_and_measures_over_training(tmp_path: Path) -> None:
    """Guards against measures and figures that were made and are not shown; a layer without a gate has no line."""
    run, analysis = tmp_path / "run", tmp_path / "run" / "analysis"
    analysis.mkdir(parents=True)
    rows = []
    for step in (1, 2, 3):
        measures = {"mean_attention_distance": [[3.0 + step, 5.0], [7.0, 7.0]], "gate": [[0.9, 0.7], []]}
        rows.append(
            {
                "step": step,
                "time": 1e9,
                "epoch": step / 2,
                "samples": 8,
                "analysis": {**measures, "nonlocality": {"phi_p": [[0.5]]}},
            }
        )
    (run / "metrics.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (analysis / "figures").mkdir()
    listed = [
        {"name": name, "title": f"Title of {name}", "caption": f"What {name} shows.", "source": "PerViT, Fig. 4",
         "files": [f"figures/{name}.png", f"figures/{name}.svg"]}
        for name in ("maps_1", "regions", "gates")
    ]  # fmt: skip
    (analysis / "analysis.json").write_text(json.dumps({"images": {"count": 1024}, "figures": [*listed, None, {"files": 3}]}))
    for name in ("gates", "maps_1", "regions"):
        Image.new("RGB", (40, 30), "red").save(analysis / "figures" / f"{name}.png")
    Image.new("RGB", (40, 30), "red").save(analysis / "phi_p_maps.png")
    (analysis / "torn.png").write_bytes(b"\x89PNG")
    page = run_page(read_run(run))
    text = words(page)
    assert "over 1,024 images" in text and "phi p maps" in text
    assert "torn.png cannot be decoded" in text
    assert "What gates shows. (PerViT, Fig. 4)" in text
    titles = [text.index(title) for title in ("Title of regions", "Title of gates", "phi p maps", "Title of maps_1")]
    assert titles == sorted(titles), "the order of the analysis, single images last"
    shown = [json.loads(data) for data in re.findall(r'<script type="application/json">(.*?)</script>', page)]
    lines = {each["layout"]["title"]["text"]: {trace["name"]: trace["y"] for trace in each["data"]} for each in shown}
    assert lines["Mean attention distance (patches)"] == {"layer 1": [4.5, 5, 5.5], "layer 2": [7, 7, 7]}
    assert lines["Gate (share of positional attention)"] == {"layer 1": [0.8, 0.8, 0.8]}
    assert lines["Nonlocality of Φp (coordinates of [-1, 1])"] == {"layer 1": [0.5, 0.5, 0.5]}
