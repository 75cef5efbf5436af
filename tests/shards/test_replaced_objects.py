"""Objects of an S3 store that are replaced while a run reads them: their bytes are used only if they are those that were sharded."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("obstore", reason="needs the extra `remote`")

import pipeline.shards.files.cache_filler as cache_filler
from pipeline.config import DataConfig
from pipeline.errors import UserError
from pipeline.files import file_sha256
from pipeline.loader.reader import BadSamples, Encoded, Reader
from pipeline.shards.files.cache import ShardCache
from pipeline.shards.files.cached import CachedFiles
from pipeline.shards.manifest import ShardManifest
from pipeline.shards.shard_set import ShardSet
from support.batches import train_batches
from support.cached_stream import wait_for_all
from support.stores import BUCKET, s3_server, upload

SECOND, LIMIT = "train-000001.tar", 30


@pytest.fixture
def place(digits_shards: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The digits in a bucket; a prefix of this test alone."""
    with s3_server(monkeypatch):
        upload(digits_shards, tmp_path.name)
        yield f"s3://{BUCKET}/{tmp_path.name}"


def replace(place: str, by: Path) -> None:
    """Put a file in the place of the second shard."""
    import boto3

    boto3.client("s3").put_object(Bucket=BUCKET, Key=f"{place.rpartition('/')[2]}/{SECOND}", Body=by.read_bytes())


@pytest.mark.parametrize(
    ("order", "other", "reason"),
    [
        ("full", "train-000000.tar", "was changed after it was written"),
        ("block", "train-000000.tar", "was changed after it was written"),
        ("full", "train-000003.tar", r"must have 1648640 bytes by manifest.json, got 983040|it ends before these bytes"),
    ],
    ids=["same size", "same size, in blocks", "other size"],
)
def test_another_shard_in_the_place_of_one(order: str, other: str, reason: str, digits_shards: Path, place: str) -> None:
    """Guards against images of two states of an object in one epoch. The other shard is a sound one: its images could be decoded, and
    have labels of their own."""
    local = ShardSet(digits_shards, "train")
    data = DataConfig.model_validate({"order": order, "block_size": 16, "window_blocks": 4})
    remote = ShardSet(place, "train")
    bad = BadSamples(remote, LIMIT)
    reader = Reader(train_batches(remote, global_batch=8, micro_batch=8, data=data), bad, 0, 2)
    before = [reader.next() for _ in range(4)]
    replace(place, digits_shards / other)
    after: list[Encoded] = []
    with pytest.raises(
        UserError, match=f"^{LIMIT + 1} samples of {place} cannot be used, but data.max_bad_samples allows {LIMIT}; "
    ):
        while len(after) < 100:
            after.append(reader.next())
    reader.close()
    for read in (*before, *after):
        assert all(np.array_equal(image, local.read(int(index))) for image, index in zip(read.images, read.request.index))
    assert not any(read.replaced for read in before)
    replaced, sentences = local.samples["shard"][list(bad.replacement)], bad.take_unreported().values()
    assert (replaced == 1).all() and all(SECOND in sentence and re.search(reason, sentence) for sentence in sentences)
    assert (remote.take_counts() or {})["changed"]


def test_a_cache_takes_no_part_of_a_replaced_object(
    digits_shards: Path, place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Guards against a cache that hands two states of an object, joined, to all later jobs of the node."""
    monkeypatch.setattr(cache_filler, "CHUNK", 1 << 18)  # seven for a shard
    shards, cache = ShardManifest.read(digits_shards).splits["train"].shards, ShardCache(tmp_path / "cache", keep_free=0)
    remote = ShardSet(place, "train", cache=cache)
    files = remote.files
    assert isinstance(files, CachedFiles)
    plain_read, parts = files.source.read, 0

    def warnings() -> list[str]:
        return [record.getMessage() for record in caplog.records if record.name.startswith("pipeline")]

    def read(name: str, offset: int, size: int) -> bytes | memoryview:
        nonlocal parts
        if name == SECOND and threading.current_thread().name == "shard cache":
            parts += 1
            if parts == 4:
                replace(place, digits_shards / "train-000000.tar")
        return plain_read(name, offset, size)

    monkeypatch.setattr(files.source, "read", read)
    files.fill()
    while not warnings():
        time.sleep(0.01)
    files.close()
    changed = f"could not fetch {place}/{SECOND} (it cannot be read (the file was replaced: its etag is another one)); that is tried again"
    assert warnings()[0].endswith(f"{changed}.") and parts == 4 and not cache.path(shards[1]).exists()

    again = ShardSet(place, "train", cache=cache)  # a later job, for which nothing has changed
    assert isinstance(again.files, CachedFiles)
    again.files.fill()
    while len(warnings()) < 2 or len(again.files._copies) < 3:
        time.sleep(0.01)
    again.files.close()
    assert f"does not take {place}/{SECOND}, which is damaged itself (sample " in warnings()[-1]
    assert len(again.files._copies) == 3 and not cache.path(shards[1]).exists()

    replace(place, digits_shards / SECOND)
    restored = ShardSet(place, "train", cache=cache)
    assert isinstance(restored.files, CachedFiles)
    wait_for_all(restored.files)
    assert sorted(map(file_sha256, cache.folder.iterdir())) == sorted(shard.sha256 for shard in shards)
