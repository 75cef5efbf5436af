"""The folder of a cache: who fetches a shard, what is removed to make room, and what never is."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

import pytest

from pipeline.shards.files.cache import CachedShard, Partial, ShardCache, Unclaimed
from pipeline.shards.manifest import ShardInfo
from pipeline.shards.shard_set import ShardSet
from support.cached_stream import digest, result_of, start_stream
from support.launching import REPOSITORY, clean_environment

SIZE = 1000
HOLDER = """
import sys, time
from pathlib import Path
from pipeline.shards.manifest import ShardInfo
from pipeline.shards.files.cache import ShardCache
cache, shard = ShardCache(Path(sys.argv[1]), keep_free=0), ShardInfo("train-000000.tar", 1, 1000, "0" * 64, "", 0, "")
held = cache.open(shard) if sys.argv[2] == "read" else cache.claim(shard)
if sys.argv[2] == "write":
    held.append(b"0" * 600)
print(type(held).__name__, flush=True)
time.sleep(1000)
"""


def shard(number: int, content: int = 0, size: int = SIZE) -> ShardInfo:
    """A shard whose checksum is its number and what it holds."""
    return ShardInfo(f"train-{number:06d}.tar", 1, size, f"{content:016x}{number:016x}".ljust(64, "0"), "", 0, "")


def put(cache: ShardCache, entry: ShardInfo, used: float) -> None:
    """Fetch a shard that was last used at that time."""
    partial = cache.claim(entry)
    assert isinstance(partial, Partial)
    partial.append(bytes(entry.bytes))
    partial.publish()
    partial.close()
    os.utime(cache.path(entry), (used, used))


def holder(cache: ShardCache, action: str) -> subprocess.Popen:
    """Another process that reads shard 0, or has written a part of it."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(cache.folder), action],
        env=clean_environment(PYTHONPATH=str(REPOSITORY)),
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout and process.stdout.readline().strip() in ("CachedShard", "Partial")
    return process


def end(process: subprocess.Popen) -> None:
    process.send_signal(signal.SIGKILL)
    process.communicate()


def used_bytes(cache: ShardCache) -> int:
    """What all shards in the folder take, partial ones as if they were whole."""
    return sum(file.bytes for file in cache._files())


def names(cache: ShardCache) -> set[str]:
    return {path.name for path in cache.folder.iterdir()}


def test_a_shard_has_one_fetcher_and_a_killed_one_is_continued(tmp_path: Path) -> None:
    """Guards against a node that fetches a shard once for each of its processes, and one that waits for the dead."""
    cache = ShardCache(tmp_path / "cache", keep_free=0)
    process = holder(cache, "write")
    assert cache.claim(shard(0)) is Unclaimed.ELSEWHERE and cache.open(shard(0)) is None
    assert used_bytes(cache) == SIZE  # as if it were whole: others must not take its room
    end(process)
    partial = cache.claim(shard(0))
    assert isinstance(partial, Partial) and partial.begun == 600
    assert cache.claim(shard(0)) is Unclaimed.ELSEWHERE
    partial.append(b"1" * 400)
    partial.publish()
    partial.close()
    copy = cache.open(shard(0))
    assert isinstance(copy, CachedShard) and copy.read(599, 3) == b"011"
    assert cache.claim(shard(0)) is Unclaimed.CACHED
    assert names(cache) == {cache.path(shard(0)).name}


def test_a_shard_gets_its_name_while_nobody_counts_the_files(tmp_path: Path) -> None:
    """Guards against a cache above its limit: a file that is renamed while the folder is listed was seen by neither name."""
    cache = ShardCache(tmp_path / "cache", keep_free=0)
    partial = cache.claim(shard(0))
    assert isinstance(partial, Partial)
    partial.append(bytes(SIZE))
    thread = threading.Thread(target=partial.publish)
    with cache.alone():
        thread.start()
        thread.join(0.3)
        assert thread.is_alive() and used_bytes(cache) == SIZE and not cache.path(shard(0)).exists()
    thread.join()
    partial.close()
    assert names(cache) == {cache.path(shard(0)).name}


def test_what_is_used_least_recently_goes_and_what_is_read_stays(tmp_path: Path) -> None:
    """Guards against a job that takes a shard away from under another, and against a folder that grows beyond its limit."""
    cache = ShardCache(tmp_path / "cache", 3 * SIZE, keep_free=0)
    for number, used in enumerate((100, 300, 200)):
        put(cache, shard(number), used)
    (cache.folder / "notes.tar").write_bytes(bytes(10 * SIZE))  # somebody else's
    process = holder(cache, "read")  # the oldest one
    put(cache, shard(3), 400)
    assert [cache.path(shard(number)).exists() for number in range(4)] == [True, True, False, True]

    held = cache.open(shard(1))
    assert cache.claim(shard(4, size=2 * SIZE)) is Unclaimed.NO_ROOM  # one could go, that is not enough: none does
    assert [cache.path(shard(number)).exists() for number in range(4)] == [True, True, False, True]
    del held
    end(process)
    put(cache, shard(4, size=2 * SIZE), 500)
    assert names(cache) == {cache.path(shard(3)).name, cache.path(shard(4)).name, "notes.tar"}
    assert cache.claim(shard(5, size=4 * SIZE)) is Unclaimed.NO_ROOM  # larger than all
    assert used_bytes(cache) == 3 * SIZE


