"""What people call the classes: from a file or the devkit to manifest, checkpoint, export, predictions and report."""

from __future__ import annotations

import csv
import io
import json
import re
import tarfile
from pathlib import Path

import pytest

from data_prep.class_names import read_class_names
from pipeline.checkpoint.manifest import CheckpointManifest
from pipeline.checkpoint.weights import read_weights
from pipeline.errors import UserError
from pipeline.inference.trained import load
from pipeline.models.weights.exported import read_exported
from pipeline.shards.manifest import MANIFEST, ShardManifest
from pipeline.shards.shard_set import ShardSet
from support.images import encoded, picture
from support.launching import run_script
from support.official_files import write_devkit, write_official_imagenet
from support.ranks import run_forked
from support.runs import export_weights, write_small_config
from support.sharding import SHARDER, digests
from support.small_run import SMALL_MODEL

WNIDS = ["n01440764", "n02012849", "n03126707"]
WORDS = ["tench, Tinca tinca", "crane", "crane"]
SHOWN = ["tench, Tinca tinca", "crane (n02012849)", "crane (n03126707)"]  # ImageNet has both, a bird and a machine
FORMS = {
    "names.txt": "\n".join(WORDS) + "\n\n",
    "synset_words.txt": "".join(f"{key} {name}\n" for key, name in zip(WNIDS, WORDS)) + "n09999999 not in the subset\n",
    "tabs.txt": "".join(f"{key}\t{name}\n" for key, name in reversed([*zip(WNIDS, WORDS)])),
    "imagenet_class_index.json": json.dumps({str(i): [key, name] for i, (key, name) in enumerate(zip(WNIDS, WORDS))}),
    "by_class.json": json.dumps(dict(zip(WNIDS, WORDS))),
    "by_index.json": json.dumps({"2": "crane", "0": WORDS[0], "1": "crane"}),
    "list.json": json.dumps(WORDS),
    "table.csv": "wnid,name\n" + "".join(f'{key},"{name}"\n' for key, name in zip(WNIDS, WORDS)),
    "table.tsv": "index\tname\n" + "".join(f"{i}\t{name}\n" for i, name in enumerate(WORDS)),
}


@pytest.mark.parametrize("name", FORMS)
def test_every_form_gives_the_same_names(name: str, tmp_path: Path) -> None:
    """Guards against a list taken for pairs, names in the order of the file, and two classes that look like one."""
    (tmp_path / name).write_text("\ufeff" + FORMS[name], encoding="utf-8")  # as some editors save it
    assert read_class_names(tmp_path / name, WNIDS) == SHOWN


def test_classes_that_are_numbers_are_no_indices(tmp_path: Path) -> None:
    """Guards against names that are off by one where the classes are called 1, 2 and 3."""
    (tmp_path / "names.json").write_text('{"1": "one", "2": "two", "3": "three"}')
    assert read_class_names(tmp_path / "names.json", ["1", "2", "3"]) == ["one", "two", "three"]
    (tmp_path / "names.json").write_text('{"0": "one", "1": "two", "2": "three"}')
    assert read_class_names(tmp_path / "names.json", ["1", "2", "3"]) == ["one", "two", "three"]


@pytest.mark.parametrize(
    ("name", "text", "sentence"),
    [
        ("a.txt", "tench\ncrane\n", "a.txt must have a name for each of 3 classes, got 2 names"),
        ("a.txt", "a\nb\nc\nd\n", "a.txt must have a name for each of 3 classes, got 4 names"),
        ("a.txt", "n01440764 tench\nn02012849 crane\n", r"no name for 1 class of 3 \(n03126707\): add the names"),
        ("a.txt", "n01440764 tench\nn01440764 carp\n", "names the class n01440764 twice, 'tench' and 'carp': remove one"),
        ("a.txt", "\n".join(WNIDS), "the name of n01440764 must be printable text, got ''"),
        ("a.json", '{"n01440764": "a", "n01440764": "b"}', "names the class n01440764 twice"),
        ("a.json", '{"0": "a", "1": {}}', "is not a JSON file of class names .*'1' has no text"),
        ("a.json", '{"' + "1" * 5000 + '": "a"}', "no name for 3 classes of 3"),  # more digits than Python makes a number of
        ("a.json", '{"0": "a"', "is not a JSON file of class names"),
        ("a.csv", "klass,nom\na,b\n", "must have the columns class and name, got klass, nom"),
        ("a.csv", "class,name\nn01440764,tench\n", "no name for 2 classes of 3"),
        ("a.txt", b"tench\ncaf\xe9\ncrane\n", "a.txt, line 2 is not UTF-8: save the file in this encoding"),
        ("a.txt", "tench\na\x07b\ncrane\n", "must be printable text"),
        ("nowhere.txt", None, "nowhere.txt cannot be read .No such file"),
    ],
)
def test_a_bad_file_is_one_sentence(name: str, text: str | bytes | None, sentence: str, tmp_path: Path) -> None:
    """Guards against names that move by one class because one is missing, and against tracebacks."""
    if text is not None:
        (tmp_path / name).write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(UserError, match=sentence):
        read_class_names(tmp_path / name, WNIDS)


