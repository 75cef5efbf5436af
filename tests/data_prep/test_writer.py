"""Writing shards: every image is checked, nothing of others is touched."""

from __future__ import annotations

import io
import json
import shutil
import tarfile
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from data_prep.shard_writer import TarWriter
from data_prep.sources import ImageFolder
from data_prep.writer import write_shards
from pipeline.errors import UserError
from pipeline.shards.image_checks import ImageRules, prepare_image
from pipeline.shards.manifest import ShardManifest
from pipeline.shards.shard_set import ShardSet
from support.images import encoded, picture
from support.launching import run_script
from support.sharding import SHARDER, digests, lines


@pytest.fixture
def planted(tmp_path: Path) -> Path:
    """60 images of 3 classes; two of them are not plain JPEGs, three are damaged, one has broken EXIF."""
    root = tmp_path / "images"
    for label, class_name in enumerate(("n01", "n02", "n03")):
        (root / class_name).mkdir(parents=True)
        for number in range(20):
            (root / class_name / f"{number:02d}.JPEG").write_bytes(encoded(picture(seed=100 * label + number)))
    whole = encoded(picture(200))
    (root / "n01" / "03.JPEG").write_bytes(encoded(picture(), "PNG"))
    (root / "n01" / "04.JPEG").write_bytes(encoded(picture().convert("CMYK")))
    (root / "n02" / "05.JPEG").write_bytes(whole[: len(whole) // 2])
    (root / "n02" / "06.JPEG").write_bytes(b"")
    (root / "n03" / "07.JPEG").write_bytes(b"<html>404 not found</html>")
    (root / "n03" / "08.JPEG").write_bytes(encoded(picture(), exif=b"Exif\0\0MM\0*\xff\xff\xff\xffbroken"))
    return root


def test_what_dali_cannot_take_is_encoded_anew_and_what_nothing_can_decode_is_left_out(planted: Path, tmp_path: Path) -> None:
    """Guards against a training run that dies days later of one bad file, and against images that vanish silently."""
    output = tmp_path / "shards"
    arguments = ["--source", planted, "--output", output, "--samples-per-shard", 16]
    run_script(SHARDER, *arguments, "--max-rejected", 0.05, "--workers", 2)

    shards = ShardSet(output, "train")
    assert (len(shards), shards.info.rejected, shards.info.reencoded) == (57, 3, 2)
    assert {line["file"]: line["reason"] for line in lines(output / "rejected.jsonl")} == {
        "n02/05.JPEG": "a JPEG that is cut off",
        "n02/06.JPEG": "an empty file",
        "n03/07.JPEG": "not an image that can be decoded",
    }
    reencoded = {line["file"]: line for line in lines(output / "reencoded.jsonl")}
    assert reencoded.keys() == {"n01/03.JPEG", "n01/04.JPEG"}
    assert "PNG" in reencoded["n01/03.JPEG"]["reason"] and "CMYK" in reencoded["n01/04.JPEG"]["reason"]

    stored = {}
    for index in range(len(shards)):
        info = shards.info.shards[shards.samples["shard"][index]]
        with tarfile.open(output / info.file) as tar:
            about = json.load(tar.extractfile(f"{shards.key(index)}.json"))
            jpeg = tar.extractfile(f"{shards.key(index)}.jpg").read()
        assert jpeg == shards.read(index).tobytes()
        assert about["wnid"] == shards.classes[shards.samples["label"][index]]
        stored[about["file"]] = shards.key(index), jpeg
    for name, (key, jpeg) in stored.items():
        original = (planted / name).read_bytes()
        if name in reencoded:
            image = Image.open(io.BytesIO(jpeg))
            assert (image.format, image.mode, key) == ("JPEG", "RGB", reencoded[name]["key"])
            expected = Image.open(planted / name).convert("RGB")
            assert np.abs(np.asarray(image, dtype=int) - np.asarray(expected, dtype=int)).mean() < 3
        else:
            assert jpeg == original, name


def test_too_many_bad_images_stop_the_run_with_the_list(planted: Path, tmp_path: Path) -> None:
    """Guards against a set that is half missing because a disk or a download is broken."""
    output = tmp_path / "shards"
    arguments = ["--source", planted, "--output", output, "--samples-per-shard", 16, "--workers", 1]
    result = run_script(SHARDER, *arguments, "--max-rejected", 0, check=False)
    assert result.returncode == 2 and result.stderr.count("\n") == 1, result.stderr
    assert "3 of the 60 train images" in result.stderr and "at most 0 allowed by --max-rejected 0 (" in result.stderr
    assert not (output / "manifest.json").exists()
    listed = lines(output / "rejected.jsonl")
    assert {line["file"] for line in listed} == {"n02/05.JPEG", "n02/06.JPEG", "n03/07.JPEG"}  # of several shards, in one run

    run_script(SHARDER, *arguments, "--max-rejected", 0.05)  # what was written before is of use
    write_shards(ImageFolder(planted, "train"), tmp_path / "at_once", "train", 16, 2, max_rejected=0.05)
    assert digests(output) == digests(tmp_path / "at_once")


def test_without_decoding_only_headers_are_looked_at(planted: Path, tmp_path: Path) -> None:
    """Guards against --no-check storing what the loader would crash on."""
    flipped = bytearray(encoded(picture(200)))
    del flipped[len(flipped) // 2 : len(flipped) // 2 + 2000]  # a hole in the compressed data; the end is there
    assert prepare_image(bytes(flipped), ImageRules(decode=False)).reencoded is None
    write_shards(ImageFolder(planted, "train"), tmp_path / "shards", "train", max_rejected=0.05, rules=ImageRules(decode=False))
    assert len(lines(tmp_path / "shards" / "rejected.jsonl")) == 3
    assert len(lines(tmp_path / "shards" / "reencoded.jsonl")) == 2


def test_resizing_stores_the_short_side_and_never_enlarges(tmp_path: Path) -> None:
    """Guards against distorted, enlarged or mislabelled pictures, and against a width in the index that is the source's."""
    root = tmp_path / "images" / "n01"
    root.mkdir(parents=True)
    for number, size in enumerate(((300, 200), (200, 301), (90, 100), (100, 500))):
        picture(300, seed=number).resize(size).save(root / f"{number}.JPEG", quality=95)
    arguments = ["--source", root.parent, "--output", tmp_path / "shards", "--workers", 1]
    run_script(SHARDER, *arguments, "--resize-short-side", 100, "--quality", 80)
    shards = ShardSet(tmp_path / "shards", "train")
    sizes = {}
    for index, jpeg in enumerate(list(map(shards.read, range(4)))):
        image = Image.open(io.BytesIO(jpeg.tobytes()))
        assert image.size == (shards.samples["width"][index], shards.samples["height"][index])
        sizes[image.size] = jpeg.tobytes()
    assert sizes.keys() == {(150, 100), (100, 150), (90, 100), (100, 500)}
    assert sizes[90, 100] == (root / "2.JPEG").read_bytes() and sizes[100, 500] == (root / "3.JPEG").read_bytes()
    expected = Image.open(root / "0.JPEG").resize((150, 100), Image.Resampling.BICUBIC)
    assert np.abs(np.asarray(Image.open(io.BytesIO(sizes[150, 100])), dtype=int) - np.asarray(expected, dtype=int)).mean() < 4

    result = run_script(SHARDER, *arguments, "--resize-short-side", 100, "--quality", 81, check=False)
    assert "quality must be 81, got 80" in result.stderr
    assert "--quality 80 requires --resize-short-side" in run_script(SHARDER, *arguments, "--quality", 80, check=False).stderr


def test_tars_are_byte_for_byte_those_of_tarfile() -> None:
    """Guards against headers that some tar reader does not take."""
    members = [(f"000007-{i:06d}.jpg", b"x" * size) for i, size in enumerate((0, 1, 511, 512, 513, 100_000))]
    ours, theirs = io.BytesIO(), io.BytesIO()
    writer = TarWriter(ours)
    places = writer.add(members[:2]) + writer.add(members[2:])
    writer.close()
    with tarfile.open(fileobj=theirs, mode="w", format=tarfile.USTAR_FORMAT) as tar:
        for name, data in members:
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    assert ours.getvalue() == theirs.getvalue()
    assert [ours.getvalue()[place : place + len(data)] for place, (_, data) in zip(places, members)] == [d for _, d in members]


def test_refuses_a_disk_that_is_too_small_and_a_folder_in_the_source(digits_images: Path, tmp_path: Path) -> None:
    """Guards against a full disk after hours, and against shards that the next run takes for images."""
    root = tmp_path / "images" / "n01"
    root.mkdir(parents=True)
    picture().save(root / "a.JPEG")
    free = shutil.disk_usage(tmp_path).free
    with open(root / "b.JPEG", "wb") as file:
        file.truncate(free + 10**9)  # takes no space itself
    result = run_script(SHARDER, "--source", root.parent, "--output", tmp_path / "shards", check=False)
    assert result.returncode == 2 and "GB free for the shards, got " in result.stderr
    assert not list((tmp_path / "shards").glob("*.tar"))

    for output in (digits_images / "val", digits_images / "val" / "shards"):
        with pytest.raises(UserError, match="--output must be outside of the source"):
            write_shards(ImageFolder(digits_images, "val"), output, "val")
    assert not (digits_images / "val" / "shards").exists()


def test_the_manifest_holds_both_splits_and_their_lists(planted: Path, tmp_path: Path) -> None:
    """Guards against a list that the other split's run overwrites."""
    (tmp_path / "tree").mkdir()
    for split in ("train", "val"):
        shutil.copytree(planted, tmp_path / "tree" / split)
    for split in ("val", "train"):
        write_shards(ImageFolder(tmp_path / "tree", split), tmp_path / "shards", split, max_rejected=0.05)
    assert [line["split"] for line in lines(tmp_path / "shards" / "rejected.jsonl")] == ["train"] * 3 + ["val"] * 3
    assert list(ShardManifest.read(tmp_path / "shards").splits) == ["train", "val"]
