"""Data as people have it: subfolders, folders without images, files of other kinds, damaged files, images without a class."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from data_prep import FEW_REJECTED
from data_prep.sources import Reading, open_sources
from data_prep.sources.labels import NoClass, class_of
from pipeline.errors import UserError
from pipeline.shards.manifest import ShardManifest
from support.launching import run_script
from support.official_files import jpeg
from support.sharding import SHARDER, lines

pa = pytest.importorskip("pyarrow")


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three classes with images and two without; one more damaged file than any set may have."""
    folder = tmp_path_factory.mktemp("messy") / "photos"
    places = ("cat/1.jpg", "cat/2023/1.jpg", "cat/2023/may/2.jpg", "dog/1.jpg", "dog/2.jpg", "owl/1.jpg", "owl/2.jpg")
    files = {place: jpeg(number) for number, place in enumerate(places)}
    files |= {f"dog/damaged{number}.jpg": b"no image" for number in range(FEW_REJECTED + 1)}
    files |= {f"cat/2023/{number}.gif": b"GIF89a" for number in range(3)}
    files |= {"bat/1.heic": b"x", "bat/raw/2.CR2": b"x", "notes.txt": b"x"}
    for place, content in files.items():
        (folder / place).parent.mkdir(parents=True, exist_ok=True)
        (folder / place).write_bytes(content)
    (folder / "elk").mkdir()
    return folder


def test_a_folder_as_people_have_it(photos: Path, tmp_path: Path) -> None:
    """Guards against images dropped in silence, classes without images, sentences that the manifest contradicts, and damaged
    files that are named one a run."""
    output = tmp_path / "shards"
    arguments = ("--source", photos, "--output", output, "--workers", 1, "--samples-per-shard", 4)
    refused = run_script(SHARDER, *arguments, check=False)
    assert refused.returncode == 2 and refused.stderr.count("\n") == 1, refused.stderr
    assert f"photos: {7 + FEW_REJECTED + 1} images of 3 classes for the train split" in refused.stdout
    assert "ignored 6 other files (3 .gif, 1 .txt, 1 .heic, 1 .cr2): an image is" in refused.stdout
    assert "left out 2 class folders without an image (bat, elk): --keep-empty-classes makes each a class" in refused.stdout
    assert f"6 of the 13 train images of {photos} cannot be stored, at most 5 allowed" in refused.stderr
    assert "leave them out with --max-rejected 0.462." in refused.stderr
    damaged = {f"dog/damaged{number}.jpg" for number in range(FEW_REJECTED + 1)}
    assert {line["file"] for line in lines(output / "rejected.jsonl")} == damaged  # of four shards

    said = run_script(SHARDER, *arguments, "--max-rejected", 0.462).stdout
    assert "train has 7 images of 3 classes in 4 shards" in said and "6 rejected, listed in rejected.jsonl" in said
    manifest = ShardManifest.read(output)
    assert manifest.classes == ["cat", "dog", "owl"] and manifest.splits["train"].samples_per_class == [3, 2, 2]


def test_few_damaged_files_and_kept_classes(photos: Path, tmp_path: Path) -> None:
    """Guards against a set of a dozen images that one damaged file ends, and an option that one form of source does not know."""
    tree = Path(shutil.copytree(photos, tmp_path / "set" / "photos"))
    (tree / "dog" / "damaged0.jpg").unlink()
    for number in (1, 2):
        (tree / "dog" / f"{number}.jpg").unlink()  # what is left of this class is damaged
    packed = shutil.make_archive(str(tmp_path / "photos"), "zip", tmp_path / "set")
    for keep, classes in ((False, ["cat", "dog", "owl"]), (True, ["bat", "cat", "dog", "elk", "owl"])):
        both = [open_sources(place, reading=Reading(keep_empty=keep))["train"] for place in (tree, packed)]
        for source in both:
            assert source.class_names == classes and list(source.empty) == ["bat", "elk"]
            assert source.ignored == {".gif": 3, ".heic": 1, ".cr2": 1, ".txt": 1}
        assert both[0].fingerprint() == both[1].fingerprint()
    arguments = ("--source", tree, "--output", tmp_path / "shards", "--workers", 1, "--keep-empty-classes")
    said = run_script(SHARDER, *arguments).stdout
    assert "10 images of 5 classes, of which 2 have no image (bat, elk), for the train split" in said and "left out" not in said
    assert "train has 5 images of 5 classes, of which 3 have no image (bat, dog, elk), in 1 shard" in said
    assert ShardManifest.read(tmp_path / "shards").classes == ["bat", "cat", "dog", "elk", "owl"]


