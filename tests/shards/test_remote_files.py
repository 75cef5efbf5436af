"""Shards in a store: the same stream as from a disk, whatever goes wrong on the way; what cannot be had is named."""

from __future__ import annotations

import random
import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

pytest.importorskip("obstore", reason="needs the extra `remote`")

from pipeline.config import AugmentConfig, DataConfig
from pipeline.errors import UserError
from pipeline.loader.loader import Loader
from pipeline.loader.reader import BadSamples, Reader
from pipeline.shards.files.remote import join_ranges
from pipeline.shards.shard_set import ShardSet
from pipeline.stores import store
from pipeline.stream.samples import DamagedSample
from support.batches import train_batches
from support.http_proxy import Fault, HttpProxy, Request
from support.stores import BUCKET, nginx, s3_server, upload


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tries follow each other at once, and a store is given up after seconds."""
    for name in ("_FIRST_PAUSE", "_FIRST_THROTTLED"):
        monkeypatch.setattr(store, name, 0.002)
    for name in ("_LONGEST_PAUSE", "_LONGEST_THROTTLED"):
        monkeypatch.setattr(store, name, 0.02)
    monkeypatch.setattr(store, "PATIENCE", 60.0)


@pytest.fixture
def web(copied_shards: Path, tmp_path: Path) -> Iterator[int]:
    """nginx over the parent of ``copied_shards``; its port."""
    with nginx(copied_shards.parent, tmp_path / "nginx") as port:
        yield port


def batches(shards: ShardSet, count: int, data: DataConfig = DataConfig(), limit: int = 0) -> list[list[np.ndarray]]:  # noqa: B008
    """The encoded images of the first batches of 32, and none of them a substitute."""
    source = train_batches(shards, global_batch=32, micro_batch=32, data=data)
    reader = Reader(source, BadSamples(shards, limit), 0, data.read_ahead)
    try:
        read = [reader.next() for _ in range(count)]
    finally:
        reader.close()
    assert all(batch.replaced == 0 for batch in read)
    return [batch.images for batch in read]


def assert_same(found: list[list[np.ndarray]], expected: list[list[np.ndarray]]) -> None:
    for batch, reference in zip(found, expected, strict=True):
        assert all(np.array_equal(image, other) for image, other in zip(batch, reference, strict=True))


def test_a_thousand_faults_do_not_change_the_stream(copied_shards: Path, web: int) -> None:
    """Guards against a run that ends, skips samples or trains on wrong bytes because of errors that every store has at times."""
    drawn = random.Random(0)
    kinds = [
        Fault(status=500),
        Fault(status=503, headers={"Retry-After": "1"}),
        Fault(status=429),
        Fault(cut_after=0),
        Fault(cut_after=700),
        Fault(short_by=1),
        Fault(short_by=5000),
        Fault(delay=0.03),
    ]
    given = {number: drawn.choice(kinds) for number in drawn.sample(range(4000), 1100)}
    with HttpProxy(web, 0, lambda request: given.get(request.number)) as proxy:
        remote = ShardSet(f"http://127.0.0.1:{proxy.port}/shards", "train")
        local = ShardSet(copied_shards, "train")
        assert_same(batches(remote, 95), batches(local, 95))
        assert len(proxy.faults) > 700
        counts = remote.take_counts()
        while len(proxy.faults) < 1000:
            number = len(proxy.requests) % len(local)
            assert np.array_equal(remote.read(number), local.read(number))
        assert counts and all(counts[kind] > 50 for kind in ("throttled", "cut", "errors"))
        failed = sum(fault.delay == 0 for fault in proxy.faults)
        later = remote.take_counts() or {}
        assert sum(part.get(kind, 0) for part in (counts, later) for kind in ("throttled", "cut", "errors")) == failed


def test_s3_gives_the_same_batches_as_the_disk(copied_shards: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against another stream from a bucket: same images, labels and augmentation, decoded."""
    with s3_server(monkeypatch):
        upload(copied_shards, "sets/digits")
        remote = ShardSet(f"s3://{BUCKET}/sets/digits", "train")
        local = ShardSet(copied_shards, "train")
        assert remote.identity() == local.identity() and str(remote.folder) == f"s3://{BUCKET}/sets/digits"
        augment = AugmentConfig(rand_augment_ops=2, mixup=0.8)
        loaders = [
            Loader(
                train_batches(each, global_batch=64, micro_batch=64, augment=augment),
                DataConfig(num_threads=1),
                torch.device("cpu"),
            )
            for each in (remote, local)
        ]
        for _ in range(3):
            batch, reference = map(next, loaders)
            assert torch.equal(batch.images, reference.images) and torch.equal(batch.labels, reference.labels)
        for loader in loaders:
            loader.close()
        (copied_shards / "train-000002.tar").write_bytes(b"short")
        upload(copied_shards, "sets/digits")
        with pytest.raises(
            UserError, match=r"s3://bucket/sets/digits/train-000002.tar must have \d+ bytes by manifest.json, got 5"
        ):
            ShardSet(f"s3://{BUCKET}/sets/digits", "train")


