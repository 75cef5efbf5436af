"""Samples are the same with a cache, without one, and whatever happens to it."""

from __future__ import annotations

import json
import logging
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

import pipeline.shards.files.cache_filler as cache_filler
from pipeline.config import DataConfig
from pipeline.errors import UserError
from pipeline.files import file_sha256
from pipeline.loader.reader import BadSamples, Reader
from pipeline.shards.files.cache import ShardCache
from pipeline.shards.files.cached import CachedFiles, cache_of
from pipeline.shards.manifest import ShardManifest
from pipeline.shards.shard_set import ShardSet
from support.batches import train_batches
from support.cached_stream import digest, result_of, start_stream, wait_for_all
from support.launching import REPOSITORY, clean_environment
from support.stores import nginx

STEPS = ("--chunk", 1 << 16)  # 26 for a shard of 1.6 MB


def cached(folder: Path, cache: Path, full: bool = True) -> tuple[ShardSet, CachedFiles]:
    """The train split with a cache, which has all shards if ``full``."""
    shards = ShardSet(folder, "train", cache=ShardCache(cache, keep_free=0))
    assert isinstance(shards.files, CachedFiles)
    if full:
        wait_for_all(shards.files)
    return shards, shards.files


def until(condition: Callable[[], object]) -> None:
    """Wait for a background thread or another process."""
    while not condition():
        time.sleep(0.01)


def encoded(shards: ShardSet, data: DataConfig) -> list[bytes]:
    """The images of the first 40 batches, more than an epoch."""
    reader = Reader(train_batches(shards, global_batch=48, micro_batch=48, data=data), BadSamples(shards, 0), 0, 2)
    images = [image.tobytes() for _ in range(40) for image in reader.next().images]
    reader.close()
    return images


def whole_shards(folder: Path, cache: Path) -> int:
    """How many shards of the train split a cache has, each compared with the manifest; nothing else may be in it."""
    expected = {shard.file.removesuffix(".tar"): shard.sha256 for shard in ShardManifest.read(folder).splits["train"].shards}
    found = sorted(cache.iterdir())
    assert all(file_sha256(path) == expected[path.name.rpartition("-")[0]] for path in found)
    return len(found)


def test_two_jobs_share_a_cache_and_one_is_killed_while_it_writes(digits_shards: Path, tmp_path: Path) -> None:
    """Guards against half a shard that the next job trains on, and against a cache that a kill has locked for good."""
    cache, expected = tmp_path / "cache", digest(ShardSet(digits_shards, "train"), 2)
    victim = start_stream(digits_shards, cache, *STEPS, "--hang", 10 << 16, "--fill")
    until(lambda: any(path.stat().st_size == 10 << 16 for path in cache.glob(".*.partial")))
    other = start_stream(digits_shards, cache, *STEPS, "--passes", 2, "--fill")
    until(lambda: len(list(cache.glob("train-*.tar"))) == 3)  # all but the one that is the victim's
    victim.send_signal(signal.SIGKILL)
    victim.communicate()
    said = result_of(other)
    assert said["digest"] == expected and said["cached"] == 4 and said["warnings"] == ""
    assert whole_shards(digits_shards, cache) == 4
    assert said["fetched"] == ShardManifest.read(digits_shards).splits["train"].bytes - (10 << 16)  # it has gone on from there

    said = result_of(start_stream(digits_shards, cache, "--offline"))
    assert said["digest"] == digest(ShardSet(digits_shards, "train")) and said["found"] == 4


def test_two_jobs_fetch_each_shard_once(digits_shards: Path, tmp_path: Path) -> None:
    """Guards against a network that carries everything once for each process of a node."""
    jobs = [start_stream(digits_shards, tmp_path / "cache", *STEPS, "--delay", 0.02, "--fill") for _ in range(2)]
    said = [result_of(job) for job in jobs]
    assert [each["cached"] for each in said] == [4, 4] and len({each["digest"] for each in said}) == 1
    assert sum(each["fetched"] for each in said) == ShardManifest.read(digits_shards).splits["train"].bytes


@pytest.mark.parametrize("order", ["full", "block"])
def test_batches_are_the_same_with_a_cache_that_fills(order: str, digits_shards: Path, tmp_path: Path) -> None:
    """Guards against a stream that depends on what is in the cache."""
    data = DataConfig.model_validate({"order": order, "block_size": 16, "window_blocks": 4})
    shards, files = cached(digits_shards, tmp_path / "cache", full=False)
    assert encoded(shards, data) == encoded(ShardSet(digits_shards, "train"), data)
    wait_for_all(files)
    assert whole_shards(digits_shards, tmp_path / "cache") == 4


