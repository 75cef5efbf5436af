"""``verify_shards.py`` finds every kind of damage and never fails on it."""

from __future__ import annotations

import io
import json
import shutil
import tarfile
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pytest

from data_prep.set_checks import verify
from data_prep.sources import ImageFolder
from data_prep.writer import write_shards
from pipeline.files import file_sha256
from pipeline.shards.manifest import MANIFEST, ShardInfo, ShardManifest
from support.launching import run_script

VERIFIER = "data_prep/verify_shards.py"
TAR, IDX = "val-000001.tar", "val-000001.idx"


@pytest.fixture(scope="module")
def whole(digits_images: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The validation digits in 4 shards."""
    folder = tmp_path_factory.mktemp("verify") / "shards"
    write_shards(ImageFolder(digits_images, "val"), folder, "val", 100, workers=2)
    return folder


@pytest.fixture
def copied(whole: Path, tmp_path: Path) -> Path:
    """A shard set that a test may damage."""
    return Path(shutil.copytree(whole, tmp_path / "shards"))


def found(folder: Path, decode: bool = False) -> dict[tuple[str, str], str]:
    """What is wrong: (file, check) to the first finding."""
    rows: dict[tuple[str, str], str] = {}
    for finding in verify(folder, ShardManifest.read(folder), workers=1, decode=decode):
        rows.setdefault((finding.file, finding.check), finding.found)
    return rows


def adopt(folder: Path, name: str = TAR) -> None:
    """Bring the manifest's size and checksum of a tar up to date, as a sharder with a defect would."""
    tree = ShardManifest.read(folder)
    info = tree.splits["val"]
    new = {"bytes": (folder / name).stat().st_size, "sha256": file_sha256(folder / name)}
    shards = [ShardInfo(**{**asdict(shard), **new}) if shard.file == name else shard for shard in info.shards]
    ShardManifest(tree.classes, {"val": replace(info, shards=shards)}).write(folder)


def members(folder: Path) -> list[tuple[str, bytes]]:
    with tarfile.open(folder / TAR) as tar:
        return [(member.name, tar.extractfile(member).read()) for member in tar]


def rewrite(folder: Path, content: list[tuple[str, bytes]]) -> None:
    with tarfile.open(folder / TAR, "w", format=tarfile.USTAR_FORMAT) as tar:
        for name, data in content:
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    adopt(folder)


def test_a_whole_set_passes_and_a_damaged_one_is_a_table(copied: Path) -> None:
    """Guards against false alarms, and against damage that a job script does not notice."""
    result = run_script(VERIFIER, copied, "--decode", "--workers", 2)
    assert result.stdout.splitlines() == [f"{copied}: all is well (val 359 images in 4 shards, every image decoded)"]
    data = bytearray((copied / TAR).read_bytes())
    data[3000] ^= 1
    (copied / TAR).write_bytes(data)
    (copied / "val-000003.idx").unlink()
    result = run_script(VERIFIER, copied, check=False)
    assert result.returncode == 1 and not result.stderr
    assert TAR in result.stdout and "sha256" in result.stdout and "No such file" in result.stdout
    (copied / MANIFEST).unlink()
    assert run_script(VERIFIER, copied, check=False).returncode == 2


@pytest.mark.parametrize("size", [0, 1, 511, 700, 1024, 100_000])
def test_a_tar_that_is_cut_off(copied: Path, size: int) -> None:
    """Guards against a verifier that ends where the damage begins."""
    (copied / TAR).write_bytes((copied / TAR).read_bytes()[:size])
    rows = found(copied, decode=True)
    assert {(TAR, "tar"), (TAR, "size"), (TAR, "sha256"), (TAR, "samples"), (IDX, "index")} <= rows.keys()
    assert all(file in (TAR, IDX) for file, _ in rows)


def test_junk_everywhere_is_reported_not_raised(copied: Path) -> None:
    """Guards against a traceback from tarfile, NumPy or json."""
    junk = np.random.default_rng(0).bytes(5000)
    for name in (TAR, "val-000002.idx", "val-samples.npy", "rejected.jsonl", "extra.tar"):
        (copied / name).write_bytes(junk)
    (copied / "val-000000.tar").unlink()
    (copied / ".val-in-progress").touch()
    rows = found(copied)
    assert {
        ("val-000000.tar", "tar"),
        (TAR, "tar"),
        ("val-000002.idx", "index"),
        ("val-samples.npy", "sample table"),
        ("rejected.jsonl", "list"),
        ("extra.tar", "foreign tar"),
        (".val-in-progress", "unfinished split"),
    } <= rows.keys()
    assert ("val-000003.tar", "sha256") not in rows, "a whole shard is not a finding"


def test_members_that_are_not_adjacent_missing_or_misnamed(copied: Path) -> None:
    """Guards against samples that WebDataset splits in two or joins wrongly without a word."""
    content = members(copied)
    rewrite(copied, [*content[1:6], content[0], *content[6:]])
    rows = found(copied)
    assert rows[TAR, "key adjacency"].startswith("000001-000000 comes again at byte")
    rewrite(copied, [*content[:4], *content[5:]])
    assert found(copied)[TAR, "members"] == "000001-000001: ['jpg', 'json']"
    rewrite(copied, [("x" + name, data) for name, data in content])
    assert found(copied)[TAR, "key"] == "x000001-000000"


def test_labels_that_contradict_each_other(copied: Path) -> None:
    """Guards against a model that learns wrong classes from one bad shard."""
    content = members(copied)
    content[1] = (content[1][0], b"%d" % ((int(content[1][1]) + 1) % 10))
    content[4] = (content[4][0], b"1000")
    content[7] = (content[7][0], b"\xffcat")
    content[11] = (content[11][0], b"{")
    rewrite(copied, content)
    rows = verify(copied, ShardManifest.read(copied))
    labels = [row.found for row in rows if row.check == "label"]
    assert [text.partition(":")[0] for text in labels] == ["000001-000000", "000001-000001", "000001-000002"]
    assert [row.found for row in rows if row.check == "json"] == ["000001-000003: damaged"]
    assert [row.check for row in rows if row.file == TAR].count("sample table: label") == 1


def test_sample_table_of_another_set(copied: Path) -> None:
    """Guards against crops and labels that belong to other images."""
    rows = np.load(copied / "val-samples.npy")
    rows["offset"][5] += 512
    rows["width"][105] = 3
    rows["checksum"][205] ^= np.uint64(1)
    rows["shard"][305] = 0
    np.save(copied / "val-samples.npy", rows)
    result = found(copied)
    assert {
        ("val-samples.npy", "sha256"),
        ("val-samples.npy", "sample table"),  # of the numbers of samples
        ("val-000000.tar", "sample table: offset"),
        ("val-000001.tar", "sample table: pixels"),
        ("val-000002.tar", "sample table: checksum"),
        ("val-000003.tar", "shard of the sample table"),
    } == result.keys()


def test_images_that_do_not_decode(copied: Path) -> None:
    """Guards against --decode that looks at headers only."""
    content = members(copied)
    name, jpeg = content[0]
    content[3] = (content[3][0], jpeg[:300])
    rewrite(copied, content)
    assert found(copied)[TAR, "image"] == "000001-000001: a JPEG that is cut off"
    damaged = jpeg.replace(b"\xff\xdb", b"\xff\xfe")  # no quantization tables: the header is whole, the image is not
    rewrite(copied, [(name, damaged), *content[1:]])
    assert (TAR, "decode") not in found(copied)
    assert found(copied, decode=True)[TAR, "decode"].startswith("000001-000000: cannot be decoded")


def test_class_ordered_shards_are_reported(digits_images: Path, tmp_path: Path) -> None:
    """Guards against shards that each hold few classes: the first batches would be of those alone."""
    source = ImageFolder(digits_images, "val")
    write_shards(source.select(range(len(source))), tmp_path / "fair", "val", 40)
    assert found(tmp_path / "fair") == {}
    rows = np.load(tmp_path / "fair" / "val-samples.npy")
    # As many class-ordered samples in the second shard as it has: all of one class, its labels and text agreeing.
    folder = tmp_path / "fair"
    content = members(folder)
    for place in range(0, len(content), 3):
        about = json.loads(content[place + 2][1])
        content[place + 1] = (content[place + 1][0], b"7")
        content[place + 2] = (content[place + 2][0], json.dumps({**about, "wnid": "7"}).encode())
    rewrite(folder, content)
    assert rows["label"][40:80].tolist() != [7] * 40
    assert found(folder)[TAR, "class balance"] == "1 classes in 40 samples"


def test_lists_agree_with_the_manifest(copied: Path) -> None:
    """Guards against rejected images that nobody can name any more."""
    (copied / "rejected.jsonl").write_text(json.dumps({"split": "val", "file": "7/a.JPEG"}) + "\n")
    assert found(copied) == {("rejected.jsonl", "list"): "lines of val: 1"}
