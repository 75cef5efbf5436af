"""Fill the cache of a node with shards, each verified before anybody can open it there, and look after those that are there."""

import errno
import logging
import os
import socket
import threading
import time
from collections import Counter, deque
from collections.abc import Callable
from itertools import accumulate
from pathlib import Path
from typing import Literal

import numpy as np

from pipeline.cluster.environment import allow_more_files
from pipeline.errors import UserError
from pipeline.files import disk_reason
from pipeline.hardware import GIB
from pipeline.shards.files.cache import CachedShard, Partial, ShardCache, Unclaimed
from pipeline.shards.files.local import ShardFiles
from pipeline.shards.manifest import ShardInfo, sample_damage

CHUNK = 8 << 20  # bytes of a request to the source: 50 ms of latency cost a third of the time at 100 MB/s
_log = logging.getLogger(__name__)

_SWEEP_SECONDS = 30.0  # between two records of what is in use
_ELSEWHERE_SECONDS = 1.0  # until the next look for shards that other processes fetch
_FAULT_SECONDS = 60.0  # until the next try after a fault, or where there was no room
_TRIES = 2  # of a shard whose copy is found damaged, or cannot be opened, again and again
_SHOWN = 3  # warnings of one kind


class Fault(Exception):
    """Why a shard could not be fetched: the cache cannot be written or locked, the source cannot give the shard now, or the source's
    content is not what the sample table says."""

    def __init__(self, of: Literal["cache", "source", "content"], reason: str) -> None:
        super().__init__(reason)
        self.of = of


class Stopped(Exception):
    """The caller asked to stop. What was fetched is left to be continued."""


def fetch_shard(
    cache: ShardCache, source: ShardFiles, shard: ShardInfo, rows: np.ndarray, go_on: Callable[[int], bool]
) -> Unclaimed | None:
    """Fetch a shard, unless it is there or another process is about it. Returns None if the shard was fetched, else why it was
    not. Raises Fault, Stopped.

    Args:
        rows: (n,) of ``SAMPLE_DTYPE``, its rows of the sample table.
        go_on: called with the number of bytes after each step, also with those that an earlier process had fetched; False stops.
    """
    try:
        partial = cache.claim(shard)
    except OSError as error:
        raise Fault("cache", _reason(cache.folder, error)) from None
    if isinstance(partial, Unclaimed):
        return partial
    try:
        continued = partial.begun > 0
        if not go_on(partial.begun):
            raise Stopped
        _fill(partial, source, shard, go_on)
        if continued and find_damage(partial.read, rows):  # it was left by a machine that lost power: with zeros, for example
            partial.restart()
            _fill(partial, source, shard, lambda _: go_on(0))
        if damage := find_damage(partial.read, rows):
            partial.discard()
            raise Fault("content", damage)
        partial.publish()
    except OSError as error:
        partial.discard()  # the disk may be full: it is not this file that should fill it
        raise Fault("cache", _reason(cache.folder, error)) from None
    finally:
        partial.close()
    return None


def rows_of(shards: list[ShardInfo]) -> dict[str, slice]:
    """Name of each shard -> its rows of the split's sample table."""
    ends = accumulate(shard.samples for shard in shards)
    return {shard.file: slice(end - shard.samples, end) for shard, end in zip(shards, ends)}


def find_damage(read: Callable[[int, int], bytes], rows: np.ndarray) -> str:
    """What is wrong with the first damaged sample of (n,) rows of the sample table; ``read`` gives bytes by offset and size."""
    for place, row in enumerate(rows):
        if damage := sample_damage(read(int(row["offset"]), int(row["bytes"])), row):
            return f"sample {place} of it {damage}"
    return ""


def _fill(partial: Partial, source: ShardFiles, shard: ShardInfo, go_on: Callable[[int], bool]) -> None:
    while partial.begun < shard.bytes:
        wanted = min(CHUNK, shard.bytes - partial.begun)
        try:
            data = source.read(shard.file, partial.begun, wanted)
        except OSError as error:
            raise Fault("source", f"it cannot be read ({error.strerror or error})") from None
        except UserError as error:
            raise Fault("source", error.problem) from None
        if len(data) != wanted:
            raise Fault("source", f"it ends at {partial.begun + len(data)} of its {shard.bytes} bytes")
        partial.append(data)
        if not go_on(len(data)):
            raise Stopped


def _reason(folder: Path, error: OSError) -> str:
    if error.errno == errno.ENOENT and not folder.parent.is_dir():
        return f"{folder.parent} does not exist"
    if error.errno == errno.ENOTDIR:
        return "it is not a directory"
    return disk_reason(folder / "shard", error)