def test_blocks_come_in_few_requests(copied_shards: Path, web: int) -> None:
    """Guards against a request per image where neighbours are read together, which costs latency and money."""
    data = DataConfig(order="block", block_size=64, window_blocks=4)
    with HttpProxy(web) as proxy:
        remote = ShardSet(f"http://127.0.0.1:{proxy.port}/shards", "train")
        assert_same(batches(remote, 90, data), batches(ShardSet(copied_shards, "train"), 90, data))
        tars = [request for request in proxy.requests if request.path.endswith(".tar")]
        assert len(tars) < 90 * 32 / 2  # threads that lag behind read alone; the first window, of 256 images, was not announced


def test_few_of_a_blocks_samples_do_not_bring_the_whole_block(copied_shards: Path, web: int) -> None:
    """Guards against each of many processes fetching what is for all of them."""
    data = DataConfig(order="block", block_size=64, window_blocks=4)
    remote = ShardSet(f"http://127.0.0.1:{web}/shards", "train", readers=16)
    batches(remote, 20, data)
    counts = remote.take_counts()
    assert counts and counts["bytes"] < 1.5 * 25 * 32 * remote.samples["bytes"].mean()


def test_neighbours_are_joined_within_bounds() -> None:
    """Guards against requests without end, and against reading gaps for nothing."""
    wanted = [("b", 0, 10), ("a", 100, 50), ("a", 0, 90), ("a", 5000, 10), ("a", 165, 10)]
    pieces = join_ranges(wanted, gap=20, largest=170)
    assert [(piece.name, piece.begin, piece.size, piece.serves) for piece in pieces] == [
        ("a", 0, 150, [2, 1]),
        ("a", 165, 10, [4]),
        ("a", 5000, 10, [3]),
        ("b", 0, 10, [0]),
    ]
    drawn = np.random.default_rng(0)
    wanted = [("a", int(begin), int(size)) for begin, size in zip(drawn.integers(0, 10**6, 300), drawn.integers(1, 10**5, 300))]
    pieces = join_ranges(wanted)
    assert sorted(place for piece in pieces for place in piece.serves) == list(range(300))
    for piece in pieces:
        for place in piece.serves:
            _, begin, size = wanted[place]
            assert piece.begin <= begin and begin + size <= piece.begin + piece.size


def test_an_object_that_cannot_be_had_is_a_bad_sample(copied_shards: Path, web: int) -> None:
    """Guards against a run that waits for ever, or ends, for one object that a store does not give."""

    def refuse(request: Request) -> Fault | None:
        return Fault(status=500) if request.path.endswith("train-000001.tar") else None

    with HttpProxy(web, 0, refuse) as proxy:
        remote = ShardSet(f"http://127.0.0.1:{proxy.port}/shards", "train")
        sound, lost = (int(np.flatnonzero(remote.samples["shard"] == shard)[3]) for shard in (0, 1))
        images = remote.read_batch([sound, lost])
        assert isinstance(images[0], np.ndarray) and isinstance(images[1], DamagedSample)
        assert "train-000001.tar: sample 000001-000003 cannot be read (the answer was 500" in str(images[1])
        with pytest.raises(UserError, match="samples of http.* cannot be used, but data.max_bad_samples allows 20"):
            batches(remote, 40, limit=20)


