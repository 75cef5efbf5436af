"""Data sets that others made: tables of paths, parquet files, WebDataset tars. Each gives the shards that the same images as a folder do."""

from __future__ import annotations

import io
import json
import os
import shutil
import tarfile
import threading
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from data_prep.sources import Reading, Source, open_sources
from pipeline.checkpoint.weights import read_weights
from pipeline.errors import UserError
from pipeline.shards.shard_set import ShardSet
from support.launching import run_script
from support.ranks import run_forked
from support.runs import step_rows, write_small_config
from support.small_run import SMALL_MODEL

pa = pytest.importorskip("pyarrow")
PER_CLASS = 12


@pytest.fixture(scope="module")
def tree(digits_images: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A few digits as a folder, classes named by two digits and one of them "10": numeric order is not that of strings."""
    root = tmp_path_factory.mktemp("foreign") / "images"
    for split in ("train", "val"):
        for number, folder in enumerate(sorted((digits_images / split).iterdir())):
            for file in sorted(folder.iterdir())[:PER_CLASS]:
                target = root / split / str(number + 1) / file.name
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(file, target)
    return root


def images_of(tree: Path, split: str) -> list[Path]:
    return sorted((tree / split).rglob("*.JPEG"))


def write_listing(tree: Path, file: Path, rows: list[dict] | None = None) -> Path:
    rows = rows or [
        {"path": str(os.path.relpath(path, file.parent)), "label": path.parent.name, "split": split}
        for split in ("train", "val")
        for path in images_of(tree, split)
    ]
    if file.suffix == ".jsonl":
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    else:
        separator = "\t" if file.suffix == ".tsv" else ","
        lines = [separator.join(rows[0]), *(separator.join(map(str, row.values())) for row in rows)]
        file.write_text("\n".join(lines) + "\n")
    return file


def write_parquet(tree: Path, folder: Path) -> Path:
    import pyarrow.parquet as pq

    names = sorted({path.parent.name for path in images_of(tree, "train")}, key=int)
    features = {"image": {"_type": "Image"}, "label": {"_type": "ClassLabel", "names": names}}
    for split, its in (("train", "train"), ("val", "validation")):
        files = images_of(tree, split)
        for part, some in enumerate((files[::2], files[1::2])):
            rows = {
                "image": [{"bytes": file.read_bytes(), "path": file.name} for file in some],
                "label": [names.index(file.parent.name) for file in some],
            }
            table = pa.table(rows).replace_schema_metadata({"huggingface": json.dumps({"info": {"features": features}})})
            target = folder / "data" / f"{its}-{part:05d}-of-00002.parquet"
            target.parent.mkdir(parents=True, exist_ok=True)
            pq.write_table(table, target)
    return folder


def write_tars(tree: Path, folder: Path) -> Path:
    folder.mkdir()
    for split in ("train", "val"):
        for part in range(2):
            with tarfile.open(folder / f"set-{split}-{part:03d}.tar", "w") as tar:
                for number, file in enumerate(images_of(tree, split)[part::2]):
                    label = (
                        {"cls": file.parent.name.encode()}
                        if part
                        else {"json": json.dumps({"label": int(file.parent.name)}).encode()}
                    )
                    for suffix, data in {"jpg": file.read_bytes(), **label}.items():
                        member = tarfile.TarInfo(f"{part}{number:06d}.{suffix}")
                        member.size = len(data)
                        tar.addfile(member, io.BytesIO(data))
    return folder


@pytest.fixture
def served(tmp_path: Path) -> Iterator[tuple[Path, str]]:
    """A folder, and its URL on a real web server."""
    folder = tmp_path / "served"
    folder.mkdir()
    handler = partial(SimpleHTTPRequestHandler, directory=str(folder))
    handler.log_message = lambda *_: None  # type: ignore[attr-defined]
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield folder, f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def contents(source: Source) -> set[tuple[str, bytes]]:
    return {(image.class_name, image.data) for image in map(source.read, range(len(source)))}


def expected(tree: Path, split: str) -> set[tuple[str, bytes]]:
    return {(path.parent.name, path.read_bytes()) for path in images_of(tree, split)}


def check(sources: dict[str, Source], tree: Path) -> None:
    for split in ("train", "val"):
        assert sources[split].class_names == [str(n) for n in range(1, 11)]
        assert contents(sources[split]) == expected(tree, split)


@pytest.mark.parametrize("suffix", [".csv", ".tsv", ".jsonl"])
def test_a_table_of_paths_and_labels(suffix: str, tree: Path, tmp_path: Path) -> None:
    """Guards against paths that are not relative to the table, and classes in the order of strings."""
    check(open_sources(write_listing(tree, tmp_path / f"images{suffix}")), tree)


def test_parquet_files(tree: Path, tmp_path: Path) -> None:
    """Guards against labels that lose their names, and a part that is read twice or not at all."""
    check(open_sources(write_parquet(tree, tmp_path / "hf"), reading=Reading(tmp_path / "stage")), tree)


def test_tars_of_others(tree: Path, tmp_path: Path) -> None:
    """Guards against a reader that knows only one form of label, or takes other people's tars for ImageNet's."""
    folder = write_tars(tree, tmp_path / "tars")
    check(open_sources(folder, reading=Reading(tmp_path / "stage")), tree)
    pattern = str(folder / "set-{train,val}-{000..001}.tar")
    check(open_sources(pattern, reading=Reading(tmp_path / "stage2")), tree)


def test_tars_behind_urls_become_shards(tree: Path, served: tuple[Path, str], tmp_path: Path) -> None:
    """Guards against copies that stay, a second start that fetches again, and shards that differ from a folder's."""
    if shutil.which("curl") is None:
        pytest.skip("webdataset fetches http by curl, which is missing")
    folder, url = served
    write_tars(tree, folder / "tars")
    where = f"{url}/tars/set-{{train,val}}-{{000..001}}.tar"
    command = ("data_prep/shard_imagenet.py", "--source", where, "--output", tmp_path / "shards", "--workers", 2)
    assert "copying" in run_script(*command).stdout
    assert not list((tmp_path / "shards").rglob("*.bin"))
    shutil.rmtree(folder / "tars")
    again = run_script(*command).stdout
    assert "copying" not in again and "is already there" in again
    shards = ShardSet(tmp_path / "shards", "val")
    assert len(shards) == len(images_of(tree, "val"))
    stored = {
        (shards.classes[int(shards.samples[i]["label"])], np.asarray(shards.read(i)).tobytes()) for i in range(len(shards))
    }
    assert stored == expected(tree, "val")


def test_tars_of_others_are_trained_on(tree: Path, served: tuple[Path, str], tmp_path: Path) -> None:
    """Guards against shards of somebody else's data set, with images of every format, that the loader or a model refuses."""
    folder, url = served
    formats = ("jpg", "png", "webp")
    for split in ("train", "val"):
        with tarfile.open(folder / f"{split}.tar", "w") as tar:
            for number, file in enumerate(images_of(tree, split)):
                suffix, packed = formats[number % 3], io.BytesIO()
                if suffix == "jpg":
                    packed.write(file.read_bytes())
                else:
                    Image.open(file).save(packed, suffix, **({"lossless": True} if suffix == "webp" else {}))
                for member, data in {suffix: packed.getvalue(), "cls": file.parent.name.encode()}.items():
                    info = tarfile.TarInfo(f"deep/{number:05d}.{member}")
                    info.size = len(data)
                    tar.addfile(info, io.BytesIO(data))
    where = f"{url}/{{train,val}}.tar" if shutil.which("curl") else folder
    said = run_script("data_prep/shard_imagenet.py", "--source", where, "--output", tmp_path / "shards", "--workers", 1).stdout
    assert "0 re-encoded, 0 rejected" in said and "train keeps 80 non-JPEG images unchanged: 40 png, 40 webp" in said
    shards = ShardSet(tmp_path / "shards", "train")
    stored = [Image.open(io.BytesIO(shards.read(i).tobytes())) for i in range(len(shards))]
    pixels = [
        [image.convert("RGB").tobytes() for image in them] for them in (stored, map(Image.open, images_of(tree, "train")))
    ]
    assert sorted(pixels[0]) == sorted(pixels[1])
    config = write_small_config(tmp_path / "shards", tmp_path)
    run_forked("pipeline.train", "--config", config, *SMALL_MODEL, "train.max_steps=2", "eval.every_epochs=1")
    rows = step_rows(tmp_path / "run")
    assert len(rows) == 2 and all(np.isfinite(row["loss"]) for row in rows)
    state = read_weights(tmp_path / "run").state
    assert state.step == 2 and state.classes == [str(n) for n in range(1, 11)]
    assert state.data["formats"] == {"png": 40, "webp": 40}


def test_a_copy_goes_on_after_a_part_that_cannot_be_read(tree: Path, tmp_path: Path) -> None:
    """Guards against a copy that begins again, and a cut-off tar taken for a short one."""
    folder, said = write_tars(tree, tmp_path / "tars"), []
    whole = (folder / "set-train-001.tar").read_bytes()
    (folder / "set-train-001.tar").write_bytes(whole[: len(whole) // 2])
    reading = Reading(tmp_path / "stage")
    with pytest.raises(UserError, match="set-train-001.tar is cut off.*parts that are copied are kept"):
        open_sources(folder, "train", reading=reading)
    first = (tmp_path / "stage/train/00000.bin").stat().st_mtime_ns
    (folder / "set-train-001.tar").write_bytes(whole)
    assert contents(open_sources(folder, "train", reading=reading)["train"]) == expected(tree, "train")
    assert (tmp_path / "stage/train/00000.bin").stat().st_mtime_ns == first, said


def bad(tree: Path, folder: Path, what: str) -> Path:
    image = str(images_of(tree, "train")[0])
    table = folder / ("t.jsonl" if what.startswith("json") else "t.csv")
    row = {"path": image, "label": "1"}
    texts = {
        "no label": "path\n" + image + "\n",
        "missing image": "path,label\nnowhere.jpg,1\n",
        "twice": f"path,label\n{image},1\n{image},2\n",
        "empty": "path,label\n",
        "other split": f"path,label,split\n{image},1,final\n",
        "some splits": f"path,label,split\n{image},1,train\n{image}x,1,\n",
        "not utf-8": b"path,label\n\xff\xfe,1\n",
        "json damaged": json.dumps(row)[:-4],
        "json list": "[1, 2]\n",
    }
    text = texts[what]
    table.write_bytes(text if isinstance(text, bytes) else text.encode())
    return table


@pytest.mark.parametrize(
    ("what", "sentence"),
    [
        ("no label", r"line 2 must have a label, got path: add the column label"),
        ("missing image", r"1 images that do not exist \(nowhere.jpg\)"),
        ("twice", "is listed twice"),
        ("empty", "must have at least 1 line with an image, got 0"),
        ("other split", "line 2: split is 'final'"),
        ("some splits", "has 1 lines without a split and 1 with one"),
        ("not utf-8", "is not CSV in UTF-8"),
        ("json damaged", "is not JSONL in UTF-8"),
        ("json list", "is not JSONL in UTF-8"),
    ],
)
def test_bad_tables(what: str, sentence: str, tree: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=sentence):
        open_sources(bad(tree, tmp_path, what))


def test_bad_parquet_and_tars(tree: Path, tmp_path: Path) -> None:
    """Each is one sentence that names the file."""
    import pyarrow.parquet as pq

    reading = Reading(tmp_path / "stage")
    (tmp_path / "a").mkdir()
    (tmp_path / "a/train.parquet").write_bytes(b"PAR1 no")
    with pytest.raises(UserError, match="a/train.parquet is not a complete parquet file"):
        open_sources(tmp_path / "a", reading=reading)
    pq.write_table(pa.table({"text": ["x"], "number": [1]}), tmp_path / "a/train.parquet")
    with pytest.raises(UserError, match="columns text, number, of which it is not clear which to take: pass --image-column"):
        open_sources(tmp_path / "a", reading=reading)
    with pytest.raises(UserError, match="--label-column is wrong, but .* has the columns text, number"):
        open_sources(tmp_path / "a", reading=Reading(tmp_path / "stage", frozenset(), "text", "wrong"))
    pq.write_table(pa.table({"image": ["a path"], "label": [1]}), tmp_path / "a/train.parquet")
    with pytest.raises(UserError, match="row 0 has no encoded image in image"):
        open_sources(tmp_path / "a", reading=reading)
    folder = write_tars(tree, tmp_path / "tars")
    with pytest.raises(UserError, match="1 of 3 tars do not exist"):
        open_sources(str(folder / "set-train-{000..002}.tar"), reading=reading)
    with pytest.raises(UserError, match="which --tasks cannot share"):
        open_sources(folder)
    with tarfile.open(folder / "set-train-000.tar", "w") as tar:
        member = tarfile.TarInfo("x.txt")
        tar.addfile(member, io.BytesIO())
    with pytest.raises(UserError, match="x must have one of jpg, jpeg, png, webp, got txt"):
        open_sources(folder, "train", reading=reading)
