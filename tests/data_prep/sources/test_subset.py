"""The first images of each class, as in the papers' code; random subsets are tested beside the sources."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from data_prep.sources import ImageFolder, open_sources, take_classes, take_subset
from data_prep.sources.base import Entry, Source
from pipeline.errors import UserError
from pipeline.shards.manifest import ShardManifest
from support.launching import run_script

SHARDER = "data_prep/shard_imagenet.py"


def test_the_first_of_each_class_are_the_references(tmp_path: Path) -> None:
    """Guards against a row of the papers' tables that trains on other images: int(fraction * n), of the sorted names."""
    sizes = {"many": 100, "some": 25, "one": 1}
    for name, size in sizes.items():
        (tmp_path / name).mkdir()
        for number in np.random.default_rng(0).permutation(size):  # not padded: 10 comes before 2
            (tmp_path / name / f"{name}_{number}.JPEG").write_bytes(b"x" * number)
    source = ImageFolder(tmp_path, "train")

    def kept(fraction: float, seed: int = 0) -> list[str]:
        subset = take_subset(source, fraction, seed, "first")
        assert (subset.subset, subset.subset_rule) == (fraction, "first")
        return [subset.read(i).name for i in range(len(subset))]

    for fraction in (0.05, 0.1, 0.25, 0.29, 0.3, 0.5, 0.57):
        expected = []
        for name in sorted(sizes):  # as the reference's loop: it stops at int(n * fraction) of the sorted names
            files = sorted(file.name for file in (tmp_path / name).iterdir())
            expected += [f"{name}/{file}" for file in files[: int(len(files) * fraction) or 1]]
        assert kept(fraction) == expected, fraction
    assert len(kept(0.29)) == 28 + 7 + 1, "29 in decimals"
    assert kept(0.3) == kept(0.3, seed=1) and set(kept(0.1)) < set(kept(0.3))
    assert take_subset(source, 0.3, 0).subset_rule == "random"


def test_the_rule_of_a_subset_arrives_and_stays_visible(tmp_path: Path) -> None:
    """Guards against shards of a table's row that are a random draw, and against two rules in one folder."""
    photos, shards = tmp_path / "photos", tmp_path / "shards"
    for name in ("a", "b"):
        (photos / name).mkdir(parents=True)
        for number in range(5):
            Image.new("RGB", (40, 30), (50 * number, 0, 9)).save(photos / name / f"{number}.jpg")
    arguments = ["--source", photos, "--output", shards, "--workers", 1, "--split", "train"]
    first = [*arguments, "--subset", 0.5, "--subset-rule", "first"]
    run_script(SHARDER, *first)
    source = ShardManifest.read(shards).splits["train"].source
    assert (source["subset"], source["subset_rule"]) == (0.5, "first")
    train = take_subset(open_sources(photos, "train")["train"], 0.5, 0, "first")
    assert source["fingerprint"] == train.fingerprint()
    assert "nothing was written" in run_script(SHARDER, *first).stdout
    assert "--subset 0.5 --subset-rule first" in run_script("data_prep/verify_shards.py", shards).stdout
    for options, expected in (
        (
            [*arguments, "--subset", 0.5],
            "already holds another train set (for this source subset_rule must be random, got first)",
        ),
        (
            [*arguments, "--subset-rule", "first"],
            "--subset-rule first requires --subset: pass --subset",
        ),
    ):
        result = run_script(SHARDER, *options, check=False)
        assert result.returncode == 2 and expected in result.stderr and result.stderr.count("\n") == 1, result.stderr


@pytest.mark.parametrize(("asked", "kept"), [("0-2", "abc"), ("1,3", "bd"), ("3,0-1", "abd"), ("names", "bd")])
def test_classes_are_kept_as_in_a_folder_without_the_others(asked: str, kept: str, tmp_path: Path) -> None:
    """Guards against labels that are not those of a set of these classes alone, in train and val alike (ConViT's first 100 classes)."""
    for split in ("train", "val"):
        for letter in "abcd":
            for name in {"all", "few"} if letter in kept else {"all"}:
                (tmp_path / name / split / letter).mkdir(parents=True)
                Image.new("RGB", (8, 8), (ord(letter), 0, 9)).save(tmp_path / name / split / letter / f"{split}.png")
    (tmp_path / "names").write_text("d\nb\n")
    chosen = str(tmp_path / "names") if asked == "names" else asked
    for split, source in open_sources(tmp_path / "all").items():
        ours, alone = take_classes(source, chosen), open_sources(tmp_path / "few")[split]
        assert ours.class_names == alone.class_names == list(kept)
        assert ours.labels.tolist() == alone.labels.tolist() and ours.fingerprint() == alone.fingerprint()
        assert [ours.read(i).data for i in range(len(ours))] == [alone.read(i).data for i in range(len(alone))]


@pytest.mark.parametrize(
    ("asked", "sentence"),
    [
        ("0-4", "--classes must be of 0 to 1, the classes of"),
        ("1-0", "must be of 0 to 1"),
        ("c", "must be numbers such as 0-99, or"),
    ],
)
def test_classes_that_there_are_not_are_one_sentence(asked: str, sentence: str, tmp_path: Path) -> None:
    for letter in "ab":
        (tmp_path / letter).mkdir()
        Image.new("RGB", (8, 8)).save(tmp_path / letter / "0.png")
    with pytest.raises(UserError, match=sentence):
        take_classes(ImageFolder(tmp_path, "train"), asked)


def test_half_of_a_hundred_thousand_classes(tmp_path: Path) -> None:
    """Guards against minutes, or hours, in which each class is looked for among all."""
    names = [f"class{number:06d}" for number in range(100_000)]
    source = ImageFolder.__new__(ImageFolder)
    Source.__init__(source, tmp_path, names, [Entry(name, f"{name}/1.jpg", 1) for name in names])
    source.empty = [f"{name} without an image" for name in names]
    (tmp_path / "half.txt").write_text("\n".join(names[::2]))
    half = take_classes(source, str(tmp_path / "half.txt"))
    assert half.class_names == names[::2] and len(half) == 50_000 and half.labels.tolist() == list(range(50_000))
    assert "left out 100,000 class folders without an image (class000000 without" in " ".join(half.left_out())
