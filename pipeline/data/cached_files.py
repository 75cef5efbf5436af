"""A shard set's files, read from the cache of the node where it has them and from their source where it has not.

Results do not depend on the cache: a sample's checksum is compared whichever of the two it comes from. A thread of each process
fetches what is missing; the locks of :mod:`pipeline.data.shard_cache` let the processes of a node share that work. Reading never
waits for it, and whatever is wrong with the cache is a warning.
"""

from __future__ import annotations

import logging
import os
import resource
import socket
import threading
import time
import weakref
from collections import Counter, deque
from collections.abc import Iterator
from contextlib import suppress
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from pipeline.data.manifest import ShardInfo, ShardManifest
from pipeline.data.shard_cache import GIB, CachedShard, ShardCache, Unclaimed
from pipeline.data.shard_fetch import CacheFault, SourceFault, Stopped, WrongContent, fetch_shard, find_damage
from pipeline.data.shard_files import ShardFiles
from pipeline.errors import UserError

if TYPE_CHECKING:  # data_prep comes here without a config
    from pipeline.config import DataConfig

_log = logging.getLogger(__name__)

_SWEEP_SECONDS = 30.0  # between two records of what is in use
_ELSEWHERE_SECONDS = 1.0  # until the next look for shards that other processes fetch
_FAULT_SECONDS = 60.0  # until the next try after a fault, or where there was no room
_TRIES = 2  # of a shard whose copy is found damaged, or cannot be opened, again and again
_SHOWN = 3  # warnings of one kind
_OTHER_FILES = 256  # for everything else: libraries, sockets, logs, checkpoints


class CachedFiles:
    """:class:`~pipeline.data.shard_files.ShardFiles` with a cache before them.

    A run does not remove its own shards to make room: an epoch reads each sample once, in an order of its own, so that any part of
    the set that stays serves as many reads as another, and one that changes has to be fetched besides.

    Args:
        source: the files.
        cache: of the node.
        shards: of the split, from the manifest.
        samples: (n,) of ``SAMPLE_DTYPE``, the split's table.

    Raises:
        UserError: the cache is the source's folder.
    """

    def __init__(self, source: ShardFiles, cache: ShardCache, shards: list[ShardInfo], samples: np.ndarray) -> None:
        with suppress(OSError):
            if os.path.samefile(cache.folder, source.folder):
                raise UserError(
                    f"data.cache {cache.folder} is the folder of the shards themselves, another one needed",
                    "set it to a folder on a disk of the node, or to null",
                )
        self.source, self.cache = source, cache
        self._bytes = {shard.file: shard.bytes for shard in shards}
        self._filler = _Filler(source, cache, shards, samples)
        self._copies = self._filler.copies
        self._thread: threading.Thread | None = None
        self._starting = threading.Lock()
        weakref.finalize(self, self._filler.stop)

    @property
    def folder(self) -> Path:
        return self.source.folder

    def manifest(self) -> ShardManifest:
        return self.source.manifest()

    def expect(self, name: str, size: int, remedy: str) -> None:
        self.source.expect(name, size, remedy)

    def will_open(self, count: int) -> None:
        self.source.will_open(count)

    def whole(self, name: str) -> Path:
        return self.source.whole(name)

    def read(self, name: str, offset: int, size: int) -> bytes:
        copy = self._copies.get(name)
        if copy is not None:
            with suppress(OSError):
                data = copy.read(offset, size)
                if len(data) == min(size, max(0, self._bytes[name] - offset)):
                    self._filler.used.add(name)
                    return data
            self._filler.suspect(name)
        self.fill()
        return self.source.read(name, offset, size)

    def will_need(self, name: str, begin: int, size: int) -> None:
        copy = self._copies.get(name)
        if copy is not None:
            copy.advise(begin, size)
            return
        self._filler.announced.append(name)
        self.fill()
        self.source.will_need(name, begin, size)

    def forget_if_replaced(self, name: str) -> None:
        if name in self._copies:
            self._filler.suspect(name)  # the next read is from the source
        else:
            self.source.forget_if_replaced(name)

    def fill(self) -> None:
        """Begin to fetch what is missing, in a thread. Returns immediately."""
        if self._thread is None:
            with self._starting:
                if self._thread is None:
                    self._thread = threading.Thread(target=self._filler.run, name="shard cache", daemon=True)
                    self._thread.start()

    def close(self) -> None:
        """Stop fetching."""
        self._filler.stop()
        if self._thread:
            self._thread.join()


