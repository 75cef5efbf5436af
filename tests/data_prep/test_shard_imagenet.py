"""Shard sets are plain WebDataset, the same bytes on any number of workers, and never overwrite anything."""

from __future__ import annotations

import json
import subprocess
from collections import Counter
from pathlib import Path

import numpy as np
import nvidia.dali.fn as fn
import webdataset
from nvidia.dali import pipeline_def
from PIL import Image

from data_prep.sources import ImageFolder
from data_prep.writer import write_shards
from pipeline.files import file_sha256
from pipeline.shards.manifest import SAMPLE_DTYPE, ShardManifest
from pipeline.shards.shard_set import ShardSet
from support.launching import PYTHON_BIN, run_script

SHARDER = "data_prep/shard_imagenet.py"


def test_webdataset_reads_every_sample(digits_shards: Path, digits_images: Path) -> None:
    """Guards against tars that only our own reader understands, wrong labels and changed image bytes."""
    tars = sorted(map(str, digits_shards.glob("train-*.tar")))
    assert len(tars) == 4
    seen, labels = set(), Counter()
    for sample in webdataset.WebDataset(tars, shardshuffle=False):
        about = json.loads(sample["json"])
        original = digits_images / "train" / about["file"]
        assert sample["jpg"] == original.read_bytes()
        assert int(sample["cls"]) == int(about["wnid"]) == int(original.parent.name)
        assert (about["width"], about["height"]) == Image.open(original).size
        seen.add(about["file"])
        labels[int(sample["cls"])] += 1
    assert len(seen) == 1438
    assert [labels[i] for i in range(10)] == ShardManifest.read(digits_shards).splits["train"].samples_per_class


def test_dali_reads_every_sample_with_our_index(digits_shards: Path) -> None:
    """Guards against an index that DALI's own webdataset reader cannot use or that points elsewhere."""
    tar, idx = str(digits_shards / "val-000000.tar"), str(digits_shards / "val-000000.idx")

    @pipeline_def(batch_size=359, num_threads=1, device_id=None)
    def graph():
        jpeg, label = fn.readers.webdataset(paths=tar, index_paths=idx, ext=["jpg", "cls"], missing_component_behavior="error")
        return jpeg, label

    pipeline = graph()
    pipeline.build()
    jpegs, labels = pipeline.run()
    shards = ShardSet(digits_shards, "val")
    expected = list(map(shards.read, range(len(shards))))
    assert len(expected) == 359
    for i in range(359):
        assert np.array_equal(jpegs.at(i), expected[i])
        assert int(bytes(labels.at(i))) == shards.samples["label"][i]


def test_index_equals_the_one_of_wds2idx(digits_shards: Path, tmp_path: Path) -> None:
    """Guards against an index in a dialect of our own."""
    for tar in digits_shards.glob("*.tar"):
        subprocess.run([PYTHON_BIN / "wds2idx", tar, tmp_path / "idx"], check=True, capture_output=True)
        assert (tmp_path / "idx").read_bytes() == tar.with_suffix(".idx").read_bytes()


def test_same_bytes_with_any_number_of_workers(digits_images: Path, tmp_path: Path) -> None:
    """Guards against shards that depend on timing, and against a seed that does nothing."""
    folders = {}
    for name, workers, seed in (("one", 1, 0), ("three", 3, 0), ("other_seed", 1, 1)):
        folders[name] = tmp_path / name
        write_shards(ImageFolder(digits_images, "val"), folders[name], "val", samples_per_shard=50, workers=workers, seed=seed)
    digests = {name: {f.name: file_sha256(f) for f in folder.iterdir()} for name, folder in folders.items()}
    assert len(digests["one"]) == 8 * 2 + 3  # tars, indexes, samples, manifest, the empty lock
    assert digests["one"] == digests["three"]
    assert digests["one"]["val-000000.tar"] != digests["other_seed"]["val-000000.tar"]


