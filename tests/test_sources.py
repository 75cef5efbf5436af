"""Every form in which a data set is downloaded gives the right images with the right labels, without being unpacked."""

from __future__ import annotations

import hashlib
import io
import json
import os
import pickle
import tarfile
import zipfile
from pathlib import Path

import numpy as np
import pytest
from conftest import run_script
from official_files import (
    DEVKIT,
    TRAIN_TAR,
    VAL_TAR,
    jpeg,
    tar_bytes,
    write_cifar10,
    write_cifar100,
    write_devkit,
    write_inaturalist,
    write_official_imagenet,
    write_pickles,
    write_train_tar,
    write_val_tar,
)
from PIL import Image

from data_prep.sources import ImageFolder, Source, open_sources, take_subset
from data_prep.writer import write_shards
from pipeline.data.shards import Manifest, file_sha256
from pipeline.errors import UserError

WNIDS = ["n01440764", "n02119789", "n03888257", "n15075141"]  # of write_official_imagenet, sorted


@pytest.fixture
def official(tmp_path: Path) -> Path:
    """A folder with look-alikes of the three official files."""
    write_official_imagenet(tmp_path / "official")
    return tmp_path / "official"


def class_of_each_file(source: Source) -> dict[str, str]:
    """File name to class name, by reading."""
    images = [source.read(sample) for sample in range(len(source))]
    assert [image.class_name for image in images] == [source.class_names[label] for label in source.labels]
    return {image.name.rpartition("/")[2]: image.class_name for image in images}


def unpack_as_usual(official: Path, tree: Path, val_wnids: list[str]) -> None:
    """What the scripts that go round do with the official files: train/<wnid>/ and val/<wnid>/."""
    with tarfile.open(official / TRAIN_TAR) as outer:
        for member in outer:
            with tarfile.open(fileobj=outer.extractfile(member)) as inner:
                inner.extractall(tree / "train" / Path(member.name).stem, filter="data")
    with tarfile.open(official / VAL_TAR) as archive:
        for wnid, name in zip(val_wnids, sorted(archive.getnames())):
            archive.extract(name, tree / "val" / wnid, filter="data")


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
        digests[form] = {file.name: file_sha256(file) for file in shards.iterdir() if file.name != "manifest.json"}
    assert len(digests["tree"]) == 3 * 2 + 1 * 2 + 2  # tars and indexes, samples
    assert digests["official"] == digests["tree"]
    manifest = Manifest.read(tmp_path / "official-shards")
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
    with pytest.raises(UserError, match=rf"{DEVKIT} is missing, the labels of ImageNet's val split needed"):
        open_sources(official)
    assert len(open_sources(official / VAL_TAR, devkit=tmp_path / "kit.tar.gz")["val"]) == 8
    with pytest.raises(UserError, match=r"--devkit is .*kit.tar.gz, but .* has 0 of the 1"):
        open_sources(official / TRAIN_TAR, devkit=tmp_path / "kit.tar.gz")
    with pytest.raises(UserError, match=r"has the splits \['train'\], 'val' needed"):
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
    assert source.ignored == 1


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
        (damaged_header, r"img_train.tar: n01440764.tar \(\d+ bytes\) is cut off or damaged at byte \d+, a whole tar needed"),
        (image_in_the_outer_tar, r"member b.JPEG is not a class's tar"),
        (member_that_is_no_tar, r"n01440764.tar \(5000 bytes\) is cut off or not a tar"),
        (tar_of_the_test_images, r"begins with test/ILSVRC2012_test_00000001.JPEG, a class's tar .* needed"),
        (no_tar_at_all, r"img_train.tar \(2600 bytes\) is cut off or not a tar"),
        (too_few_labels, r"has the ground truth of 7 images, that of ILSVRC2012_val_00000008.JPEG needed"),
        (too_many_labels, r"img_val.tar holds 8 images, 9 needed by the ground truth"),
        (label_out_of_range, r"has '5' in line 5, an id from 1 to 4 needed"),
        (devkit_cut_off, r"devkit_t12.tar.gz is not a whole tar.gz"),
        (foreign_image_in_val, r"member cat.JPEG is not one of ILSVRC2012_val_\*.JPEG"),
        (tree_beside_the_tars, r"holds both ILSVRC2012_img_train.tar and a folder train, 1 kind needed"),
    ],
)
def test_what_is_wrong_with_the_official_files_is_said(spoil, expected: str, official: Path) -> None:
    """Guards against a traceback from tarfile or SciPy, and against wrong labels that nobody notices."""
    with pytest.raises(UserError, match=expected):
        open_sources(spoil(official))