def test_a_store_is_needed_for_what_the_cache_lacks_only(copied_shards: Path, tmp_path: Path) -> None:
    """Guards against samples of one request that are given to another, and against a network that must not fail in a later epoch."""
    pytest.importorskip("obstore", reason="needs the extra `remote`")
    data = DataConfig.model_validate({"order": "block", "block_size": 16, "window_blocks": 4})
    with nginx(copied_shards.parent, tmp_path / "nginx") as port:
        place = f"http://127.0.0.1:{port}/shards"
        shards = ShardSet(place, "train", cache=ShardCache(tmp_path / "cache", keep_free=0))
        assert encoded(shards, data) == encoded(ShardSet(copied_shards, "train"), data)
        assert isinstance(shards.files, CachedFiles)
        wait_for_all(shards.files)
    assert digest(shards) == digest(ShardSet(copied_shards, "train"))  # the server has ended
    assert whole_shards(copied_shards, tmp_path / "cache") == 4


def cut_off(path: Path) -> None:
    os.truncate(path, 5000)


def change_bytes(path: Path) -> None:
    with open(path, "r+b") as file:
        for offset in range(600, path.stat().st_size - 100, 1000):
            file.seek(offset)
            file.write(b"wrong")


def delete(path: Path) -> None:
    path.unlink()