class Filler:
    """What the thread does. It does not refer to :class:`CachedFiles`, so that one that is dropped ends it."""

    def __init__(self, source: ShardFiles, cache: ShardCache, shards: list[ShardInfo], samples: np.ndarray) -> None:
        self._source, self._cache, self._samples = source, cache, samples
        self._shards = {shard.file: shard for shard in shards}
        self._rows = rows_of(shards)
        self.copies: dict[str, CachedShard] = {}  # name of the shard -> its copy, which reads use
        self.used: set[str] = set()  # since the last sweep
        self.announced: deque[str] = deque(maxlen=4 * len(shards) + 64)  # to be read soon
        self._suspects: dict[str, CachedShard] = {}  # copies that gave other bytes than they should
        self._failures: Counter[str] = Counter()  # of a shard's copies
        self._warned: Counter[str] = Counter()
        self._stop, self._wake = threading.Event(), threading.Event()
        self._swept = time.monotonic()
        self._most = allow_open_copies(len(shards))  # of copies
        for name in self._shards:
            if not self._is_out_of_files():
                self._open(name)

    def stop(self) -> None:
        self._stop.set()
        self._wake.set()

    def suspect(self, name: str) -> None:
        """Read a shard from its source until its copy was examined."""
        if copy := self.copies.pop(name, None):
            self._suspects[name] = copy
            self._wake.set()

    def run(self) -> None:
        """Fetch what is missing, and look after what is there, until :meth:`stop`."""
        while not self._stop.is_set():
            try:
                pause = self._round()
            except Stopped:
                return
            except Exception as error:  # a cache is no reason to end a training
                self._warn("fault", f"is not filled any further by this process ({type(error).__name__}: {error})")
                return
            self._wake.wait(pause)
            self._wake.clear()

    def _round(self) -> float:
        """Go through the shards once; returns the seconds until that is worth while again."""
        pause, room = _SWEEP_SECONDS, True
        order = iter(self._shards)
        # Those that were announced come first, also while this goes on.
        while name := self.announced.popleft() if self.announced else next(order, ""):
            self._look_after()
            if name in self.copies or self._failures[name] >= _TRIES or self._is_out_of_files() or self._open(name) or not room:
                continue
            try:
                rows = self._samples[self._rows[name]]
                hindrance = fetch_shard(self._cache, self._source, self._shards[name], rows, self._go_on)
            except Fault as fault:
                told_of = {
                    "cache": f"cannot be filled ({fault}): shards that it lacks are read from {self._source.folder}",
                    "source": f"could not fetch {self._source.folder / name} ({fault}); that is tried again",
                    "content": f"does not take {self._source.folder / name}, which is damaged itself ({fault})",
                }
                self._warn(fault.of, told_of[fault.of], _SHOWN if fault.of == "content" else 1)
                self._failures[name] += fault.of == "content"
                room = fault.of == "content"
            else:
                if hindrance is Unclaimed.ELSEWHERE:
                    pause = _ELSEWHERE_SECONDS
                elif hindrance is Unclaimed.NO_ROOM:
                    missing = [shard for name, shard in self._shards.items() if name not in self.copies]
                    limit = "" if self._cache.limit is None else f" within data.cache_gib {self._cache.limit / GIB:g}"
                    size = f"of {self._source.folder} ({sum(shard.bytes for shard in missing) / GIB:.3g} GiB)"
                    told = f"{len(missing)} of {len(self._shards)} shards {size}, which are read from there"
                    self._warn("room", f"has no room{limit} for {told}")
                    room = False
                elif not self._open(name):  # removed again at once, or another user's and not readable
                    self._failures[name] += 1
        return pause if room else max(pause, _FAULT_SECONDS)

    def _go_on(self, _: int) -> bool:
        self._look_after()
        return not self._stop.is_set()

    def _open(self, name: str) -> bool:
        try:
            copy = self._cache.open(self._shards[name])
        except OSError as error:
            reason = f"{error.filename}: {error.strerror}"
            self._warn("open", f"has a shard that cannot be opened ({reason}); it is read from its source")
            self._failures[name] += 1
            return False
        if copy is None:
            return False
        copy.touch()
        self.copies[name] = copy
        return True

    def _look_after(self) -> None:
        """Examine the suspects; now and then record what is in use, and close what was removed by others."""
        while self._suspects:
            name, copy = self._suspects.popitem()
            try:
                damage = find_damage(copy.read, self._samples[self._rows[name]])
            except OSError as error:
                damage = f"it cannot be read ({error.strerror})"
            if not damage:
                self.copies[name] = copy
                continue
            self._failures[name] += 1
            removed = self._cache.remove(self._shards[name], copy)
            what = "removed" if removed else "left alone, as it cannot be removed"
            path = self._cache.path(self._shards[name]).name
            told = f"has a damaged shard, {path} ({damage}): it is {what} and read from {self._source.folder}"
            self._warn("damage", told, _SHOWN)
        if time.monotonic() - self._swept < _SWEEP_SECONDS:
            return
        self._swept, used = time.monotonic(), self.used.copy()
        self.used.difference_update(used)
        for name, copy in list(self.copies.items()):
            if copy.is_removed():
                self.copies.pop(name, None)
            elif name in used:
                copy.touch()

    def _is_out_of_files(self) -> bool:
        if len(self.copies) < self._most:
            return False
        share = f"{self._most} of {len(self._shards)} shards"
        self._warn("files", f"is used for {share}, as the system allows no more open files (ulimit -Hn)")
        return True

    def _warn(self, kind: str, what: str, times: int = 1) -> None:
        """Warn of one kind of thing not more often than that; of the folder as a whole, one process of the node."""
        self._warned[kind] += 1
        if self._warned[kind] <= times and (kind == "damage" or os.environ.get("LOCAL_RANK", "0") == "0"):
            _log.warning(f"data.cache {self._cache.folder} on {socket.gethostname()} {what}.")


def allow_open_copies(shards: int) -> int:
    """Raise the soft limit on open files as far as it goes; returns how many copies may be open beside the source's shards."""
    return max(0, allow_more_files(shards) - shards - len(os.listdir("/proc/self/fd")))
