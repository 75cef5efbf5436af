"""A job that reads passes over a shard set through a node's cache: run as a program, several at a time.

    python tests/support/cached_stream.py SHARDS CACHE [--passes N] [--chunk BYTES] [--delay SECONDS] [--hang BYTES] [--fill] [--offline]
        [--user ID --umask OCTAL]

``--chunk`` has shards fetched in small steps, ``--delay`` slows each step, and ``--hang`` fetches no further than that, though the job
lives on; ``--fill`` goes on until all shards are in the cache; ``--offline`` has no source; ``--user`` becomes another user first. A line on stdout says that the first pass
has begun; the last one is JSON with a digest of the stream and counts.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
from xxhash import xxh3_64

import pipeline.shards.files.cache_filler as cache_filler
from pipeline.shards.files.cache import ShardCache
from pipeline.shards.files.cached import CachedFiles
from pipeline.shards.shard_set import ShardSet
from pipeline.stream.order import sample_at
from support.launching import REPOSITORY, clean_environment


def digest(shards: ShardSet, passes: int = 1) -> str:
    """A digest of the encoded samples in the order of the first epochs."""
    result = xxh3_64()
    for epoch in range(passes):
        for index in sample_at(np.arange(len(shards)), epoch, len(shards), seed=7).tolist():
            result.update(shards.read(index))
    return result.hexdigest()


def start_stream(shards: Path, cache: Path, *options: object) -> subprocess.Popen:
    """Start this program in a process of its own."""
    command = [sys.executable, Path(__file__), shards, cache, *options]
    environment = clean_environment(PYTHONPATH=f"{REPOSITORY}:{REPOSITORY / 'tests'}")
    return subprocess.Popen(list(map(str, command)), env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def result_of(process: subprocess.Popen) -> dict:
    """What a process said at its end, with its warnings."""
    out, err = process.communicate()
    assert process.returncode == 0, err
    return {**json.loads(out.splitlines()[-1]), "warnings": err}


def wait_for_all(files: CachedFiles) -> None:
    """Fetch until every shard of the set is in the cache and open."""
    files.fill()
    while len(files._copies) < len(files._bytes):
        time.sleep(0.01)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("shards", type=Path)
    parser.add_argument("cache", type=Path)
    parser.add_argument("--delay", type=float, default=0.0)
    parser.add_argument("--chunk", type=int, default=cache_filler.CHUNK)
    parser.add_argument("--passes", type=int, default=1)
    parser.add_argument("--hang", type=int, default=1 << 60)
    parser.add_argument("--fill", action="store_true")
    parser.add_argument("--offline", action="store_true")
    parser.add_argument("--user", type=int)
    parser.add_argument("--umask", default="022")
    args = parser.parse_args()
    if args.user is not None:
        ShardSet(args.shards, "train").read(0)  # imports what this user may not read, where Python is in another's home
        os.setgroups([])
        os.setgid(args.user)
        os.setuid(args.user)
        os.umask(int(args.umask, 8))
    cache_filler.CHUNK, cache_filler._ELSEWHERE_SECONDS = args.chunk, 0.05
    shards = ShardSet(args.shards, "train", cache=ShardCache(args.cache, keep_free=0))
    files = shards.files
    assert isinstance(files, CachedFiles)
    fetched, plain_read = 0, files.source.read

    def slow_read(name: str, offset: int, size: int) -> bytes:
        nonlocal fetched
        assert not args.offline, "the cache has everything"
        data = plain_read(name, offset, size)
        if threading.current_thread().name == "shard cache":
            time.sleep(args.delay if fetched < args.hang else 1 << 20)
            fetched += len(data)
        return data

    files.source.read = slow_read  # type: ignore[method-assign]
    found = len(files._copies)
    files.fill()
    print("begun", flush=True)
    said = {"digest": digest(shards, args.passes)}
    if args.fill:
        wait_for_all(files)
    files.close()
    print(json.dumps({**said, "found": found, "cached": len(files._copies), "fetched": fetched}))


if __name__ == "__main__":
    main()