def test_images_without_folders_of_classes(photos: Path, tmp_path: Path) -> None:
    """Guards against a list of all formats as the answer to a folder of images, as a source and as a training's data."""
    flat = tmp_path / "flat"
    (flat / "train").mkdir(parents=True)
    for number in (1, 2):
        shutil.copy(photos / "cat" / "1.jpg", flat / "train" / f"{number}.jpg")
    packed = shutil.make_archive(str(tmp_path / "flat"), "zip", flat / "train")
    for place, named in ((flat, flat / "train"), (flat / "train", flat / "train"), (packed, packed)):
        with pytest.raises(
            UserError, match=r"must have a folder for each class, got 2 images outside of any: move them"
        ) as caught:
            open_sources(place)
        assert str(caught.value).startswith((f"{named} must", f"source folder {named} must"))
    not_shards = "is a folder of images, not a shard set: it has no manifest.json: "
    for folder, remedy in ((flat / "train", "move its images into a folder for each class, then write"), (photos, "write")):
        with pytest.raises(UserError, match=f"{not_shards}{remedy} shards of it with pervit shard --source {folder} --output"):
            ShardManifest.read(folder)


NO_LABELS = [-1, "nan", "", 10**9, "2.5", "inf"]


@pytest.mark.parametrize("form", ["csv", "parquet", "tar"])
def test_images_without_a_class(form: str, photos: Path, tmp_path: Path) -> None:
    """Guards against a class "-1", "nan" or "1000000000" that a model learns, and against half a set left out without a word."""
    image = photos / "cat" / "1.jpg"
    labels = ["10", "9.0", 9, *NO_LABELS]
    source, reading = write(form, tmp_path / form, image, labels), Reading(tmp_path / "stage")
    with pytest.raises(
        UserError,
        match=r"must have a name or a whole number from 0 to 999,999,999 as .*, got 6 images without a class \(.*: -1, .*: nan, .*: nothing, ...\)",
    ):
        open_sources(source, reading=reading)
    reading = Reading(tmp_path / "stage", skip_unlabelled=True)
    (found,) = open_sources(source, reading=reading).values()
    assert found.class_names == ["9", "10"] and sorted(found.labels.tolist()) == [0, 0, 1]
    assert found.unlabelled.startswith("6 images without a class (")
    if form == "csv":
        arguments = ("--source", source, "--output", tmp_path / "shards", "--workers", 1, "--unlabelled", "skip")
        said = run_script(SHARDER, *arguments, "--val-share", 0.5).stdout  # of both splits, and once
        assert (
            said.count("left out") == 1
            and "left out 6 images without a class (line 5: -1, line 6: nan, line 7: nothing, ...)" in said
        )


def write(form: str, place: Path, image: Path, labels: list[object]) -> Path:
    import io
    import tarfile

    import pyarrow.parquet as pq

    place.mkdir()
    if form == "csv":
        for number in range(len(labels)):
            shutil.copy(image, place / f"{number}.jpg")
        (place / "set.csv").write_text("path,label\n" + "".join(f"{n}.jpg,{label}\n" for n, label in enumerate(labels)))
        return place / "set.csv"
    if form == "parquet":
        rows = {"image": [image.read_bytes()] * len(labels), "label": [str(label) or None for label in labels]}
        pq.write_table(pa.table(rows), place / "train.parquet")
        return place
    with tarfile.open(place / "train.tar", "w") as tar:
        for number, label in enumerate(labels):
            for suffix, data in {"jpg": image.read_bytes(), "cls": str(label).encode()}.items():
                member = tarfile.TarInfo(f"{number:03d}.{suffix}")
                member.size = len(data)
                tar.addfile(member, io.BytesIO(data))
    return place


def test_what_names_a_class() -> None:
    """Guards against names that are taken for numbers, and against numbers that become other classes as text."""
    for label, name in (
        (0, "0"),
        ("007", "007"),
        (3.0, "3"),
        ("3.0", "3"),
        ("1e2", "100"),
        (" cat ", "cat"),
        ("n01440764", "n01440764"),
        ("None", "None"),
    ):
        assert class_of(label) == name and not isinstance(class_of(label), NoClass)
    for label in (None, "", " ", -1, "-0.5", float("nan"), "NaN", "<NA>", 1.5, 10**9, "9" * 5000, "1e300", [1, 2], {"a": 1}):
        assert isinstance(class_of(label), NoClass), label
