"""One's own folders of images: a val split where there is none, splits that do not fit together, and what the command says."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from data_prep.sources import ImageFolder, hold_out, open_sources
from data_prep.writer import write_shards
from pipeline.errors import UserError
from pipeline.files import file_sha256
from pipeline.shards.manifest import ShardManifest
from pipeline.shards.shard_set import ShardSet
from support.launching import REPOSITORY, clean_environment, run_script
from support.official_files import jpeg

SHARDER, VERIFIER = "data_prep/shard_imagenet.py", "data_prep/verify_shards.py"


def tree(folder: Path, images: dict[str, int]) -> Path:
    """``{"train/cat": 3}``: three images in ``folder/train/cat``."""
    for place, (name, count) in enumerate(images.items()):
        (folder / name).mkdir(parents=True)
        for number in range(count):
            (folder / name / f"{number}.jpg").write_bytes(jpeg(100 * place + number))
    return folder


def names(source: ImageFolder) -> set[str]:
    return {source.read(sample).name for sample in range(len(source))}


def test_a_share_of_each_class_is_held_out(tmp_path: Path) -> None:
    """Guards against images that are in both splits or in none, classes without a train image, and a seed that does nothing."""
    source = ImageFolder(tree(tmp_path / "a", {"many": 40, "some": 5, "two": 2, "one": 1}), "train")
    train, val = hold_out(source, 0.1, 0)
    counts = {name: sum(image.startswith(f"{name}/") for image in names(val)) for name in source.class_names}
    assert counts == {"many": 4, "some": 1, "two": 1, "one": 0}  # 0.5 is rounded up
    assert names(train) | names(val) == names(source) and not names(train) & names(val)
    assert names(hold_out(source, 0.1, 0)[1]) == names(val) != names(hold_out(source, 0.1, 1)[1])
    most = names(hold_out(source, 0.99, 0)[0])
    assert {name.partition("/")[0] for name in most} == set(source.class_names)
    with pytest.raises(UserError, match="--val-share requires at least 2 images of a class, got 1 of each"):
        hold_out(ImageFolder(tree(tmp_path / "b", {"one": 1}), "train"), 0.5, 0)


def test_the_same_images_as_train_and_val_are_warned_of(tmp_path: Path) -> None:
    """Guards against an accuracy on the training images, which a user gets who follows an error message one split at a time."""
    source = tree(tmp_path / "images", {"cat": 3, "dog": 3})
    (source / "cat" / "broken.jpg").write_bytes(b"no image")  # left out of both splits
    arguments = ["--source", source, "--output", tmp_path / "shards", "--workers", 1, "--max-rejected", 1]
    assert "--val-share 0.1 would hold one out" in run_script(SHARDER, *arguments).stdout
    with pytest.raises(
        UserError,
        match="must have the split 'val', but manifest.json lists only train: shard again into an empty folder with --val-share 0.1, or other images",
    ):
        ShardSet(tmp_path / "shards", "val")
    warning = "the val split has the images of its train split: accuracy on them says nothing about unseen images"
    assert warning in run_script(SHARDER, *arguments, "--split", "val").stdout
    said = run_script(VERIFIER, tmp_path / "shards", "--workers", 1).stdout  # ends with 0: the files are as they were written
    assert f"warning: {tmp_path / 'shards'}: {warning}; " in said and "all files are intact (train 6 images" in said
    assert "all is well" not in said


def test_a_plain_folder_becomes_both_splits(tmp_path: Path) -> None:
    """Guards against a user who gets only a train split and no advice, and against a command that cannot be given again."""
    source = tree(tmp_path / "images", {"cat": 10, "dog": 10})
    arguments = ["--source", source, "--output", tmp_path / "shards", "--workers", 1]
    said = run_script(SHARDER, *arguments, "--val-share", 0.2).stdout
    assert "16 images of 2 classes for the train split" in said
    splits = ShardManifest.read(tmp_path / "shards").splits
    assert {name: info.samples_per_class for name, info in splits.items()} == {"train": [8, 8], "val": [2, 2]}
    assert "in 1 shard," in said and "1 shards" not in said
    again = run_script(SHARDER, *arguments, "--val-share", 0.2).stdout
    assert again.count("is already there, nothing was written") == 2 and "re-encoded" not in again
    verified = run_script(VERIFIER, tmp_path / "shards").stdout
    assert "train 16 images in 1 shard, val 4 images in 1 shard" in verified and "warning" not in verified
    has_both = ["--source", tree(tmp_path / "both", {"train/x": 2, "val/x": 1}), "--output", tmp_path / "other"]
    assert "drop --val-share" in run_script(SHARDER, *has_both, "--val-share", 0.2, check=False).stderr
    alone = run_script(SHARDER, "--source", source, "--output", tmp_path / "alone", "--workers", 1).stdout
    assert "there is no val split, which training needs: --val-share 0.1" in alone


def test_splits_with_other_classes_are_refused_or_told(tmp_path: Path) -> None:
    """Guards against a model with an output that no image ever trains."""
    source = tree(tmp_path / "images", {"train/a": 2, "train/b": 2, "val/a": 1, "val/c": 1})
    wrong = r"val has images of 1 class \(c\) that train has none of, so that a model cannot learn them: rename or remove them"
    result = run_script(SHARDER, "--source", source, "--output", tmp_path / "shards", check=False)
    assert result.returncode == 2 and result.stderr.count("\n") == 1 and not (tmp_path / "shards").exists()
    write_shards(ImageFolder(source, "val"), tmp_path / "shards", "val")
    with pytest.raises(UserError, match=wrong):
        write_shards(ImageFolder(source, "train"), tmp_path / "shards", "train")

    (source / "val" / "c").rename(source / "val" / "b")
    tree(source, {"train/d": 2})
    said = run_script(SHARDER, "--source", source, "--output", tmp_path / "more", "--workers", 1).stdout
    assert "warning: " in said and "val has no images of 1 class (d) that train has" in said

    path = tmp_path / "more" / "manifest.json"  # as another program may write it
    manifest = json.loads(path.read_text())
    manifest["splits"]["train"]["samples_per_class"] = [0, 4, 2]
    path.write_text(json.dumps(manifest))
    table = run_script(VERIFIER, tmp_path / "more", "--workers", 1, check=False).stdout
    assert "val has images of 1 class (a) that train has none of" in table


def test_a_folder_and_its_zip_give_the_same_shards(tmp_path: Path) -> None:
    """Guards against names in the shards that depend on how the images were packed."""
    source = tree(tmp_path / "images", {"train/a": 2, "train/b": 2})
    shutil.make_archive(str(tmp_path / "images"), "zip", tmp_path)
    tars = []
    for form in ("images", "images.zip"):
        write_shards(open_sources(tmp_path / form)["train"], tmp_path / f"{form}-shards", "train")
        tars.append(file_sha256(tmp_path / f"{form}-shards" / "train-000000.tar"))
    assert tars[0] == tars[1] and source.is_dir()


@pytest.mark.parametrize("command", [SHARDER, VERIFIER, "data_prep/make_demo_dataset.py"])
def test_help_needs_nothing_that_is_slow_to_import(command: str) -> None:
    """Guards against seconds of waiting for a list of options, and against one without an example."""
    script = (
        "import runpy, sys\ntry:\n    runpy.run_path(sys.argv[1], run_name='__main__')\n"
        "except SystemExit:\n    assert not {'numpy', 'PIL', 'scipy', 'sklearn', 'torch', 'tqdm'} & set(sys.modules), sorted(sys.modules)\n"
    )
    result = subprocess.run(
        [sys.executable, "-c", script.replace("sys.argv[1]", repr(command)), "--help"],
        cwd=REPOSITORY,
        env=clean_environment(PYTHONPATH=str(REPOSITORY)),
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stderr
    assert len(re.findall("\n +(?:pervit [a-z]|python -m data_prep)", result.stdout.partition("Examples:")[2])) >= 2
