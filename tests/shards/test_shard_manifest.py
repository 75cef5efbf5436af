"""A manifest or sample table that was edited together with its checksums is one sentence: no traceback, no hang."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from data_prep.set_checks import read_sample_table, verify
from pipeline.errors import UserError
from pipeline.files import file_sha256
from pipeline.shards.manifest import MANIFEST, ShardManifest
from pipeline.shards.shard_set import ShardSet
from pipeline.stream.samples import DamagedSample


@pytest.fixture
def copied(digits_shards: Path, tmp_path: Path) -> Path:
    """A shard set that a test may damage."""
    return Path(shutil.copytree(digits_shards, tmp_path / "shards"))


# Where in the manifest, what is written there, what the sentence says is needed.
EDITS = [
    ("version", 2, "be 1, got 2"),
    ("classes", 5, "be a valid array, got 5"),
    ("classes", [], "have at least 1 item, got []"),
    ("classes.0", 1, "be a valid string, got 1"),
    ("classes", ["0"] * 10, "have each name once"),
    ("class_names", ["digit"] * 10, "have each name once"),
    ("class_names", ["one"], "have 10 entries, one for each class, got 1"),
    ("splits.val.samples", 0, "be greater than or equal to 1, got 0"),
    ("splits.val.samples", 2**63, "be less than 9223372036854775808, got"),
    ("splits.val.samples", True, "be a valid integer, got true"),
    ("splits.val.seed", -1, "be greater than or equal to 0, got -1"),
    ("splits.val.samples_per_shard", 1.5, "be a valid integer, got 1.5"),
    ("splits.val.samples_per_class", [1, 2], "have 10 entries, one for each class, got 2"),
    ("splits.val.samples_per_class.3", -1, "be greater than or equal to 0, got -1"),
    ("splits.val.source", None, "be an object, got null"),
    ("splits.val.source.fingerprint", None, "be a valid string, got null"),
    ("splits.val.source.subset", 0, "be greater than 0, got 0"),
    ("splits.val.source.subset", 1.5, "be less than or equal to 1, got 1.5"),
    ("splits.val.source.subset_rule", "last", "be 'random' or 'first', got 'last'"),
    ("splits.val.samples_file", "../val-samples.npy", "be the plain name of a file in this folder, got '../val-samples.npy'"),
    ("splits.val.samples_sha256", "short", "match pattern '^[0-9a-f]{64}$', got 'short'"),
    ("splits.val.shards", [], "have at least 1 item, got []"),
    ("splits.val.shards.0.file", "/etc/passwd", "be the plain name of a file in this folder"),
    ("splits.val.shards.0.idx_file", "\0", "be the plain name of a file in this folder"),
    ("splits.val.shards.0.bytes", "many", "be a valid integer, got 'many'"),
    ("splits.val.shards.0.unknown", 1, "splits.val.shards.0.unknown: Unexpected keyword argument"),
    ("splits.val", [], "be an object, got []"),
]


@pytest.mark.parametrize(("place", "value", "needed"), EDITS)
def test_an_impossible_value_in_the_manifest_is_named(place: str, value: object, needed: str, copied: Path) -> None:
    """Guards against a traceback far from the file that caused it, and against paths that lead out of the folder."""
    tree = json.loads((copied / MANIFEST).read_text())
    *above, last = (int(key) if key.isdecimal() else key for key in place.split("."))
    parent = tree
    for key in above:
        parent = parent[key]
    parent[last] = value
    (copied / MANIFEST).write_text(json.dumps(tree))
    with pytest.raises(UserError, match=r"manifest.json is damaged: .*: restore the file, or write") as error:
        ShardSet(copied, "val")
    if "unknown" in place:
        assert needed in str(error.value)
    else:
        assert f" {place} must {needed}" in str(error.value)


def edit_row(name: str, value: int) -> Callable[[np.ndarray], np.ndarray]:
    def edit(rows: np.ndarray) -> np.ndarray:
        rows[name][7] = value
        return rows

    return edit


@pytest.mark.parametrize(
    ("edit", "expected"),
    [
        (edit_row("offset", 2**63), "offset of sample 7 must be within its tar, got 9223372036854775808"),
        (edit_row("offset", 2**64 - 1), "offset of sample 7 must be"),
        (edit_row("bytes", 0), "bytes of sample 7 must be at least 1 and within its tar, got 0"),
        (edit_row("bytes", 2**32 - 1), "bytes of sample 7 must be"),
        (edit_row("shard", 1), "shard of sample 7 must be below 1, got 1"),
        (edit_row("label", 10), "label of sample 7 must be below 10, got 10"),
        (edit_row("width", 0), "width of sample 7 must be at least 1, got 0"),
        (edit_row("height", 0), "height of sample 7 must be at least 1, got 0"),
        (edit_row("label", 9), r"samples with label 0 must be \d+, got \d+"),
        (lambda rows: rows[0], r"damaged \(it holds an array of shape \(\)"),
        (lambda rows: rows[None], r"damaged \(it holds an array of shape \(1, 359\)"),
        (lambda rows: rows[:5], r"damaged \(it lists 5 samples; 359 samples by manifest.json\)"),
        (lambda rows: rows["label"], "fields"),
        (lambda rows: b"\x93NUMPY\x01\x00\x06\x00{'x':\n", "damaged"),
        (lambda rows: b"PK\x03\x04", "damaged"),
    ],
)
def test_an_impossible_row_of_the_sample_table_is_named(edit: Callable, expected: str, copied: Path) -> None:
    """Guards against an OverflowError days into a run, and against labels and crops of nothing."""
    path = copied / "val-samples.npy"
    content = edit(np.load(path))
    path.write_bytes(content) if isinstance(content, bytes) else np.save(path, content)
    tree = json.loads((copied / MANIFEST).read_text())
    tree["splits"]["val"]["samples_sha256"] = file_sha256(path)
    (copied / MANIFEST).write_text(json.dumps(tree))
    with pytest.raises(UserError, match=rf"val-samples.npy .*{expected}.*: restore it, or shard again"):
        ShardSet(copied, "val")
    rows, findings = read_sample_table(copied, ShardManifest.read(copied), "val")
    assert [finding.check for finding in findings][:1] == ["sample table"] and (rows is None or len(rows) == 359)


def test_a_number_of_samples_that_is_not_that_of_the_table_is_named(copied: Path) -> None:
    """Guards against keys and rows of one shard that are taken for those of the next."""
    tree = json.loads((copied / MANIFEST).read_text())
    tree["splits"]["train"]["shards"][0]["samples"] += 1
    tree["splits"]["train"]["shards"][1]["samples"] -= 1
    (copied / MANIFEST).write_text(json.dumps(tree))
    with pytest.raises(UserError, match=r"train-samples.npy does not fit manifest.json: samples with shard 0 must be \d+, got"):
        ShardSet(copied, "train")


def test_read_and_written_again_it_has_the_same_bytes(copied: Path) -> None:
    """Guards against a manifest whose bytes depend on which of two jobs wrote its split last."""
    before = (copied / MANIFEST).read_bytes()
    ShardManifest.read(copied).write(copied)
    assert (copied / MANIFEST).read_bytes() == before


def test_a_pipe_in_place_of_a_file_is_named(copied: Path) -> None:
    """Guards against a command that waits for ever for whoever might write into it."""
    whole = json.loads((copied / MANIFEST).read_text())
    opened = ShardSet(copied, "val")
    for name, key in (("val-000000.tar", "bytes"), ("val-000000.idx", "idx_bytes"), ("val-samples.npy", None)):
        tree = json.loads(json.dumps(whole))
        if key:
            tree["splits"]["val"]["shards"][0][key] = 0
        (copied / MANIFEST).write_text(json.dumps(tree))
        content = (copied / name).read_bytes()
        (copied / name).unlink()
        os.mkfifo(copied / name)
        with pytest.raises(
            (UserError, OSError),
            match=rf"{name}( cannot be read)?: not a regular file|not a regular file.*{name}|{name} must be a regular file",
        ):
            ShardSet(copied, "val")
        if name.endswith(".tar"):
            assert any("not a regular file" in finding.found for finding in verify(copied, ShardManifest.read(copied)))
            with pytest.raises(
                DamagedSample, match=r"val-000000.tar: sample 000000-000000 cannot be read \(not a regular file\)"
            ):
                opened.read(0)
        (copied / name).unlink()
        (copied / name).write_bytes(content)


def test_an_unfinished_set_and_an_unknown_split_get_advice_that_works(copied: Path) -> None:
    """Guards against "manifest.json is missing" for a set that one more command would finish, and an invalid --split."""
    with pytest.raises(
        UserError,
        match=r"must have the split 'test', but manifest.json lists only train, val: pass one of these; .* --split val",
    ):
        ShardSet(copied, "test")
    (copied / MANIFEST).rename(copied / "kept")
    (copied / ".train-in-progress").write_text("{}")
    with pytest.raises(UserError, match=r"missing because the sharding of train .* was not finished: run the same .* command"):
        ShardSet(copied, "train")
