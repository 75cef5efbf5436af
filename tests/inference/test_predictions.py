"""``pipeline.evaluate --predictions``: a row per image that counts, whatever evaluates it."""

from __future__ import annotations

import csv
import json
import re
import shutil
import sys
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

from pipeline.errors import UserError, install_extra
from pipeline.inference.prediction_table import check_file
from pipeline.shards.shard_set import ShardSet
from support.ranks import run_forked
from support.small_model import write_model

CLASSES = [*"0123456789"]


@pytest.fixture(scope="module")
def damaged(digits_shards: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, int]:
    """The digits with one image of val that cannot be used, and its number."""
    shards = Path(shutil.copytree(digits_shards, tmp_path_factory.mktemp("damaged") / "shards"))
    with open(shards / "val-000000.tar", "r+b") as tar:
        tar.seek(int(ShardSet(shards, "val").samples["offset"][17]) + 600)
        tar.write(bytes(30))
    return shards, 17


def test_the_rows_are_the_images_that_were_counted(damaged: tuple[Path, int], tmp_path: Path) -> None:
    """Guards against rows of padding or of a substitute, of one rank only, in the order of the batches, or of other scores than
    those that the accuracy is made from."""
    shards, bad = damaged
    model = write_model(tmp_path / "model.safetensors", CLASSES)
    results, tables = [], []
    for name, batch, processes in (("a.parquet", 50, 1), ("b.parquet", 7, 2), ("c.csv", 50, 2)):
        folder = tmp_path / name
        folder.mkdir()
        (folder / f".{name}.12ab-00000.tmp").write_text("left by a pass that was killed")
        files = ("--predictions", folder / name, "--json", tmp_path / "result.json")
        run_forked(
            "pipeline.evaluate", "--checkpoint", model, "--data", shards, "--batch-size", batch, *files, processes=processes
        )
        results.append(json.loads((tmp_path / "result.json").read_text()))
        tables.append(read_csv(folder / name) if name.endswith(".csv") else pq.read_table(folder / name).to_pydict())
        assert [path.name for path in folder.iterdir()] == [name]

    images = ShardSet(shards, "val")
    counted = [index for index in range(len(images)) if index != bad]
    for result, table in zip(results, tables):
        assert table["file"] == [images.key(index) for index in counted] and result["count"] == len(counted)
        assert table["label"] == images.samples["label"][counted].tolist()
        assert sum(p == label for p, label in zip(table["top1"], table["label"])) == result["correct1"]
        assert sum(label in top for top, label in zip(table["top5"], table["label"])) == result["correct5"]
        assert np.mean(table["loss"]) == pytest.approx(result["loss"], rel=1e-6)
        assert result["class_count"] == np.bincount(table["label"]).tolist()
        right = [label for p, label in zip(table["top1"], table["label"]) if p == label]
        assert result["class_correct"] == np.bincount(right, minlength=10).tolist()
        assert [top[0] for top in table["top5"]] == table["top1"] and {len(top) for top in table["top5"]} == {5}
        assert table["top1_name"] == [CLASSES[top] for top in table["top1"]] and set(table["error"]) == {""}
        np.testing.assert_allclose(table["probability"], [row[0] for row in table["probabilities"]], atol=1e-6)
        assert all(row == sorted(row, reverse=True) and 0 < sum(row) <= 1.00001 for row in table["probabilities"])
        np.testing.assert_allclose(np.exp(-np.array(table["loss"])), table["label_probability"], rtol=1e-4, atol=1e-7)
        for name in ("file", "label", "top1", "top5", "top1_name", "error"):
            assert table[name] == tables[0][name], name
        for name in ("probabilities", "label_probability"):
            np.testing.assert_allclose(table[name], tables[0][name], rtol=1e-4, atol=1e-7)
    metadata = pq.read_schema(tmp_path / "a.parquet" / "a.parquet").metadata
    assert json.loads(metadata[b"classes"]) == CLASSES


def read_csv(path: Path) -> dict[str, list]:
    with open(path, newline="") as file:
        rows = list(csv.DictReader(file))
    kinds = {"file": str, "label": int, "top1": int, "top1_name": str, "error": str}
    kinds |= dict.fromkeys(("probability", "label_probability", "loss"), float)
    table = {name: [kind(row[name]) for row in rows] for name, kind in kinds.items()}
    for name, kind in (("top5", int), ("probabilities", float)):
        table[name] = [[kind(word) for word in row[name].split(" ")] for row in rows]
    return table


def test_with_fewer_classes_the_lists_are_shorter(tmp_path: Path) -> None:
    """Guards against a model of three classes, and a folder of images, for which there are no five best."""
    from PIL import Image

    rng = np.random.default_rng(0)
    for number, name in enumerate(("one", "three", "two")):
        (tmp_path / "images" / name).mkdir(parents=True)
        for image in range(number + 1):
            pixels = rng.integers(0, 256, (40, 40, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(tmp_path / "images" / name / f"{image}, ü.png")
    model = write_model(tmp_path / "model.safetensors", ["one", "three", "two"])
    run_forked("pipeline.evaluate", "--checkpoint", model, "--data", tmp_path / "images", "--predictions", tmp_path / "p.csv")
    table = read_csv(tmp_path / "p.csv")
    assert table["file"][:2] == ["one/0, ü.png", "three/0, ü.png"] and table["label"] == [0, 1, 1, 2, 2, 2]
    assert all(sorted(top) == [0, 1, 2] for top in table["top5"])
    assert all(sum(row) == pytest.approx(1, abs=1e-6) for row in table["probabilities"])


def test_what_cannot_be_written_is_said_before_the_pass(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against an hour of evaluation whose table has no place to go."""
    with pytest.raises(UserError, match="--predictions must end with .csv, .jsonl or .parquet, got .*x.json"):
        check_file("--predictions", tmp_path / "x.json")
    with pytest.raises(UserError, match="does not exist or cannot be written"):
        check_file("--predictions", tmp_path / "nowhere" / "x.csv")
    (tmp_path / "x.csv").mkdir()
    with pytest.raises(UserError, match="must be a file, got a folder"):
        check_file("--predictions", tmp_path / "x.csv")
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    monkeypatch.delitem(sys.modules, "pyarrow.parquet", raising=False)
    check_file("--predictions", tmp_path / "y.csv")
    with pytest.raises(UserError, match=f"requires PyArrow, .* {re.escape(install_extra('insight'))}, or write a .csv file"):
        check_file("--predictions", tmp_path / "y.parquet")