def test_a_devkit_of_something_else_is_refused(tmp_path: Path, official: Path) -> None:
    """Guards against a traceback when meta.mat is missing, damaged, or lacks an id."""
    for members, expected in (
        ({"x/readme.txt": b"x"}, "has no data/meta.mat, one needed"),
        ({"data/meta.mat": b"x" * 900, "data/ILSVRC2012_validation_ground_truth.txt": b"1"}, "data/meta.mat cannot be read"),
    ):
        with tarfile.open(tmp_path / "kit.tar.gz", "w:gz") as archive:
            for name, data in members.items():
                member = tarfile.TarInfo(name)
                member.size = len(data)
                archive.addfile(member, io.BytesIO(data))
        with pytest.raises(UserError, match=expected):
            open_sources(official, devkit=tmp_path / "kit.tar.gz")


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
    assert open_sources(path, "train")["train"].ignored == 2

    # In both, a folder test without class folders is not a split: it has no labels, or it is a class.
    for name in [name for name in images if name.startswith("test/")]:
        (tmp_path / "tree" / name).unlink()
        (tmp_path / "tree" / name).parent.rmdir()
    for name in ("tree/train/top.jpg", "tree/test/flat.jpg"):
        (tmp_path / name).write_bytes(jpeg(3))
    flat = {name: data for name, data in images.items() if name.startswith("train/")}
    for form in (tmp_path / "tree", write_zip(tmp_path / "flat.zip", {**flat, "test/flat.jpg": jpeg(3)})):
        assert list(open_sources(form)) == ["train"]
        with pytest.raises(UserError, match=r"has the splits \['train'\], 'val' needed"):
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
    with pytest.raises(UserError, match="cut.zip is not a whole zip file"):
        open_sources(tmp_path / "cut.zip")
    content[100:110] = b"\xff" * 10  # inside the first image
    (tmp_path / "spoilt.zip").write_bytes(content)
    source = open_sources(tmp_path / "spoilt.zip")["train"]
    with pytest.raises(UserError, match="spoilt.zip: cat/a.jpg cannot be read"):
        source.read(0)
    content[content.index(b"PK\x01\x02") + 8] |= 1  # the first entry of the list of members says that it is encrypted
    (tmp_path / "secret.zip").write_bytes(content)
    with pytest.raises(UserError, match="secret.zip has 1 encrypted members, 0 needed"):
        open_sources(tmp_path / "secret.zip")
    with pytest.raises(UserError, match="holds 0 images in 0 class folders of its train split"):
        open_sources(write_zip(tmp_path / "flat.zip", {"a.jpg": jpeg(1)}))


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
    with pytest.raises(UserError, match=r"batches.meta is not a pickle of plain values and arrays \(it asks for posix.system"):
        open_sources(tmp_path / "cifar-10-python.tar.gz", "val")
    assert not harmful.path.exists()


