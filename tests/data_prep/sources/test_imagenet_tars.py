"""ImageNet as it is downloaded gives the right images with the right labels, without being unpacked."""

from __future__ import annotations

import io
import os
import pickle
import tarfile
from pathlib import Path

import pytest

from data_prep.sources import ImageFolder, open_sources, take_subset
from data_prep.writer import write_shards
from pipeline.errors import UserError
from pipeline.files import file_sha256
from pipeline.shards.manifest import ShardManifest
from support.launching import run_script
from support.official_files import (
    DEVKIT,
    TRAIN_TAR,
    VAL_TAR,
    class_of_each_file,
    jpeg,
    tar_bytes,
    write_devkit,
    write_official_imagenet,
    write_train_tar,
    write_val_tar,
)

SAFE = {"filter": "data"} if hasattr(tarfile, "data_filter") else {}  # early releases of a Python do not have it
WNIDS = ["n01440764", "n02119789", "n03888257", "n15075141"]  # of write_official_imagenet, sorted


@pytest.fixture
def official(tmp_path: Path) -> Path:
    """A folder with look-alikes of the three official files."""
    write_official_imagenet(tmp_path / "official")
    return tmp_path / "official"


def unpack_as_usual(official: Path, tree: Path, val_wnids: list[str]) -> None:
    """What the scripts that go round do with the official files: train/<wnid>/ and val/<wnid>/."""
    with tarfile.open(official / TRAIN_TAR) as outer:
        for member in outer:
            with tarfile.open(fileobj=outer.extractfile(member)) as inner:
                inner.extractall(tree / "train" / Path(member.name).stem, **SAFE)
    with tarfile.open(official / VAL_TAR) as archive:
        for wnid, name in zip(val_wnids, sorted(archive.getnames())):
            archive.extract(name, tree / "val" / wnid, **SAFE)


def test_the_official_tars_give_the_shards_of_the_unpacked_tree(tmp_path: Path) -> None:
    """Guards against a wrong offset, order or label: ids taken for indices, or images in the order of the tar."""
    truth = write_official_imagenet(tmp_path / "official")
    unpack_as_usual(tmp_path / "official", tmp_path / "tree", truth["val"])
    digests = {}
    for form in ("official", "tree"):
        for split, source in open_sources(tmp_path / form).items():
            assert source.total_bytes() == sum(len(source.read(i).data) for i in range(len(source)))
            write_shards(source, tmp_path / f"{form}-shards", split, samples_per_shard=9)
        shards = tmp_path / f"{form}-shards"
        digests[form] = {file.name: file_sha256(file) for file in shards.glob("[!.]*") if file.name != "manifest.json"}
    assert len(digests["tree"]) == 3 * 2 + 1 * 2 + 2  # tars and indexes, samples
    assert digests["official"] == digests["tree"]
    manifest = ShardManifest.read(tmp_path / "official-shards")
    assert manifest.classes == WNIDS
    assert manifest.splits["val"].samples_per_class == [truth["val"].count(wnid) for wnid in WNIDS]
    forms = open_sources(tmp_path / "official", "train")["train"], ImageFolder(tmp_path / "tree", "train")
    assert {form.fingerprint() for form in forms} == {manifest.splits["train"].source["fingerprint"]}
    assert len({take_subset(form, 0.5, seed=3).fingerprint() for form in forms}) == 1


def test_labels_of_the_validation_images(official: Path) -> None:
    """Guards against the devkit's id used as the class index: known wnids of known images."""
    ids = {1: "n02119789", 2: "n01440764", 3: "n15075141", 4: "n03888257"}
    for location in (official, official / VAL_TAR):
        source = open_sources(location, "val")["val"]
        classes = class_of_each_file(source)
        assert len(classes) == 8 and source.class_names == WNIDS
        for number in range(8):
            assert classes[f"ILSVRC2012_val_{number + 1:08d}.JPEG"] == ids[3 * number % 4 + 1]


def test_the_tars_one_by_one(official: Path, tmp_path: Path) -> None:
    """Guards against splits that number their classes differently, and against a devkit that is asked for without need."""
    assert list(open_sources(official)) == ["train", "val"]
    assert list(open_sources(official / TRAIN_TAR)) == ["train"]
    (official / DEVKIT).rename(tmp_path / "kit.tar.gz")
    assert open_sources(official, "train")["train"].class_names == WNIDS
    with pytest.raises(UserError, match=rf"{DEVKIT}, with the labels of ImageNet's val split, is missing"):
        open_sources(official)
    assert len(open_sources(official / VAL_TAR, devkit=tmp_path / "kit.tar.gz")["val"]) == 8
    with pytest.raises(UserError, match=r"--devkit .*kit.tar.gz requires ILSVRC2012_img_val.tar"):
        open_sources(official / TRAIN_TAR, devkit=tmp_path / "kit.tar.gz")
    with pytest.raises(UserError, match=r"the split must be one of \['train'\] of .*, got 'val'"):
        open_sources(official / TRAIN_TAR, "val")
    # A val set that lacks a class, and a train set that does.
    write_train_tar(official / TRAIN_TAR, {"n02119789": {"a.JPEG": jpeg(1)}, "n00000001": {}})
    (tmp_path / "kit.tar.gz").rename(official / DEVKIT)
    for source in open_sources(official).values():
        assert source.class_names == ["n00000001", *WNIDS]


