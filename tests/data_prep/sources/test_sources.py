"""Trees, zips, CIFAR and iNaturalist give the right images with the right labels, and a subset is what it says."""

from __future__ import annotations

import hashlib
import io
import json
import os
import pickle
import zipfile
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from data_prep.sources import ImageFolder, open_sources, take_subset
from pipeline.errors import UserError
from pipeline.shards.image_folder import ImageFolder as EvaluatedFolder
from support.official_files import (
    DEVKIT,
    class_of_each_file,
    jpeg,
    write_cifar10,
    write_cifar100,
    write_devkit,
    write_inaturalist,
    write_pickles,
)


def write_zip(path: Path, files: dict[str, bytes]) -> Path:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in files.items():
            archive.writestr(name, data)
    return path


def test_a_zip_is_read_like_the_tree_in_it(tmp_path: Path) -> None:
    """Guards against splits, classes or bytes that differ between a zip and the unpacked tree."""
    images = {f"{split}/{name}/{n}.jpg": jpeg(n) for n, name in enumerate(("cat", "dog", "ant")) for split in ("train", "test")}
    del images["test/ant/2.jpg"]  # a class that the val split lacks
    images["train/dog/empty.jpeg"] = b""
    path = write_zip(tmp_path / "x.zip", {**images, "README": b"x", "__MACOSX/train/cat/._0.jpg": b"x", "train/top.jpg": b"x"})
    with zipfile.ZipFile(path) as archive:
        archive.extractall(tmp_path / "tree")
    for split, source in open_sources(path).items():
        tree = open_sources(tmp_path / "tree")[split]
        assert source.class_names == tree.class_names == ["ant", "cat", "dog"]
        assert source.fingerprint() == tree.fingerprint() and source.total_bytes() == tree.total_bytes()
        assert [source.read(i).data for i in range(len(source))] == [tree.read(i).data for i in range(len(tree))]
        assert len(source) == {"train": 4, "val": 2}[split]
    assert open_sources(path, "train")["train"].ignored.total() == 2

    # In both, a folder test without class folders is not a split: it has no labels, or it is a class.
    for name in [name for name in images if name.startswith("test/")]:
        (tmp_path / "tree" / name).unlink()
        (tmp_path / "tree" / name).parent.rmdir()
    for name in ("tree/train/top.jpg", "tree/test/flat.jpg"):
        (tmp_path / name).write_bytes(jpeg(3))
    flat = {name: data for name, data in images.items() if name.startswith("train/")}
    for form in (tmp_path / "tree", write_zip(tmp_path / "flat.zip", {**flat, "test/flat.jpg": jpeg(3)})):
        assert list(open_sources(form)) == ["train"]
        with pytest.raises(UserError, match=r"the split must be one of \['train'\] of .*, got 'val'"):
            open_sources(form, "val")

    # One more folder around it, with a file beside; and a plain tree, which is whichever split is wanted.
    around = write_zip(tmp_path / "around.zip", {"set/README": b"x", **{f"set/{name}": data for name, data in images.items()}})
    assert open_sources(around)["val"].fingerprint() == open_sources(path)["val"].fingerprint()
    plain = write_zip(tmp_path / "plain.zip", {"cat/a.jpg": jpeg(1), "dog/b.png": jpeg(2)})
    assert list(open_sources(plain)) == ["train"] and list(open_sources(plain, "val")) == ["val"]