def test_each_shard_is_a_fair_sample_of_all_classes(digits_shards: Path) -> None:
    """Guards against class-ordered shards (DALI PR 6491: two of twenty classes in the first batch)."""
    samples = ShardSet(digits_shards, "train").samples
    for shard in range(3):  # full shards of 400
        counts = np.bincount(samples["label"][samples["shard"] == shard], minlength=10)
        assert counts.min() >= 20 and counts.max() <= 62


def test_the_manifest_tells_the_truth(digits_shards: Path) -> None:
    """Guards against checksums and counts that do not match the files."""
    manifest = ShardManifest.read(digits_shards)
    assert manifest.classes == [str(digit) for digit in range(10)]
    for split, info in manifest.splits.items():
        assert file_sha256(digits_shards / info.samples_file) == info.samples_sha256
        for shard in info.shards:
            tar, idx = digits_shards / shard.file, digits_shards / shard.idx_file
            assert (tar.stat().st_size, file_sha256(tar)) == (shard.bytes, shard.sha256)
            assert (idx.stat().st_size, file_sha256(idx)) == (shard.idx_bytes, shard.idx_sha256)
        assert info.samples == sum(shard.samples for shard in info.shards) == sum(info.samples_per_class)
        assert len(ShardSet(digits_shards, split)) == info.samples
    assert SAMPLE_DTYPE.itemsize == 32, "all of ImageNet must stay about 40 MB"


def test_a_second_run_writes_nothing(digits_images: Path, tmp_path: Path) -> None:
    """Guards against resharding for hours, and against a run that calls a set finished whose shard is gone."""
    output = tmp_path / "shards"
    arguments = ["--source", digits_images, "--output", output, "--split", "val", "--samples-per-shard", 100]
    run_script(SHARDER, *arguments)
    before = {f.name: (f.stat().st_mtime_ns, file_sha256(f)) for f in output.iterdir()}
    run_script(SHARDER, *arguments)
    assert before == {f.name: (f.stat().st_mtime_ns, file_sha256(f)) for f in output.iterdir()}

    (output / "val-000002.tar").unlink()
    assert "val-000002.tar is missing" in run_script(SHARDER, *arguments, check=False).stderr


def test_refuses_what_it_would_spoil_or_cannot_use(digits_images: Path, copied_shards: Path, tmp_path: Path) -> None:
    """Guards against overwriting another data set, and against silence about a source that holds nothing."""

    def error(*arguments: object) -> str:
        result = run_script(SHARDER, *arguments, check=False)
        assert result.returncode == 2 and "Traceback" not in result.stderr
        assert result.stderr.count("\n") == 1, result.stderr
        return result.stderr

    other = tmp_path / "other" / "class_a"
    other.mkdir(parents=True)
    Image.new("RGB", (20, 10)).save(other / "x.jpg")
    before = sorted((f.name, f.stat().st_mtime_ns) for f in copied_shards.iterdir())
    assert "its 10 classes lack 1" in error("--source", other.parent, "--output", copied_shards, "--split", "train")
    assert "already holds another train set (for this source samples_per_shard must be 77, got 400" in error(
        "--source", digits_images, "--output", copied_shards, "--samples-per-shard", 77
    )
    assert before == sorted((f.name, f.stat().st_mtime_ns) for f in copied_shards.iterdir())
    (copied_shards / "manifest.json").unlink()
    assert "already holds 4 train shards of another data set" in error("--source", digits_images, "--output", copied_shards)

    (tmp_path / "empty" / "class_a").mkdir(parents=True)
    for name in ("class_a/1.HEIC", "2.gif"):
        (tmp_path / "empty" / name).touch()
    output = tmp_path / "new"
    assert (
        "must have at least 1 image of its train split, got 0 in 1 class folder, and 2 other files (1 .gif, 1 .heic): pass"
        in error("--source", tmp_path / "empty", "--output", output)
    )
    assert "does not exist" in error("--source", tmp_path / "nowhere", "--output", output)
    assert "--workers must be at least 1, got 0" in error("--source", digits_images, "--output", output, "--workers", 0)