def test_other_archives_are_not_taken_for_cifar(tmp_path: Path, official: Path) -> None:
    """Guards against a KeyError for the devkit, for half a download and for batches that do not fit their labels."""
    path = tmp_path / "cifar-10-python.tar.gz"
    with pytest.raises(UserError, match="has no member meta, CIFAR's archive of Python pickles needed"):
        open_sources(official / DEVKIT)
    write_pickles(path, "cifar-10-batches-py", {"batches.meta": {b"label_names": [b"a"]}, "test_batch": {b"labels": [0]}})
    with pytest.raises(UserError, match=r"does not hold what CIFAR's archive does \(KeyError"):
        open_sources(path, "val")
    batch = {b"labels": [0], b"filenames": [b"x.png"], b"data": np.zeros((2, 3072), np.uint8)}
    write_pickles(path, "cifar-10-batches-py", {"batches.meta": {b"label_names": [b"a"]}, "test_batch": batch})
    with pytest.raises(UserError, match=r"has pixels of shape \(2, 3072\) and type uint8, \(1, 3072\) of uint8 needed"):
        open_sources(path, "val")
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(UserError, match="is not a whole tar.gz"):
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
    with pytest.raises(UserError, match="train2019.json and the other split's file give 1 categories two names"):
        open_sources(tmp_path, "train")
    (tmp_path / "val2019.json").rename(tmp_path / "kept")
    same_name = open_sources(tmp_path)["train"]  # two classes must not become one
    assert same_name.class_names == ["Parus major (0)", "Bombus terrestris (1)", "Parus major (2)"]
    (tmp_path / "train2019.json").write_text(whole)
    (tmp_path / "kept").rename(tmp_path / "val2019.json")

    (tmp_path / "train_val2019/Kingdom/2/val0.jpg").unlink()
    with pytest.raises(
        UserError, match=r"val2019.json lists 2 images and 1 of them are not below .*val0.jpg, \.\.\.\), 0 missing"
    ):
        open_sources(tmp_path)
    tree = json.loads(whole)
    (tmp_path / "train2019.json").write_text(json.dumps({**tree, "annotations": tree["annotations"][1:]}))
    with pytest.raises(UserError, match=r"train2019.json has 1 images without one of its 3 categories"):
        open_sources(tmp_path, "train")
    (tmp_path / "train2019.json").write_text("{}")
    with pytest.raises(UserError, match=r"train2019.json cannot be read \(KeyError\('images'\)\)"):
        open_sources(tmp_path, "train")
    (tmp_path / "train2018.json").write_text("{}")
    with pytest.raises(UserError, match=r"has 2 annotation files for train \(train2018.json, train2019.json\), 1 needed"):
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
        with pytest.raises(UserError, match="--subset is .*, above 0 and at most 1 needed"):
            take_subset(source, fraction, 0)


def test_the_command_takes_the_official_files(official: Path, tmp_path: Path) -> None:
    """Guards against options that do not arrive, a val split that is thinned out, and a subset that nobody can see later."""
    sharder = "data_prep/shard_imagenet.py"
    arguments = ["--source", official, "--output", tmp_path / "shards", "--workers", 1]
    output = run_script(sharder, *arguments, "--subset", 0.5).stdout
    assert "ILSVRC2012_img_train.tar: 12 images of 4 classes are taken as the train split" in output
    splits = Manifest.read(tmp_path / "shards").splits
    assert (splits["train"].source["subset"], splits["train"].samples_per_class) == (0.5, [3, 3, 3, 3])
    assert (splits["val"].source["subset"], splits["val"].samples) == (1.0, 8)
    for options, expected in (
        (arguments, "already holds another train set (subset is 0.5, 1.0 needed"),
        ([*arguments, "--split", "val", "--subset", 0.5], "--subset is 0.5, but only ['val'] is written"),
        (
            ["--source", official / "nothing", "--output", tmp_path],
            "does not exist: pass --source with a folder of train/CLASS",
        ),
        (["--source", tmp_path / "shards" / "manifest.json", "--output", tmp_path], "is a file of another kind: pass --source"),
        (["--source", tmp_path / "shards", "--output", tmp_path], "holds 0 folders and no file that is known: pass --source"),
    ):
        result = run_script(sharder, *options, check=False)
        assert result.returncode == 2 and expected in result.stderr and result.stderr.count("\n") == 1, result.stderr