def test_a_damaged_zip_is_refused(tmp_path: Path) -> None:
    """Guards against zipfile's tracebacks, when it is opened and when an image is read."""
    path = write_zip(tmp_path / "x.zip", {"cat/a.jpg": jpeg(1), "dog/b.jpg": jpeg(2)})
    content = bytearray(path.read_bytes())
    (tmp_path / "cut.zip").write_bytes(content[: len(content) // 2])
    with pytest.raises(UserError, match="cut.zip is not a complete zip file"):
        open_sources(tmp_path / "cut.zip")
    content[100:110] = b"\xff" * 10  # inside the first image
    (tmp_path / "spoilt.zip").write_bytes(content)
    source = open_sources(tmp_path / "spoilt.zip")["train"]
    with pytest.raises(UserError, match="spoilt.zip: cat/a.jpg cannot be read"):
        source.read(0)
    content[content.index(b"PK\x01\x02") + 8] |= 1  # the first entry of the list of members says that it is encrypted
    (tmp_path / "secret.zip").write_bytes(content)
    with pytest.raises(UserError, match="secret.zip must not be encrypted, got 1 encrypted members"):
        open_sources(tmp_path / "secret.zip")
    with pytest.raises(UserError, match="must have at least 1 image of its train split, got 0 in 0 class folders, and 1 other"):
        open_sources(write_zip(tmp_path / "none.zip", {"a.txt": b"x"}))


def test_cifar_keeps_every_pixel_and_label(tmp_path: Path) -> None:
    """Guards against colour planes taken for rows, a lossy step before the writer's, and coarse labels for fine ones."""
    pixels = write_cifar10(tmp_path / "cifar-10-python.tar.gz")  # (36, 32, 32, 3)
    sources = open_sources(tmp_path / "cifar-10-python.tar.gz")
    assert {split: len(source) for split, source in sources.items()} == {"train": 30, "val": 6}
    for source in sources.values():
        selection = pickle.loads(pickle.dumps(source.select(list(range(len(source)))[::-1])))
        for sample in range(len(selection)):
            image = selection.read(sample)
            assert image == source.read(len(source) - 1 - sample)
            number = int(image.name.rpartition("_")[2].removesuffix(".png"))
            assert image.class_name == source.class_names[number % 10]
            assert np.array_equal(np.asarray(Image.open(io.BytesIO(image.data))), pixels[number])
    assert sources["train"].class_names[:2] == ["airplane", "automobile"]

    write_cifar100(tmp_path / "cifar-100-python.tar.gz")
    fine = open_sources(tmp_path / "cifar-100-python.tar.gz")["val"]
    assert [fine.read(i).class_name for i in range(5)] == [f"fine_{i:02d}" for i in range(5)]
    assert len(fine.class_names) == 100


class _Harmful:
    path: Path

    def __reduce__(self):
        return os.system, (f"touch {self.path}",)


def test_a_pickle_cannot_run_anything(tmp_path: Path) -> None:
    """Guards against an archive from the network that executes a program when it is read."""
    harmful = _Harmful()
    harmful.path = tmp_path / "harmed"
    write_pickles(tmp_path / "cifar-10-python.tar.gz", "cifar-10-batches-py", {"batches.meta": harmful, "test_batch": {}})
    with pytest.raises(UserError, match=r"batches.meta is not a pickle of plain values and arrays \(it refers to posix.system"):
        open_sources(tmp_path / "cifar-10-python.tar.gz", "val")
    assert not harmful.path.exists()


def test_other_archives_are_not_taken_for_cifar(tmp_path: Path) -> None:
    """Guards against a KeyError for the devkit, for half a download and for batches that do not fit their labels."""
    path = tmp_path / "cifar-10-python.tar.gz"
    with pytest.raises(UserError, match="must have the member meta, as CIFAR's archives of Python pickles do"):
        open_sources(write_devkit(tmp_path / DEVKIT, ["n01440764"], [1]))
    write_pickles(path, "cifar-10-batches-py", {"batches.meta": {b"label_names": [b"a"]}, "test_batch": {b"labels": [0]}})
    with pytest.raises(UserError, match=r"does not have the content of a CIFAR archive \(KeyError"):
        open_sources(path, "val")
    batch = {b"labels": [0], b"filenames": [b"x.png"], b"data": np.zeros((2, 3072), np.uint8)}
    write_pickles(path, "cifar-10-batches-py", {"batches.meta": {b"label_names": [b"a"]}, "test_batch": batch})
    with pytest.raises(
        UserError, match=r"must have pixels of shape \(1, 3072\) and type uint8 for its 1 labels, got \(2, 3072\)"
    ):
        open_sources(path, "val")
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(UserError, match="is not a complete tar.gz"):
        open_sources(path, "val")


def test_inaturalist_is_labelled_by_its_annotations(tmp_path: Path) -> None:
    """Guards against labels by folder, an order of classes other than the category ids', and images silently missing."""
    write_inaturalist(tmp_path)
    sources = open_sources(tmp_path)
    names = ["Parus major", "Bombus terrestris", "Abies alba"]  # by id
    assert [source.class_names for source in sources.values()] == [names, names]
    assert class_of_each_file(sources["train"]) == {f"train{n}.jpg": names[c] for n, c in enumerate((0, 1, 2, 2, 1))}
    assert class_of_each_file(sources["val"]) == {"val0.jpg": "Abies alba", "val1.jpg": "Parus major"}

    whole = (tmp_path / "train2019.json").read_text()
    (tmp_path / "train2019.json").write_text(whole.replace("Abies alba", "Parus major"))
    with pytest.raises(
        UserError, match="train2019.json and the other split's file must agree on names, got two for 1 categories"
    ):
        open_sources(tmp_path, "train")
    (tmp_path / "val2019.json").rename(tmp_path / "kept")
    same_name = open_sources(tmp_path)["train"]  # two classes must not become one
    assert same_name.class_names == ["Parus major (0)", "Bombus terrestris (1)", "Parus major (2)"]
    (tmp_path / "train2019.json").write_text(whole)
    (tmp_path / "kept").rename(tmp_path / "val2019.json")

    (tmp_path / "train_val2019/Kingdom/2/val0.jpg").unlink()
    with pytest.raises(UserError, match=r"val2019.json lists 2 images, of which 1 are not in .*val0.jpg, \.\.\.\): unpack"):
        open_sources(tmp_path)
    tree = json.loads(whole)
    (tmp_path / "train2019.json").write_text(json.dumps({**tree, "annotations": tree["annotations"][1:]}))
    with pytest.raises(UserError, match=r"train2019.json has 1 images without one of its 3 categories"):
        open_sources(tmp_path, "train")
    (tmp_path / "train2019.json").write_text("{}")
    with pytest.raises(
        UserError, match=r"train2019.json must have images, annotations and categories .* \(KeyError: 'images'\)"
    ):
        open_sources(tmp_path, "train")
    (tmp_path / "train2018.json").write_text("{}")
    with pytest.raises(UserError, match=r"must have one annotation file for train, got 2 \(train2018.json, train2019.json\)"):
        open_sources(tmp_path)


def test_the_fingerprint_of_a_folder_stays(tmp_path: Path) -> None:
    """Guards against a run that refuses to continue because a newer release names the same shards otherwise."""
    for name, data in (("b/1.JPEG", b"xy"), ("a/2.jpg", b"x"), ("a/10.jpeg", b"")):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(data)
    listed = b"a/10.jpeg\t0\na/2.jpg\t1\nb/1.JPEG\t2\n"
    assert ImageFolder(tmp_path, "train").fingerprint() == hashlib.sha256(listed).hexdigest()


def test_a_subset_keeps_its_share_of_each_class(tmp_path: Path) -> None:
    """Guards against shares that are off by one, subsets that are not nested, and a seed that does nothing."""
    sizes = {"many": 200, "some": 25, "few": 4, "one": 1}
    for name, size in sizes.items():
        (tmp_path / name).mkdir()
        for number in range(size):
            (tmp_path / name / f"{number:03d}.jpg").write_bytes(b"x" * number)
    source = ImageFolder(tmp_path, "train")

    def kept(fraction: float, seed: int) -> dict[str, set[str]]:
        subset = take_subset(source, fraction, seed)
        assert subset.subset == fraction
        images = [subset.read(i) for i in range(len(subset))]
        return {name: {image.name for image in images if image.class_name == name} for name in sizes}

    tenth, third, all_but_few = kept(0.1, 0), kept(0.3, 0), kept(0.9, 0)
    assert {name: len(names) for name, names in tenth.items()} == {
        "many": 20,
        "some": 3,
        "few": 1,
        "one": 1,
    }  # 2.5 is rounded up
    assert {name: len(names) for name, names in third.items()} == {"many": 60, "some": 8, "few": 1, "one": 1}
    assert all(tenth[name] <= third[name] <= all_but_few[name] for name in sizes)
    assert tenth == kept(0.1, 0) and len(tenth["many"] & kept(0.1, 1)["many"]) < 10
    assert len(tenth["many"] & {f"many/{n:03d}.jpg" for n in range(20)}) < 10, "the first ones in order are no random sample"
    assert take_subset(source, 1.0, 0) is source and source.subset == 1.0
    assert take_subset(source, 0.1, 0).fingerprint() != source.fingerprint() != take_subset(source, 0.1, 1).fingerprint()
    for fraction in (0.0, -0.1, 1.1, float("nan")):
        with pytest.raises(UserError, match="--subset must be above 0 and at most 1, got"):
            take_subset(source, fraction, 0)


def test_folders_within_a_class_are_read_and_what_is_ignored_is_counted_by_ending(tmp_path: Path) -> None:
    """Guards against half of a class that is dropped without a word because its images lie in subfolders; a zip is no different."""
    files = {f"set/{name}": jpeg(n) for n, name in enumerate(("a/1.jpg", "a/2023/1.jpg", "a/2023/may/2.jpg", "b/1.jpg"))}
    files |= {"set/a/2023/notes.txt": b"x", "set/a/raw.CR2": b"x", "set/a/.thumbs/1.jpg": b"x", "set/beside.jpg": b"x"}
    path = write_zip(tmp_path / "set.zip", files)
    with zipfile.ZipFile(path) as archive:
        archive.extractall(tmp_path / "tree")
    tree, packed = (open_sources(place, "train")["train"] for place in (tmp_path / "tree" / "set", path))
    for source in (tree, packed):
        assert source.class_names == ["a", "b"] and source.labels.tolist() == [0, 0, 0, 1]
        assert source.ignored == {".txt": 1, ".cr2": 1, ".jpg": 1}, source
        read = [source.read(number) for number in range(len(source))]
        assert [image.name for image in read] == ["a/1.jpg", "a/2023/1.jpg", "a/2023/may/2.jpg", "b/1.jpg"]
        assert [image.data for image in read] == [files[f"set/{image.name}"] for image in read]
    assert tree.fingerprint() == packed.fingerprint()
    looked_at = EvaluatedFolder(tmp_path / "tree" / "set", "val", None)  # by pipeline.evaluate
    assert [looked_at.key(number) for number in range(len(looked_at))] == [image.name for image in read]


def test_a_class_folder_is_empty_only_if_no_split_has_images_of_it(tmp_path: Path) -> None:
    """Guards against a class that no image belongs to, which would shift the indices of those after it, and against indices of one
    split that are not the other's."""
    for name in ("train/a/1.jpg", "train/c/1.jpg", "val/a/1.jpg"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(jpeg(1))
    (tmp_path / "val" / "b" / "later").mkdir(parents=True)
    for split in ("train", "val"):
        source = ImageFolder(tmp_path, split)
        assert source.class_names == ["a", "c"] and source.empty == ["b"]  # c is not: train has it
        assert ImageFolder(tmp_path, split, keep_empty=True).class_names == ["a", "b", "c"]