def test_an_abandoned_part_makes_room_and_one_at_work_does_not(tmp_path: Path) -> None:
    """Guards against a disk that fills with the remains of killed jobs."""
    cache = ShardCache(tmp_path / "cache", SIZE, keep_free=0)
    process = holder(cache, "write")
    assert cache.claim(shard(1)) is Unclaimed.NO_ROOM
    end(process)
    put(cache, shard(1), 100)
    assert names(cache) == {cache.path(shard(1)).name}


def test_space_for_others_stays_free(tmp_path: Path) -> None:
    """Guards against a job that dies elsewhere because the cache has taken the last of a shared disk."""
    put(ShardCache(tmp_path / "cache", keep_free=0), shard(0), 100)
    assert ShardCache(tmp_path / "cache", keep_free=1.0).claim(shard(1)) is Unclaimed.NO_ROOM


def test_a_shard_written_anew_is_another_one(tmp_path: Path) -> None:
    """Guards against samples of a set that was there before, at the same path and of the same size."""
    cache = ShardCache(tmp_path / "cache", keep_free=0)
    put(cache, shard(0), 100)
    assert cache.open(shard(0)) and cache.open(shard(0, content=1)) is None


@pytest.mark.parametrize("fault", ["cut off", "a link", "a folder", "a pipe"])
def test_what_is_no_whole_shard_is_not_opened(fault: str, tmp_path: Path) -> None:
    """Guards against a process that waits for a pipe, follows a link out of the cache, or reads half a shard."""
    cache = ShardCache(tmp_path / "cache", keep_free=0)
    put(cache, shard(0), 100)
    path = cache.path(shard(0))
    if fault == "cut off":
        os.truncate(path, SIZE - 1)
        assert cache.open(shard(0)) is None and not path.exists()  # removed, so that it is fetched again
        return
    path.unlink()
    {
        "a link": lambda: path.symlink_to(__file__),
        "a folder": path.mkdir,
        "a pipe": lambda: os.mkfifo(path),
    }[fault]()
    try:
        assert cache.open(shard(0)) is None
    except OSError:
        assert fault in ("a link", "a folder")
    put(cache, shard(1), 100)  # the rest of the cache goes on


def test_a_damaged_copy_is_removed_but_not_the_one_that_replaced_it(tmp_path: Path) -> None:
    """Guards against processes that find the same damage one after the other, and the later ones undo the repair."""
    cache = ShardCache(tmp_path / "cache", keep_free=0)
    put(cache, shard(0), 100)
    first, second = cache.open(shard(0)), cache.open(shard(0))
    assert first and second and cache.remove(shard(0), first) and second.is_removed()
    put(cache, shard(0), 200)
    cache.remove(shard(0), second)
    assert cache.open(shard(0))


OTHER_USER = """
import json, os, sys
from pathlib import Path
from shards.test_shard_cache import put, shard
from pipeline.shards.files.cache import ShardCache
os.setgroups([]), os.setgid(65534), os.setuid(65534)
cache, said = ShardCache(Path(sys.argv[1]), 3000, keep_free=0), []
copy = cache.open(shard(0))
copy.touch()
said.append(copy.read(0, 3) == bytes(3))
partial = cache.claim(shard(1))
said.append(partial.begun)
partial.discard(), partial.close()
put(cache, shard(2), 50)
put(cache, shard(3), 60)
said.append(cache.remove(shard(0), copy))
print(json.dumps(said))
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_users_share_what_each_may_touch() -> None:
    """Guards against a second user whose job ends, or fetches nothing, because the files are the first one's."""
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o1777)  # as /tmp: everybody writes, and removes only what is his
        cache = ShardCache(Path(folder), 3 * SIZE, keep_free=0)
        put(cache, shard(0), 10)
        partial = cache.claim(shard(1))  # killed in the middle
        assert isinstance(partial, Partial)
        partial.append(b"half")
        partial.close()
        environment = clean_environment(PYTHONPATH=f"{REPOSITORY}:{REPOSITORY / 'tests'}")
        result = subprocess.run([sys.executable, "-c", OTHER_USER, folder], env=environment, capture_output=True, text=True)
        assert result.returncode == 0, result.stderr
        assert json.loads(result.stdout) == [True, 0, False]
        left = {cache.path(shard(0)).name, cache.path(shard(3)).name}  # its own shard 2 has made room for 3
        assert {name for name in names(cache) if not name.startswith(".")} == left
        again = cache.claim(shard(1))
        assert isinstance(again, Partial) and again.begun == 4
        again.close()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
@pytest.mark.parametrize(("umask", "found"), [("022", 4), ("077", 0)])
def test_two_users_and_their_umasks(umask: str, found: int, digits_shards: Path) -> None:
    """Guards against a second user's job that ends, trains on other samples, or takes away what the first one's has open."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        os.chmod(folder, 0o755)
        shards, cache = shutil.copytree(digits_shards, folder / "shards"), folder / "cache"
        cache.mkdir()
        os.chmod(cache, 0o1777)
        users = ("--umask", umask, "--user")
        first = result_of(start_stream(shards, cache, "--fill", *users, 65534))
        second = result_of(start_stream(shards, cache, *users, 65533))
        assert first["digest"] == second["digest"] == digest(ShardSet(shards, "train"))
        assert (first["cached"], first["warnings"]) == (4, "") and second["found"] == found
        refused = "has a shard that cannot be opened (" in second["warnings"]
        assert refused == (found == 0) and ("Permission denied); it is read from its source." in second["warnings"]) == refused
        left = [path.stat() for path in cache.iterdir()]
        assert [(about.st_uid, about.st_mode & 0o777) for about in left] == [(65534, 0o666 & ~int(umask, 8))] * 4