def damaged_devkit(folder: Path, meta: bytes) -> Path:
    """A devkit with these bytes as its meta.mat."""
    whole, path = write_devkit(folder / "whole.tar.gz", WNIDS, [1]), folder / "devkit.tar.gz"
    with tarfile.open(whole) as before, tarfile.open(path, "w:gz") as after:
        for member in before:
            content = before.extractfile(member)
            assert content
            data = meta if member.name.endswith("meta.mat") else content.read()
            member.size = len(data)
            after.addfile(member, io.BytesIO(data))
    return path


def test_names_of_the_devkit(tmp_path: Path) -> None:
    """Guards against names in the order of the devkit's ids, and a damaged meta.mat that ends in SciPy's traceback."""
    write_official_imagenet(tmp_path / "official")
    run_script(SHARDER, "--source", tmp_path / "official", "--output", tmp_path / "shards", "--workers", 1)
    manifest = ShardManifest.read(tmp_path / "shards")
    assert manifest.class_names == [f"words of {wnid}" for wnid in sorted(manifest.classes)]
    kit = next((tmp_path / "official").glob("*devkit*"))
    assert read_class_names(kit, ["n15075141"]) == ["words of n15075141"]
    with pytest.raises(UserError, match="meta.mat must have the struct array 'synsets', got .*: download"):
        read_class_names(damaged_devkit(tmp_path, b"no MATLAB file"), WNIDS)


@pytest.fixture(scope="module")
def named(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with images of two classes, named shards of them, and a run of two steps."""
    root = tmp_path_factory.mktemp("named")
    for number in range(24):
        file = root / "images" / ("train", "val")[number % 2] / f"c{number // 2 % 2}" / f"{number}.png"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(encoded(picture(40, seed=number), "PNG"))
    (root / "names.csv").write_text("class,name\nc0,a crane\nc1,a tench\n")
    arguments = ("--source", root / "images", "--output", root / "shards", "--workers", 1)
    run_script(SHARDER, *arguments)
    before = digests(root / "shards")
    assert ShardSet(root / "shards", "val").class_names == ["c0", "c1"]
    said = run_script(SHARDER, *arguments, "--class-names", root / "names.csv").stdout
    assert "2 classes have names: c0 is 'a crane'" in said and "val is already there" in said
    after = digests(root / "shards")
    assert {name for name in after if after[name] != before.get(name)} == {MANIFEST}, "only the manifest was written"
    run_script(SHARDER, *arguments)
    assert digests(root / "shards") == after, "the names stay"
    config = write_small_config(root / "shards", root)
    overrides = ("model.num_classes=2", "train.max_steps=2", "train.global_batch_size=4", "train.micro_batch_size=4")
    run_forked("pipeline.train", "--config", config, *SMALL_MODEL, *overrides)
    return root


def test_names_reach_what_people_look_at(named: Path, tmp_path: Path) -> None:
    """Guards against names that are lost on the way, and names that take the place of what identifies a class."""
    run, file = named / "run", tmp_path / "exported.safetensors"
    state = read_weights(run).state
    assert (state.classes, state.class_names) == (["c0", "c1"], ["a crane", "a tench"])
    export_weights(run, file)
    description = read_exported(file)[1]
    assert (description.classes, description.class_names, description.shown) == (
        state.classes,
        state.class_names,
        state.class_names,
    )
    assert load(file)[2] == ["a crane", "a tench"]

    run_forked("pipeline.evaluate", "--checkpoint", file, "--data", named / "images", "--json", tmp_path / "result.json")
    correct = json.loads((tmp_path / "result.json").read_text())["correct1"]
    arguments = (named / "images" / "val", "--by-folder", "--output", tmp_path / "rows.csv")
    run_forked("pipeline.predict", file, *arguments)
    rows = list(csv.DictReader(io.StringIO((tmp_path / "rows.csv").read_text())))
    assert {row["top1_name"] for row in rows} <= {"a crane", "a tench"} and len(rows) == 12
    folder = {"c0": "a crane", "c1": "a tench"}
    assert sum(folder[Path(row["file"]).parent.name] == row["top1_name"] for row in rows) == correct

    run_forked("pipeline.evaluate", "--checkpoint", run, "--data", named / "shards", "--predictions", run / "predictions.csv")
    run_forked("pipeline.report", run, "--output", tmp_path / "report.html")
    page = (tmp_path / "report.html").read_text()
    assert "a crane" in page and not re.search(r">c0<", page)


def test_a_checkpoint_with_names_that_are_too_few_is_damaged(named: Path) -> None:
    """Guards against an index out of range in a prediction, and a run whose classes have no names."""
    folder = sorted((named / "run").glob("checkpoints/step-*"))[-1]
    manifest = CheckpointManifest.read(folder)
    object.__setattr__(manifest.state, "class_names", None)
    assert CheckpointManifest.parse(manifest.to_text(), "it").state.class_names is None
    object.__setattr__(manifest.state, "class_names", ["one"])
    with pytest.raises(UserError, match="state.class_names must have 2 names"):
        CheckpointManifest.parse(manifest.to_text(), "it")


def test_a_manifest_with_names_that_are_too_few_is_damaged(named: Path, tmp_path: Path) -> None:
    """Guards against an index out of range in the middle of a report."""
    tree = json.loads((named / "shards" / MANIFEST).read_text())
    tree["class_names"] = ["one"]
    (tmp_path / MANIFEST).write_text(json.dumps(tree))
    with pytest.raises(UserError, match="class_names must have 2 entries, one for each class, got 1"):
        ShardManifest.read(tmp_path)
