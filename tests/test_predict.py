"""``pipeline.predict``: the same pixels and classes as an evaluation, a row for every image that was named."""

from __future__ import annotations

import csv
import io
import json
import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import numpy as np
import pytest

from support.launching import PATIENCE, REPOSITORY, clean_environment
from support.ranks import run_forked
from support.small_model import write_model

CLASSES = [*"0123456789"]
PER_CLASS = 5


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model") / "model.safetensors", CLASSES)


@pytest.fixture(scope="module")
def val(digits_images: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A few images of each class."""
    folder = tmp_path_factory.mktemp("images") / "val"
    for file in sorted((digits_images / "val").rglob("*.JPEG")):
        target = folder / file.parent.name
        target.mkdir(parents=True, exist_ok=True)
        if len(list(target.iterdir())) < PER_CLASS:
            shutil.copy(file, target)
    return folder


def predict(*arguments: object, code: int = 0, stdin: str = "") -> subprocess.CompletedProcess:
    done = run_forked("pipeline.predict", *arguments, check=False, stdin=stdin)
    assert done.returncode == code, done.stderr
    return done


def read(path: Path) -> list[dict]:
    if path.suffix == ".jsonl":
        return [json.loads(line) for line in path.read_text().splitlines()]
    if path.suffix == ".csv":
        return list(csv.DictReader(io.StringIO(path.read_text())))
    parquet = pytest.importorskip("pyarrow.parquet")
    return parquet.read_table(path).to_pylist()


def test_equal_to_evaluate_on_any_number_of_processes(model: Path, val: Path, tmp_path: Path) -> None:
    """Guards against other pixels than an evaluation's, rows in the order of batches or ranks, and images lost or counted twice."""
    result = tmp_path / "result.json"
    run_forked("pipeline.evaluate", "--checkpoint", model, "--data", val, "--json", result)
    evaluated = json.loads(result.read_text())
    tables = []
    for name, batch, processes in (("a.csv", 64, 1), ("b.csv", 7, 2)):
        output = tmp_path / name
        run_forked(
            "pipeline.predict", model, val, "--by-folder", "--batch-size", batch, "--output", output, processes=processes
        )
        tables.append(read(output))
        assert [path.name for path in tmp_path.glob(".*")] == []
    assert tables[0] == tables[1]
    assert [row["file"] for row in tables[0]] == [str(path) for path in sorted(val.rglob("*.JPEG"))]
    assert sum(Path(row["file"]).parent.name == row["top1_name"] for row in tables[0]) == evaluated["correct1"]
    assert sum(Path(row["file"]).parent.name in row["top5"].split() for row in tables[0]) == evaluated["correct5"]


def test_every_way_to_name_images(model: Path, val: Path, digits_shards: Path, tmp_path: Path) -> None:
    """Guards against members that are skipped, other bytes than the member's, and names that cannot be told apart."""
    files = sorted(val.rglob("*.JPEG"))
    with zipfile.ZipFile(tmp_path / "some.zip", "w") as archive, tarfile.open(tmp_path / "some.tar", "w") as tar:
        for file in files[:10]:
            archive.write(file, f"deep/{file.parent.name}/{file.name}")
            tar.add(file, f"{file.parent.name}/{file.name}")
    listed = "\n".join(map(str, files[:10])) + "\n"
    (tmp_path / "plain name").write_bytes(files[0].read_bytes())
    output = tmp_path / "all.jsonl"
    pattern = f"{val}/0/*.JPEG"
    arguments = (tmp_path / "some.zip", tmp_path / "some.tar", "-", pattern, tmp_path / "plain name")
    done = predict(model, *arguments, "--output", output, stdin=listed)
    rows = read(output)
    first, second, third = rows[:10], rows[10:20], rows[20:30]
    for found in (second, third):
        assert [(row["top1"], row["top5"]) for row in found] == [(row["top1"], row["top5"]) for row in first]
    assert [row["file"] for row in third] == listed.split()
    assert [row["file"] for row in rows[30:]] == [*map(str, files[:PER_CLASS]), str(tmp_path / "plain name")]
    assert rows[-1]["top5"] == first[0]["top5"] and f"{31 + PER_CLASS} images in {output}, 0 with an error" in done.stderr


def test_what_cannot_be_used_is_a_row_with_its_reason(model: Path, val: Path, tmp_path: Path) -> None:
    """Guards against one damaged photo that ends a pass over millions, or that gets its neighbour's prediction."""
    good = sorted(val.rglob("*.JPEG"))[0]
    (tmp_path / "junk.jpg").write_text("no image")
    (tmp_path / "empty.jpg").touch()
    (tmp_path / "cut.jpg").write_bytes(good.read_bytes()[:200])
    with zipfile.ZipFile(tmp_path / "damaged.zip", "w") as archive:
        archive.write(good, "whole.jpg")
    packed = bytearray((tmp_path / "damaged.zip").read_bytes())
    packed[100:140] = bytes(40)
    (tmp_path / "damaged.zip").write_bytes(packed)
    names = [tmp_path / name for name in ("junk.jpg", "empty.jpg", "cut.jpg", "damaged.zip", "nowhere.jpg")]
    output = tmp_path / "rows.parquet"
    predict(model, names[0], good, *names[1:], "--output", output, "--batch-size", 2, code=1)
    rows = read(output)
    assert [row["error"] for row in rows][1] == "" and rows[1]["top1_name"] in CLASSES
    reasons = [row["error"] for number, row in enumerate(rows) if number != 1]
    expected = ("not an image", "an empty file", "cannot be used", "Bad CRC", "No such file")
    assert all(words in reason for words, reason in zip(expected, reasons)), reasons
    assert all(row["top1"] is None and row["top5"] is None for number, row in enumerate(rows) if number != 1)
    alone = predict(model, names[0], code=1)
    assert "error: cannot be used" in alone.stdout and "1 with an error" in alone.stderr


def test_a_list_may_hold_names_in_any_encoding(model: Path, val: Path, tmp_path: Path) -> None:
    """Guards against a traceback over a Latin-1 name, in the list or on the terminal, and names split at other than line ends."""
    photo = sorted(val.rglob("*.JPEG"))[0].read_bytes()
    names = [os.fsencode(tmp_path) + name for name in (b"/caf\xe9 one.jpg", "/b\u2028c d.jpg".encode())]
    for name in names:
        Path(os.fsdecode(name)).write_bytes(photo)
    command = [sys.executable, "-m", "pipeline.predict", str(model), "-"]
    environment = clean_environment(PYTHONIOENCODING="utf-8:strict")  # as in a UTF-8 locale
    listed = b"\r\n".join(names)
    done = subprocess.run(command, cwd=REPOSITORY, env=environment, input=listed, capture_output=True, timeout=PATIENCE)
    assert done.returncode == 0 and b"2 images, 0 with an error" in done.stderr, done.stderr
    assert rb"/caf\udce9 one.jpg  " in done.stdout
    predict(model, tmp_path, "--features", "--output", tmp_path / "f.npy")
    assert sorted((tmp_path / "f.txt").read_bytes().splitlines()) == sorted(names)
    empty = predict(model, "-", "--output", tmp_path / "rows.csv", code=2)
    assert "standard input must name at least one image, got none" in empty.stderr and not (tmp_path / "rows.csv").exists()


def test_features_are_what_the_classifier_sees(model: Path, val: Path, tmp_path: Path) -> None:
    """Guards against features of another layer, or rows that belong to other images."""
    from pipeline.models.weights.exported import read_exported

    predict(model, val, "--features", "--output", tmp_path / "f.npy")
    predict(model, val, "--output", tmp_path / "rows.jsonl", "--top", 1)
    features = np.load(tmp_path / "f.npy")
    network, _ = read_exported(model)
    weight, bias = (value.detach().numpy() for value in (network.head.weight, network.head.bias))
    assert [row["top1"] for row in read(tmp_path / "rows.jsonl")] == (features @ weight.T + bias).argmax(1).tolist()
    assert (tmp_path / "f.txt").read_text().split() == [str(path) for path in sorted(val.rglob("*.JPEG"))]


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["{tmp}/empty"], "empty must hold at least one image, got none"),
        (["{tmp}/*.nothing"], "nothing must hold at least one image, got none"),
        (["{tmp}/bad.zip"], "bad.zip is not a complete zip"),
        (["{tmp}/bad.tar"], "bad.tar is not a complete tar"),
        (["s3://bucket/x"], "images must be on this machine, got the URL s3://bucket/x"),
        (["x.jpg", "--output", "{tmp}/x.xls"], "must end with .csv, .jsonl or .parquet, got"),
        (["x.jpg", "--features"], "--features requires --output"),
        (["x.jpg", "--features", "--output", "{tmp}/x.csv"], "must end with .npy or .parquet, got"),
        (["x.jpg", "--output", "{tmp}/no/x.csv"], "no"),
        (["x.jpg", "--top", "0"], "--top must be at least 1, got 0"),
        (["x.jpg", "--features", "--by-folder", "--output", "{tmp}/x.npy"], "exclude each other"),
    ],
)
def test_bad_arguments_are_one_sentence(arguments: list[str], sentence: str, model: Path, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "bad.zip").write_text("no zip")
    (tmp_path / "bad.tar").write_text("no tar" * 200)
    done = predict(model, *(word.format(tmp=tmp_path) for word in arguments), code=2)
    assert sentence in done.stderr and len(done.stderr.strip().splitlines()) == 1, done.stderr


def test_a_list_in_a_file_and_a_name_without_weights(model: Path, val: Path, tmp_path: Path) -> None:
    """Guards against a list that is taken for an image, and a traceback where there is nothing to predict with."""
    files = sorted(map(str, val.rglob("*.JPEG")))[:3]
    (tmp_path / "list.txt").write_text("\r\n".join(files) + "\n\n")
    predict(model, f"@{tmp_path}/list.txt", "--output", tmp_path / "rows.csv")
    assert [row["file"] for row in read(tmp_path / "rows.csv")] == files
    assert "/nowhere cannot be read" in predict(model, "@/nowhere", code=2).stderr
    refused = predict("pervit_t", files[0], code=2).stderr
    assert "pervit_t is the name of a model, not of a trained one" in refused