def test_changed_bytes_are_bad_and_a_like_object_goes_unnoticed(copied_shards: Path, digits_shards: Path, web: int) -> None:
    """Guards against training on another object than the one that was sharded, and against losing samples to a harmless copy."""
    remote = ShardSet(f"http://127.0.0.1:{web}/shards", "train")
    remote.read(5)
    tar = copied_shards / "train-000000.tar"
    shutil.copy(digits_shards / tar.name, tar.with_suffix(".copy"))
    tar.with_suffix(".copy").replace(tar)  # another etag, the same bytes
    index = int(np.flatnonzero(remote.samples["shard"] == 0)[7])
    (image,) = remote.read_batch([index])
    assert isinstance(image, np.ndarray) and (remote.take_counts() or {})["changed"] == 1
    with open(tar, "r+b") as file:
        file.seek(int(remote.samples["offset"][index]))
        file.write(b"xx")
    (image,) = remote.read_batch([index])
    assert isinstance(image, DamagedSample) and "was changed after it was written" in str(image)
    tar.write_bytes(tar.read_bytes() + b"more")
    with pytest.raises(
        DamagedSample, match=r"cannot be read \(the file was replaced: it must have \d+ bytes by manifest.json, got \d+\)"
    ):
        remote.read(index)


@pytest.mark.parametrize(
    ("status", "sentence"),
    [
        (403, r"/shards refuses access \(the answer was 403\): renew the credentials"),
        (401, r"/shards refuses access \(the answer was 401\): renew the credentials"),
        (503, r"/shards has not answered for \d+ s \(the answer was 503\): check the store"),
    ],
)
def test_a_store_that_fails_ends_the_reading_with_one_sentence(
    status: int, sentence: str, web: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards against a hundred bad samples, and wrong substitutes, where none of the samples is at fault."""
    monkeypatch.setattr(store, "PATIENCE", 1.5)
    down = False
    with HttpProxy(web, 0, lambda request: Fault(status=status) if down else None) as proxy:
        remote = ShardSet(f"http://127.0.0.1:{proxy.port}/shards", "train")
        bad = BadSamples(remote, 5)
        reader = Reader(train_batches(remote, global_batch=32, micro_batch=32), bad, 0, 4)
        reader.next()
        down = True
        with pytest.raises(UserError, match=sentence) as error:
            for _ in range(60):
                reader.next()
        assert error.value.exit_code == (76 if status == 503 else 2) and str(reader.failure) == str(error.value)
        assert len(bad) == 0
        reader.close()


@pytest.mark.parametrize(
    ("answer", "kind"),
    [
        (Fault(cut_after=0), "cut"),
        (Fault(status=503), "throttled"),
        (Fault(status=503, headers={"Retry-After": "1"}), "throttled"),
    ],
    ids=["cut", "503", "503 and when to come back"],
)
def test_a_store_that_comes_back_is_waited_for(answer: Fault, kind: str, copied_shards: Path, web: int) -> None:
    """Guards against ending a run for a store that restarts, or refuses everybody for a while, and against samples that count as bad."""
    seen: list[int] = []

    def fault(request: Request) -> Fault | None:
        seen.append(request.number)
        return answer if 40 <= len(seen) < 400 else None

    with HttpProxy(web, 0, fault) as proxy:
        remote = ShardSet(f"http://127.0.0.1:{proxy.port}/shards", "train")
        assert_same(batches(remote, 12), batches(ShardSet(copied_shards, "train"), 12))
        assert (remote.take_counts() or {})[kind] > 100


def test_what_is_not_there_is_one_sentence(copied_shards: Path, web: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against foreign tracebacks for the mistakes that people make first."""
    with pytest.raises(UserError, match=rf"http://127.0.0.1:{web}/nowhere/manifest.json is missing"):
        ShardSet(f"http://127.0.0.1:{web}/nowhere", "train")
    (copied_shards / "train-samples.npy").unlink()
    monkeypatch.setenv("TMPDIR", str(copied_shards.parent))
    monkeypatch.setattr("tempfile.tempdir", None)
    with pytest.raises(UserError, match=r"train-samples.npy is missing \(1438 samples by manifest.json\)"):
        ShardSet(f"http://127.0.0.1:{web}/shards", "train")
    monkeypatch.setattr("tempfile.tempdir", None)


def test_a_server_without_byte_ranges_is_one_sentence(web: int) -> None:
    """Guards against two minutes of tries for what will never come."""
    with (
        HttpProxy(web, 0, lambda request: Fault(status=200)) as proxy,
        pytest.raises(UserError, match="does not answer requests for"),
    ):
        ShardSet(f"http://127.0.0.1:{proxy.port}/shards", "train")