def test_a_selection_is_small_and_reads_in_another_process(official: Path) -> None:
    """Guards against workers that walk the headers of 138 GB again, or get the list of all images with every shard."""
    source = open_sources(official, "train")["train"]
    source.read(0)  # with the file open
    sent = pickle.dumps(source.select([20, 3]))
    assert len(sent) < len(pickle.dumps(source))
    os.rename(official / DEVKIT, official / "gone")
    received = pickle.loads(sent)
    assert [received.read(i) for i in range(2)] == [source.read(20), source.read(3)]
    assert len(received) == 2 and received.total_bytes() == len(source.read(20).data) + len(source.read(3).data)


def test_odd_members_of_the_train_tar(tmp_path: Path) -> None:
    """Guards against a lost empty file (it must reach the list of rejected ones), and names longer than a tar header holds."""
    long_name = f"{'x' * 180}.JPEG"
    images = {"a.JPEG": b"", long_name: jpeg(1), "notes.txt": b"?", "b.png": b"not looked at"}
    source = open_sources(write_train_tar(tmp_path / "train.tar", {"n00000002": images, "n00000001": {"c.jpg": jpeg(2)}}))[
        "train"
    ]
    assert [source.read(i).name for i in range(4)] == [
        "n00000001/c.jpg",
        *(f"n00000002/{n}" for n in ("a.JPEG", "b.png", long_name)),
    ]
    assert [source.read(i).data for i in range(4)] == [jpeg(2), b"", b"not looked at", jpeg(1)]
    assert source.ignored.total() == 1