class _Filler:
    """What the thread does. It does not refer to :class:`CachedFiles`, so that one that is dropped ends it."""

    def __init__(self, source: ShardFiles, cache: ShardCache, shards: list[ShardInfo], samples: np.ndarray) -> None:
        self._source, self._cache, self._samples = source, cache, samples
        self._shards = {shard.file: shard for shard in shards}
        ends = list(accumulate(shard.samples for shard in shards))
        self._rows = {shard.file: slice(end - shard.samples, end) for shard, end in zip(shards, ends)}
        self.copies: dict[str, CachedShard] = {}  # name of the shard -> its copy, which reads use
        self.used: set[str] = set()  # since the last sweep
        self.announced: deque[str] = deque(maxlen=4 * len(shards) + 64)  # to be read soon
        self._suspects: dict[str, CachedShard] = {}  # copies that gave other bytes than they should
        self._failures: Counter[str] = Counter()  # of a shard's copies
        self._warned: Counter[str] = Counter()
        self._stop, self._wake = threading.Event(), threading.Event()
        self._swept = time.monotonic()
        self._most = _allow_open_files(len(shards))
        for name in self._shards:
            if not self._is_out_of_files():
                self._open(name)

    def stop(self) -> None:
        self._stop.set()
        self._wake.set()

    def suspect(self, name: str) -> None:
        """Read a shard from its source until its copy was examined."""
        copy = self.copies.pop(name, None)
        if copy is not None:
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
        for name in self._in_order():
            self._look_after()
            if name in self.copies or self._failures[name] >= _TRIES or self._is_out_of_files() or self._open(name) or not room:
                continue
            try:
                hindrance = self._fetch(name)
            except CacheFault as fault:
                self._warn("cache", f"cannot be filled ({fault}): shards that it lacks are read from {self._source.folder}")
                room = False
            except SourceFault as fault:
                self._warn("source", f"could not fetch {self._source.folder / name} ({fault}); that is tried again")
                room = False
            except WrongContent as fault:
                self._failures[name] += 1
                self._warn("content", f"does not take {self._source.folder / name}, which is damaged itself ({fault})", _SHOWN)
            else:
                if hindrance is Unclaimed.ELSEWHERE:
                    pause = _ELSEWHERE_SECONDS
                elif hindrance is Unclaimed.NO_ROOM:
                    self._warn("room", self._no_room())
                    room = False
                elif not self._open(name):  # removed again at once, or another user's and not readable
                    self._failures[name] += 1
        return pause if room else max(pause, _FAULT_SECONDS)

    def _in_order(self) -> Iterator[str]:
        """The names of all shards; those that were announced come first, also while this goes on."""
        for name in self._shards:
            while self.announced:
                yield self.announced.popleft()
            yield name

    def _fetch(self, name: str) -> Unclaimed | None:
        shard = self._shards[name]
        return fetch_shard(self._cache, self._source, shard, self._samples[self._rows[name]], self._go_on)

    def _go_on(self, _: int) -> bool:
        self._look_after()
        return not self._stop.is_set()

    def _open(self, name: str) -> bool:
        """Use a shard's copy if there is one."""
        try:
            copy = self._cache.open(self._shards[name])
        except OSError as error:
            self._warn(
                "open", f"has a shard that cannot be opened ({error.filename}: {error.strerror}); it is read from its source"
            )
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
            self._warn(
                "damage", f"has a damaged shard, {path} ({damage}): it is {what}, and read from {self._source.folder}", _SHOWN
            )
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
        self._warn(
            "files",
            f"is used for {self._most} of {len(self._shards)} shards, as the system allows no more open files (ulimit -Hn)",
        )
        return True

    def _no_room(self) -> str:
        missing = [shard for name, shard in self._shards.items() if name not in self.copies]
        size = sum(shard.bytes for shard in missing) / GIB
        limit = "" if self._cache.limit is None else f" within data.cache_gib {self._cache.limit / GIB:g}"
        return (
            f"has no room{limit} for {len(missing)} of {len(self._shards)} shards of {self._source.folder} ({size:.3g} GiB), "
            f"which are read from there"
        )

    def _warn(self, kind: str, what: str, times: int = 1) -> None:
        """Warn of one kind of thing not more often than that; of the folder as a whole, one process of the node."""
        self._warned[kind] += 1
        if self._warned[kind] <= times and (kind == "damage" or os.environ.get("LOCAL_RANK", "0") == "0"):
            _log.warning(f"data.cache {self._cache.folder} on {socket.gethostname()} {what}.")


def cache_of(config: DataConfig) -> ShardCache | None:
    """The cache that a config asks for."""
    if config.cache is None:
        return None
    return ShardCache(Path(config.cache), None if config.cache_gib is None else round(config.cache_gib * GIB))


def _allow_open_files(shards: int) -> int:
    """Raise the soft limit on open files as far as it goes; returns how many copies may be open beside everything else."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    soft = soft + shards if hard == resource.RLIM_INFINITY else min(soft + shards, hard)
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    return max(0, soft - _OTHER_FILES - shards - len(os.listdir("/proc/self/fd")))
