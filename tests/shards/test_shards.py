"""A shard set that was damaged is named when it is opened and when it is read."""

from __future__ import annotations

import json
import os
import resource
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from pipeline.errors import UserError
from pipeline.files import file_sha256
from pipeline.shards.files.local import LocalFiles
from pipeline.shards.manifest import SAMPLE_DTYPE, ShardInfo, find_misfit, forget_pages, map_sample_table
from pipeline.shards.shard_set import ShardSet
from pipeline.stream.samples import DamagedSample


def test_opening_a_damaged_set_names_the_file_and_the_numbers(copied_shards: Path) -> None:
    """Guards against training on half a data set, and against the crash that a truncated tar gives three libraries down."""
    tar, idx, samples = (copied_shards / name for name in ("train-000001.tar", "train-000001.idx", "train-samples.npy"))
    whole = tar.read_bytes()

    tar.write_bytes(whole[:1000])
    with pytest.raises(UserError, match=rf"train-000001.tar must have {len(whole)} bytes by manifest.json, got 1000"):
        ShardSet(copied_shards, "train")
    tar.unlink()
    with pytest.raises(UserError, match="train-000001.tar is missing"):
        ShardSet(copied_shards, "train")
    tar.write_bytes(whole)

    index = idx.read_bytes()
    idx.unlink()
    with pytest.raises(UserError, match="train-000001.idx is missing .*: rebuild it with wds2idx"):
        ShardSet(copied_shards, "train")
    idx.write_bytes(index)

    content = samples.read_bytes()
    samples.write_bytes(content[:40])
    with pytest.raises(UserError, match="train-samples.npy is damaged"):
        ShardSet(copied_shards, "train")
    samples.write_bytes(content)

    with pytest.raises(UserError, match=r"must have the split 'test', but manifest.json lists only train, val"):
        ShardSet(copied_shards, "test")
    with pytest.raises(UserError, match="does not exist"):
        ShardSet(copied_shards / "nowhere", "train")
    (copied_shards / "manifest.json").write_text("{")
    with pytest.raises(UserError, match="manifest.json is damaged"):
        ShardSet(copied_shards, "train")
    (copied_shards / "manifest.json").unlink()
    with pytest.raises(UserError, match="manifest.json is missing"):
        ShardSet(copied_shards, "train")


def test_a_tar_truncated_after_opening_is_an_error_not_a_crash(copied_shards: Path) -> None:
    """Guards against SIGBUS, which is how a process dies that has mapped a file that shrinks."""
    shards = ShardSet(copied_shards, "train")
    (copied_shards / "train-000000.tar").write_bytes(b"x" * 2000)
    index = np.flatnonzero(shards.samples["shard"] == 0)[-1]
    with pytest.raises(DamagedSample, match=r"train-000000.tar: sample 000000-000399 is cut off: 0 of its \d+ bytes are there"):
        shards.read(index)


def test_a_damaged_sample_is_named_as_in_the_source(copied_shards: Path, digits_images: Path) -> None:
    """Guards against a bad image that its owner cannot find: a key says nothing outside of the shards."""
    shards = ShardSet(copied_shards, "val")
    row = shards.samples[5]
    with open(copied_shards / "val-000000.tar", "r+b") as tar:
        tar.seek(int(row["offset"]) + int(row["bytes"]) - 1)
        tar.write(b"x")
    with pytest.raises(
        DamagedSample, match=r"sample 000000-000005 was changed .*\(it was \d/\d+.JPEG in the source\)"
    ) as error:
        shards.read(5)
    name = str(error.value).rpartition("it was ")[2].partition(" ")[0]
    assert (digits_images / "val" / name).stat().st_size == row["bytes"]


def test_an_image_of_another_size_than_in_the_table_is_bad(copied_shards: Path) -> None:
    """Guards against DALI's traceback for a crop beyond the image, and against a training on single pixels without a word."""
    rows = np.load(copied_shards / "train-samples.npy")
    rows["width"][5], rows["height"][5] = 1, 1
    np.save(copied_shards / "train-samples.npy", rows)
    manifest = json.loads((copied_shards / "manifest.json").read_text())
    manifest["splits"]["train"]["samples_sha256"] = file_sha256(copied_shards / "train-samples.npy")
    (copied_shards / "manifest.json").write_text(json.dumps(manifest))
    opened = ShardSet(copied_shards, "train")
    with pytest.raises(DamagedSample, match=r"sample 000000-000005 has \d+ x \d+ pixels, 1 x 1 by the sample table \(it was"):
        opened.read(5)
    assert opened.read(4).size


def test_more_shards_than_the_system_allows_open_files(digits_shards: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against a set of 100,000 shards that cannot be trained on, and a file that is closed while a thread reads from it."""
    opened = ShardSet(digits_shards, "train")
    files = opened.files
    assert isinstance(files, LocalFiles)
    monkeypatch.setattr(resource, "getrlimit", lambda what: (64, 258))  # two files more than everything else takes
    monkeypatch.setattr(resource, "setrlimit", lambda what, limits: None)
    files.will_open(4)
    expected = ShardSet(digits_shards, "train")
    picks = [int(index) for index in np.random.default_rng(0).integers(0, len(opened), 400)]
    with ThreadPoolExecutor(8) as pool:
        for index, image in zip(picks, pool.map(opened.read, picks)):
            assert np.array_equal(image, expected.read(index))
    assert len(files._descriptors) == 2 < len(opened.info.shards)


def test_a_file_given_up_while_it_is_read_stays_open(digits_shards: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against sound samples reported as damaged: the number of a file closed too early is the next opened one's."""
    opened = ShardSet(digits_shards, "train")
    files, pread = opened.files, os.pread
    assert isinstance(files, LocalFiles)
    expected = opened.read(0).tobytes()

    def give_up_first(number: int, size: int, offset: int) -> bytes:
        """What another thread does between the look-up of a file and the reading."""
        files._descriptors.clear()
        files._open(opened.info.shards[1].file)
        return pread(number, size, offset)

    monkeypatch.setattr(os, "pread", give_up_first)
    assert opened.read(0).tobytes() == expected


def test_files_are_given_up_when_others_need_descriptors(digits_shards: Path) -> None:
    """Guards against a run that ends because several sets together reach the limit on open files."""
    opened = ShardSet(digits_shards, "train")
    firsts = [0, 400, 800]  # of three shards
    for index in firsts:
        opened.read(index)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, hard))  # nothing more can be opened
    try:
        with pytest.raises(UserError, match="Too many open files"):
            opened.read(len(opened) - 1)
        assert len(opened.files._descriptors) == 0  # all were given up first
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert opened.read(0).size


def test_a_mapped_table_is_not_charged_to_every_process(tmp_path: Path) -> None:
    """Guards against 32 GB of each process at a billion samples, which an accounting by processes adds up over a node."""
    np.save(tmp_path / "table.npy", np.ones(1_000_000, SAMPLE_DTYPE))
    rows = map_sample_table(tmp_path / "table.npy", 1_000_000)

    def resident() -> int:
        text = Path("/proc/self/smaps").read_text().partition(str(tmp_path / "table.npy"))[2]
        return int(text.partition("Rss:")[2].split()[0])  # KiB

    shards = [ShardInfo(f"{number}.tar", number * 1_000_000, 100, "", "", 0, "") for number in (0, 1)]
    assert find_misfit(rows, shards, [0, 1_000_000]) is None and resident() > 30_000
    forget_pages(rows)
    assert resident() < 1000 and rows["label"][999_999] == 1