@pytest.mark.parametrize("damage", [cut_off, change_bytes, delete])
def test_damage_under_the_run_is_a_warning_and_mended(
    damage: Callable[[Path], None], digits_shards: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Guards against a wrong sample, a bad sample and the end of a training, all because of a copy."""
    caplog.set_level(logging.WARNING, "pipeline")
    expected = digest(ShardSet(digits_shards, "train"))
    shards, files = cached(digits_shards, tmp_path / "cache")
    for path in sorted((tmp_path / "cache").iterdir())[:2]:
        damage(path)
    assert digest(shards) == expected
    if damage is not delete:  # a deleted file is read to its end
        until(lambda: len(caplog.messages) == 2)
        assert (
            "has a damaged shard, train-00000" in caplog.text and f"it is removed and read from {digits_shards}" in caplog.text
        )
        wait_for_all(files)
        assert whole_shards(digits_shards, tmp_path / "cache") == 4
    assert digest(shards) == expected

    again, _ = cached(digits_shards, tmp_path / "cache")  # another start mends the rest
    assert digest(again) == expected and whole_shards(digits_shards, tmp_path / "cache") == 4


def test_what_stands_in_a_shards_place_is_named(digits_shards: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Guards against a cache that stays empty without a word because somebody has made a folder of a shard's name."""
    shard, cache = ShardManifest.read(digits_shards).splits["train"].shards[0], ShardCache(tmp_path / "cache", keep_free=0)
    cache.path(shard).mkdir(parents=True)
    shards, files = cached(digits_shards, tmp_path / "cache", full=False)
    assert digest(shards) == digest(ShardSet(digits_shards, "train"))
    until(lambda: len(files._copies) == 3)
    reason = f"{cache.path(shard)}: it is not the whole shard, and cannot be removed"
    assert f"has a shard that cannot be opened ({reason}); it is read from its source" in caplog.text
    files.close()


def test_a_cache_that_was_deleted_is_given_up_and_filled_again(
    digits_shards: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards against space that stays taken after an administrator has emptied the disk."""
    monkeypatch.setattr(cache_filler, "_SWEEP_SECONDS", 0.01)
    shards, files = cached(digits_shards, tmp_path / "cache")
    copies = list(files._copies.values())
    shutil.rmtree(tmp_path / "cache")
    until(lambda: all(copy.is_removed() for copy in copies) and not set(copies) & set(files._copies.values()))
    assert digest(shards) == digest(ShardSet(digits_shards, "train"))
    wait_for_all(files)
    assert whole_shards(digits_shards, tmp_path / "cache") == 4


def test_a_shard_that_is_damaged_in_its_source_stays_out(
    copied_shards: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Guards against a cache that hands the damage of a source to other jobs."""
    caplog.set_level(logging.WARNING, "pipeline")
    change_bytes(copied_shards / "train-000001.tar")
    shards, files = cached(copied_shards, tmp_path / "cache", full=False)
    files.fill()
    until(lambda: len(files._copies) == 3 and "train-000001.tar" in caplog.text)
    assert (
        f"does not take {copied_shards / 'train-000001.tar'}, which is damaged itself (sample 0 of it was changed"
        in caplog.text
    )
    files.close()
    assert whole_shards(copied_shards, tmp_path / "cache") == 3 and shards.read(0).size


@pytest.mark.parametrize("place", ["a file", "no parent"])
def test_a_cache_that_cannot_be_made_is_a_warning(
    place: str, digits_shards: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Guards against a training that ends since one node lacks a disk."""
    caplog.set_level(logging.WARNING, "pipeline")
    folder = tmp_path / "absent" / "cache" if place == "no parent" else tmp_path / "file"
    (tmp_path / "file").touch()
    shards, files = cached(digits_shards, folder, full=False)
    assert digest(shards) == digest(ShardSet(digits_shards, "train"))
    until(lambda: caplog.messages)
    reason = f"{tmp_path / 'absent'} does not exist" if place == "no parent" else "it is not a directory"
    assert f"cannot be filled ({reason}): shards that it lacks are read from {digits_shards}" in caplog.text
    assert len(caplog.messages) == 1 and not files._copies


# In a mount namespace of its own, with a disk of 3 MB, which takes one of four shards, is filled by others and is made read-only.
SMALL_DISK = """
import json, logging, os, subprocess, sys, time
from pathlib import Path
import pipeline.shards.files.cache_filler as cache_filler
from pipeline.shards.files.cache import ShardCache
from pipeline.shards.shard_set import ShardSet
from support.cached_stream import digest

shards, disk = Path(sys.argv[1]), Path(sys.argv[2])
subprocess.run(["mount", "-t", "tmpfs", "-o", "size=3m", "none", disk], check=True)
cache_filler._FAULT_SECONDS = 0.05

class Collected(logging.Handler):
    def emit(self, record): said.append(record.getMessage())

said = []
logging.getLogger("pipeline").addHandler(Collected())
digests = []
for number, state in enumerate(("small", "filled", "read-only"), start=1):
    if state == "filled":  # claimed room for a shard, and another job was faster
        for path in disk.glob("cache/*"):
            path.unlink()
        with open(disk / "filler", "wb", buffering=0) as file:
            file.write(bytes(2_500_000))
    if state == "read-only":
        subprocess.run(["mount", "-o", "remount,ro", disk], check=True)
    opened = ShardSet(shards, "train", cache=ShardCache(disk / "cache", keep_free=0 if state == "small" else -1))
    digests.append(digest(opened))
    while len(said) < number:
        time.sleep(0.01)
    digests.append(digest(opened))
    opened.files.close()
    del opened  # an open file keeps its space
print(json.dumps([digests, said, sorted(os.listdir(disk / "cache"))]))
"""


def test_a_disk_that_is_full_or_read_only_is_a_warning(digits_shards: Path, tmp_path: Path) -> None:
    """Guards against a training that dies of somebody else's files, and against a half written one that stays."""
    (tmp_path / "disk").mkdir()
    if subprocess.run(["unshare", "--mount", "mount", "-t", "tmpfs", "none", tmp_path], capture_output=True).returncode:
        pytest.skip("needs the right to mount a file system")
    result = subprocess.run(
        ["unshare", "--mount", sys.executable, "-c", SMALL_DISK, str(digits_shards), str(tmp_path / "disk")],
        env=clean_environment(PYTHONPATH=f"{REPOSITORY}:{REPOSITORY / 'tests'}"),
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stderr
    digests, said, left = json.loads(result.stdout)
    assert set(digests) == {digest(ShardSet(digits_shards, "train"))}
    assert f"has no room for 3 of 4 shards of {digits_shards} (" in said[0]
    assert "cannot be filled (No space left on device" in said[1]
    assert "cannot be filled (Read-only file system" in said[2]
    assert len(said) == 3 and left == []


def test_a_cache_is_not_the_source(digits_shards: Path) -> None:
    """Guards against an eviction in a data set."""
    with pytest.raises(UserError, match=r"data.cache must not be the folder of the shards themselves, got .*: choose"):
        ShardSet(digits_shards, "train", cache=ShardCache(digits_shards))


def test_a_set_written_anew_at_the_same_path_has_shards_of_its_own(copied_shards: Path, tmp_path: Path) -> None:
    """Guards against training on the former set, whose files have the same names and sizes."""
    cached(copied_shards, tmp_path / "cache")
    path = copied_shards / "manifest.json"
    tree = json.loads(path.read_text())
    for shard in tree["splits"]["train"]["shards"]:
        shard["sha256"] = shard["sha256"][::-1]
    path.write_text(json.dumps(tree))
    _, files = cached(copied_shards, tmp_path / "cache", full=False)
    assert not files._copies


def test_the_config_makes_a_cache() -> None:
    """Guards against a limit in other units, and against a key without its folder."""
    assert cache_of(DataConfig()) is None
    made = cache_of(DataConfig(cache="/nvme/pervit", cache_gib=1.5))
    assert made and made.folder == Path("/nvme/pervit") and made.limit == 3 << 29
    with pytest.raises(
        ValueError, match="data.cache_gib=2 requires data.cache, got null: set it to a folder on a disk of the node"
    ):
        DataConfig(cache_gib=2)