def test_a_cut_off_train_tar_is_refused_wherever_the_cut_is(official: Path) -> None:
    """Guards against training on half of ImageNet: tarfile takes a file that ends between two members for a whole one."""
    whole = (official / TRAIN_TAR).read_bytes()
    with tarfile.open(official / TRAIN_TAR) as outer:
        second = outer.getmembers()[1]
    inside_image, inside_tar = second.offset_data + 600, second.offset_data + second.size // 2
    for cut in (
        0,
        300,
        512,
        second.offset,
        second.offset + 100,
        second.offset_data,
        inside_image,
        inside_tar,
        len(whole) - 20000,
    ):
        (official / TRAIN_TAR).write_bytes(whole[:cut])
        with pytest.raises(UserError, match=r"ILSVRC2012_img_train.tar.*bytes\) is cut off or .*: download it again"):
            open_sources(official / TRAIN_TAR)

    (official / TRAIN_TAR).write_bytes(whole)
    source = open_sources(official / TRAIN_TAR)["train"]
    (official / TRAIN_TAR).write_bytes(whole[: len(whole) // 2])  # while the shards are being written
    with pytest.raises(UserError, match=r"img_train.tar gave \d+ of the \d+ bytes of n15075141/.* at offset \d+: download"):
        source.read(len(source) - 1)


def damaged_header(official: Path) -> Path:
    """The second class's tar has a header that is not one, which tarfile takes for the end."""
    content = bytearray((official / TRAIN_TAR).read_bytes())
    with tarfile.open(official / TRAIN_TAR) as outer:
        second = outer.getmembers()[1]
        with tarfile.open(fileobj=outer.extractfile(second)) as inner:
            place = second.offset_data + inner.getmembers()[2].offset
    content[place : place + 512] = b"\xff" * 512
    (official / TRAIN_TAR).write_bytes(content)
    return official


def image_in_the_outer_tar(official: Path) -> Path:
    (official / TRAIN_TAR).write_bytes(tar_bytes({"n01440764.tar": tar_bytes({"a.JPEG": jpeg(1)}), "b.JPEG": jpeg(2)}))
    return official


def member_that_is_no_tar(official: Path) -> Path:
    return write_val_tar(official / TRAIN_TAR, {"n01440764.tar": b"x" * 5000})


def tar_of_the_test_images(official: Path) -> Path:
    return write_val_tar(official / "test.tar", {"test/ILSVRC2012_test_00000001.JPEG": jpeg(1)})


def no_tar_at_all(official: Path) -> Path:
    (official / TRAIN_TAR).write_bytes(b"<html>not logged in</html>" * 100)
    return official


def too_few_labels(official: Path) -> Path:
    write_devkit(official / DEVKIT, WNIDS, [1] * 7)
    return official


def too_many_labels(official: Path) -> Path:
    write_devkit(official / DEVKIT, WNIDS, [1] * 9)
    return official


def label_out_of_range(official: Path) -> Path:
    write_devkit(official / DEVKIT, WNIDS, [1, 2, 3, 4, 5, 1, 1, 1])
    return official


def label_of_thousands_of_digits(official: Path) -> Path:
    write_devkit(official / DEVKIT, WNIDS, ["1" * 5000] * 8)  # type: ignore[list-item]
    return official


def devkit_cut_off(official: Path) -> Path:
    (official / DEVKIT).write_bytes((official / DEVKIT).read_bytes()[:400])
    return official


def tree_beside_the_tars(official: Path) -> Path:
    (official / "train" / "n01440764").mkdir(parents=True)
    return official


def foreign_image_in_val(official: Path) -> Path:
    return write_val_tar(official / VAL_TAR, {"ILSVRC2012_val_00000001.JPEG": jpeg(1), "cat.JPEG": jpeg(2)})


@pytest.mark.parametrize(
    ("spoil", "expected"),
    [
        (damaged_header, r"img_train.tar: n01440764.tar \(\d+ bytes\) is cut off or damaged at byte \d+"),
        (image_in_the_outer_tar, r"member b.JPEG is not a class's tar"),
        (member_that_is_no_tar, r"n01440764.tar \(5000 bytes\) is cut off or not a tar"),
        (tar_of_the_test_images, r"must begin with a class's tar .*, got test/ILSVRC2012_test_00000001.JPEG"),
        (no_tar_at_all, r"img_train.tar \(2600 bytes\) is cut off or not a tar"),
        (too_few_labels, r"must have the ground truth of ILSVRC2012_val_00000008.JPEG, got that of 7 images"),
        (too_many_labels, r"img_val.tar must have 9 images by the ground truth of .*, got 8"),
        (label_out_of_range, r"line 5 of .* must be an id from 1 to 4, got '5'"),
        (label_of_thousands_of_digits, r"line 1 of .* must be an id from 1 to 4, got '1{59}: "),
        (devkit_cut_off, r"devkit_t12.tar.gz is not a complete tar.gz"),
        (foreign_image_in_val, r"member cat.JPEG is not one of ILSVRC2012_val_\*.JPEG"),
        (tree_beside_the_tars, r"must hold one kind of source, got ILSVRC2012_img_train.tar and a folder train"),
    ],
)
def test_what_is_wrong_with_the_official_files_is_said(spoil, expected: str, official: Path) -> None:
    """Guards against a traceback from tarfile or SciPy, and against wrong labels that nobody notices."""
    with pytest.raises(UserError, match=expected):
        open_sources(spoil(official))


def test_a_devkit_of_something_else_is_refused(tmp_path: Path, official: Path) -> None:
    """Guards against a traceback when meta.mat is missing, damaged, or lacks an id."""
    for members, expected in (
        ({"x/readme.txt": b"x"}, "must have the member data/meta.mat"),
        (
            {"data/meta.mat": b"x" * 900, "data/ILSVRC2012_validation_ground_truth.txt": b"1"},
            "data/meta.mat must have the struct array",
        ),
    ):
        with tarfile.open(tmp_path / "kit.tar.gz", "w:gz") as archive:
            for name, data in members.items():
                member = tarfile.TarInfo(name)
                member.size = len(data)
                archive.addfile(member, io.BytesIO(data))
        with pytest.raises(UserError, match=expected):
            open_sources(official, devkit=tmp_path / "kit.tar.gz")


def test_the_command_takes_the_official_files(official: Path, tmp_path: Path) -> None:
    """Guards against options that do not arrive, a val split that is thinned out, and a subset that nobody can see later."""
    sharder = "data_prep/shard_imagenet.py"
    arguments = ["--source", official, "--output", tmp_path / "shards", "--workers", 1]
    output = run_script(sharder, *arguments, "--subset", 0.5).stdout
    assert "ILSVRC2012_img_train.tar: 12 images of 4 classes for the train split" in output
    splits = ShardManifest.read(tmp_path / "shards").splits
    assert (splits["train"].source["subset"], splits["train"].samples_per_class) == (0.5, [3, 3, 3, 3])
    assert (splits["val"].source["subset"], splits["val"].samples) == (1.0, 8)
    assert splits["train"].source["subset_rule"] == "random"
    for options, expected in (
        (arguments, "already holds another train set (for this source subset must be 1.0, got 0.5"),
        ([*arguments, "--split", "val", "--subset", 0.5], "--subset requires a train split, got only ['val']"),
        (
            ["--source", official / "nothing", "--output", tmp_path],
            "does not exist: pass --source with a folder of train/CLASS",
        ),
        (
            ["--source", tmp_path / "shards" / "manifest.json", "--output", tmp_path],
            "is a file of an unknown format: pass --source",
        ),
        (["--source", tmp_path / "shards", "--output", tmp_path], "holds 0 folders and no known file: pass --source"),
    ):
        result = run_script(sharder, *options, check=False)
        assert result.returncode == 2 and expected in result.stderr and result.stderr.count("\n") == 1, result.stderr
