"""Archives that were made to do harm, and a source that changes under the sharder: one sentence, or left out with the reason."""

from __future__ import annotations

import gzip
import io
import json
import os
import struct
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from data_prep.sources import open_sources
from data_prep.sources.base import LARGEST_IMAGE
from data_prep.writer import write_shards
from pipeline.errors import UserError
from support.official_files import TRAIN_TAR, jpeg, write_cifar10, write_inaturalist, write_pickles


def read_all(location: Path) -> list[tuple[str, bytes]]:
    return [
        (image.name, image.data) for source in open_sources(location).values() for image in map(source.read, range(len(source)))
    ]


def zip_of(folder: Path, *members: tuple[str, bytes]) -> Path:
    with zipfile.ZipFile(folder / "x.zip", "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in members:
            archive.writestr(name, data)
    return folder / "x.zip"


def edited_zip(folder: Path, field: int, value: bytes) -> Path:
    """Two images; a field of the first one in the list of members is overwritten."""
    path = zip_of(folder, ("cat/a.jpg", jpeg(1)), ("dog/b.jpg", jpeg(2)))
    content = bytearray(path.read_bytes())
    place = content.index(b"PK\1\2") + field
    content[place : place + len(value)] = value
    path.write_bytes(content)
    return path


ZIPS = [
    (
        lambda d: zip_of(d, ("cat/a.jpg", b"1"), ("cat/a.jpg", b"2")),
        "must have one image of each name, got two named cat/a.jpg",
    ),
    (
        lambda d: zip_of(d, ("cat/a.jpg", b"1"), ("./cat//a.jpg", b"2")),
        "must have one image of each name, got two named cat/a.jpg",
    ),
    (lambda d: edited_zip(d, 10, struct.pack("<H", 99)), "cat/a.jpg cannot be read .*compression method"),
    (lambda d: edited_zip(d, 10, struct.pack("<H", 12)), "cat/a.jpg cannot be read .*Invalid data stream"),
    (lambda d: edited_zip(d, 42, b"\xff\xff\xff\x7f"), "cat/a.jpg cannot be read"),
    (lambda d: edited_zip(d, 24, struct.pack("<I", 10)), "cat/a.jpg cannot be read .*CRC"),
    (lambda d: edited_zip(d, 6, b"\xff\xff"), "is not a complete zip file .*version 25.5"),
]


@pytest.mark.parametrize(("make", "expected"), ZIPS)
@pytest.mark.filterwarnings("ignore:Duplicate name")
def test_a_hostile_zip_is_named(make: Callable[[Path], Path], expected: str, tmp_path: Path) -> None:
    """Guards against tracebacks of zipfile, and against one of two images that vanishes, or is read twice."""
    with pytest.raises(UserError, match=rf"x.zip.*{expected}"):
        read_all(make(tmp_path))


def test_names_in_a_zip_lead_nowhere_and_a_bomb_is_not_unpacked(tmp_path: Path) -> None:
    """Guards against paths in the shards that are somebody else's, and against 4 GB of memory for a zip of 1 kB."""
    names = [name for name, _ in read_all(zip_of(tmp_path, ("/etc/cat/a.jpg", jpeg(1)), ("/etc/dog/b.jpg", jpeg(2))))]
    assert names == ["cat/a.jpg", "dog/b.jpg"]
    (tmp_path / "other").mkdir()
    bomb = open_sources(edited_zip(tmp_path / "other", 24, struct.pack("<I", LARGEST_IMAGE + 1)))["train"]
    write_shards(bomb, tmp_path / "shards", "train", max_rejected=0.5)
    (line,) = (tmp_path / "shards" / "rejected.jsonl").read_text().splitlines()
    assert json.loads(line)["file"] == "cat/a.jpg" and "at most 268 MB are read" in json.loads(line)["reason"]


def member(name: str, data: bytes = b"", kind: bytes = tarfile.REGTYPE, **more: object) -> tuple[tarfile.TarInfo, bytes]:
    info = tarfile.TarInfo(name)
    info.size, info.type = len(data), kind
    for key, value in more.items():
        setattr(info, key, value)
    return info, data


def tar_of(*members: tuple[tarfile.TarInfo, bytes]) -> bytes:
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w", format=tarfile.PAX_FORMAT) as archive:
        for info, data in members:
            archive.addfile(info, io.BytesIO(data))
    return file.getvalue()


def train_tar(folder: Path, *members: tuple[tarfile.TarInfo, bytes]) -> Path:
    (folder / TRAIN_TAR).write_bytes(tar_of(member("n00000001.tar", tar_of(*members))))
    return folder / TRAIN_TAR


def test_links_devices_and_paths_in_a_tar_lead_nowhere(tmp_path: Path) -> None:
    """Guards against a tar that has the sharder read files of its machine."""
    others = [
        member("b.JPEG", kind=tarfile.SYMTYPE, linkname="/etc/passwd"),
        member("c.JPEG", kind=tarfile.LNKTYPE, linkname="a.JPEG"),
        member("d.JPEG", kind=tarfile.CHRTYPE),
        member("e.JPEG", kind=tarfile.FIFOTYPE),
    ]
    path = train_tar(tmp_path, member("../../a.JPEG", jpeg(1)), member("/etc/f.JPEG", jpeg(2)), *others)
    assert read_all(path) == [("n00000001/a.JPEG", jpeg(1)), ("n00000001/f.JPEG", jpeg(2))]
    assert open_sources(path)["train"].ignored.total() == 4


@pytest.mark.parametrize(
    "headers",
    [
        {"size": "999999999999"},
        {"size": "-512"},
        {"size": "-1024"},
        {"size": "9" * 40},
        {"GNU.sparse.size": "99999", "GNU.sparse.map": "0,1,a"},
        {"GNU.sparse.major": "1", "GNU.sparse.minor": "0", "GNU.sparse.realsize": "9999999999"},
        "nested",
        "twice",
    ],
)
def test_impossible_headers_of_a_tar_are_named(headers: dict[str, str] | str, tmp_path: Path) -> None:
    """Guards against tracebacks of tarfile, endless loops, and reads outside of the archive."""
    if headers == "nested":
        members = [member("x", b"name", b"L")] * 1500
    elif headers == "twice":
        members = [member("a.JPEG", jpeg(1)), member("a.JPEG", jpeg(2))]
    else:
        members = [member("a.JPEG", jpeg(1), pax_headers=headers)]
    expected = (
        "must have one image of each name, got two named n00000001/a.JPEG"
        if headers == "twice"
        else "n00000001.tar .* is cut off or not a tar"
    )
    with pytest.raises(UserError, match=rf"img_train.tar.*{expected}"):
        read_all(train_tar(tmp_path, *members))


def test_hostile_cifar_archives_are_named(tmp_path: Path) -> None:
    """Guards against pickles and gzip streams that take all memory; what a pickle may call: test_sources.py."""
    path = tmp_path / "cifar-10-python.tar.gz"
    for pickled in (
        b"\x80\x02}r" + struct.pack("<I", 2**31) + b".",  # number 2^31 of the memo
        b"\x80\x05\x96" + struct.pack("<Q", 2**42) + b".",  # a byte array of 4 TB
        b"\x80\x02cnumpy\nndarray\n(J\xff\xff\xff\x7fK\x90tX\x02\x00\x00\x00u1\x86R.",  # an array of 288 GB
        b"cbuiltins\neval\n(S'1'\ntR.",
        b"\x80\x02" + b"]" * 100_000 + b"a" * 99_999 + b".",
    ):
        write_cifar10(path)
        with tarfile.open(path) as archive:
            members = [member(info.name, archive.extractfile(info).read()) for info in archive]
        members = [(info, data) if "test" not in info.name else member(info.name, pickled) for info, data in members]
        path.write_bytes(gzip.compress(tar_of(*members), 1))
        with pytest.raises(UserError, match="cifar-10-python.tar.gz.*: download it again"):
            open_sources(path, "val")
    info, _ = member("cifar-10-batches-py/data_batch_1")
    info.size = 2**40
    path.write_bytes(gzip.compress(info.tobuf() + bytes(10**6), 1))
    with pytest.raises(UserError, match="data_batch_1 has 1099511627776 bytes, 1073741824 at most"):
        open_sources(path)
    batch = {b"labels": [-1], b"filenames": [b"x.png"], b"data": []}
    write_pickles(path, "cifar-10-batches-py", {"batches.meta": {b"label_names": [b"a"]}, "test_batch": batch})
    with pytest.raises(UserError, match="a label of -1"):
        open_sources(path, "val")


@pytest.mark.parametrize(
    ("table", "key", "value", "expected"),
    [
        ("images", "file_name", "/etc/passwd", "file_name of images 0 must be a path below the folder, got '/etc/passwd'"),
        ("images", "file_name", "a/../../x.jpg", "must be a path below the folder"),
        ("images", "file_name", "a\0b", "must be a path below the folder"),
        ("images", "file_name", 5, "must be a path below the folder"),
        ("images", "id", [1], r"id of images 0 must be a whole number, got \[1\]"),
        ("categories", "id", "x", "id of categories 0 must be a whole number, got 'x'"),
        ("categories", "name", None, "name of categories 0 must be a string, got null"),
        ("images", None, None, "lists 1 images twice"),
        ("annotations", None, 1, "must give each image one category, got two for 1 images"),
    ],
)
def test_hostile_annotations_are_named(table: str, key: str | None, value: object, expected: str, tmp_path: Path) -> None:
    """Guards against annotations that put other files of the machine into the shards, and against labels that depend on chance."""
    write_inaturalist(tmp_path)
    path = tmp_path / "train2019.json"
    tree = json.loads(path.read_text())
    if key:
        tree[table][0][key] = value
    else:
        tree[table].append({**tree[table][0], **({"category_id": value} if value is not None else {})})
    path.write_text(json.dumps(tree))
    with pytest.raises(UserError, match=rf"train2019.json.*{expected}"):
        open_sources(tmp_path, "train")


@pytest.mark.parametrize("change", ["grows", "shrinks", "is gone", "becomes a pipe", "loses a member", "swaps its members"])
def test_a_source_that_changes_while_it_is_sharded_is_named(change: str, tmp_path: Path) -> None:
    """Guards against shards that are half of one data set and half of another under one fingerprint, and against a hang."""
    in_zip = "member" in change
    path = zip_of(tmp_path, ("cat/a.jpg", jpeg(1)), ("cat/b.jpg", jpeg(2)), ("dog/c.jpg", jpeg(3)))
    if not in_zip:
        with zipfile.ZipFile(path) as archive:
            archive.extractall(tmp_path / "tree")
    source = open_sources(path if in_zip else tmp_path / "tree")["train"]
    image = tmp_path / "tree" / "cat" / "b.jpg"
    if change == "grows":
        image.write_bytes(image.read_bytes() + b"x")
    elif change == "shrinks":
        image.write_bytes(image.read_bytes()[:-1])
    elif in_zip:
        kept = [("cat/a.jpg", jpeg(1))] if "loses" in change else [("cat/b.jpg", jpeg(2)), ("cat/a.jpg", jpeg(1))]
        path.unlink()
        zip_of(tmp_path, *kept)
    else:
        image.unlink()
        if change == "becomes a pipe":
            os.mkfifo(image)
    with pytest.raises((UserError, OSError), match=r"changed while it was sharded: restore it|not a regular file.*b.jpg"):
        write_shards(source, tmp_path / "shards", "train")
    assert not (tmp_path / "shards" / "manifest.json").exists()
