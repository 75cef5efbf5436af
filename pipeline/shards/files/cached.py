"""Read a shard set from the cache of the node where it has the shards, and from their source where it has not.

Results do not depend on the cache: a sample's checksum is compared whichever of the two it comes from. A thread of each process
fetches what is missing; the locks of :mod:`pipeline.shards.files.cache` let the processes of a node share that work. Reading never
waits for it, and whatever is wrong with the cache is a warning.
"""

import os
import threading
import weakref
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from pipeline.errors import UserError
from pipeline.hardware import GIB
from pipeline.shards.files.cache import ShardCache
from pipeline.shards.files.cache_filler import Filler
from pipeline.shards.files.local import Range, ShardFiles
from pipeline.shards.manifest import ShardInfo

if TYPE_CHECKING:  # data_prep comes here without a config
    from pipeline.config import DataConfig


class CachedFiles(ShardFiles):
    """The files of a shard set, behind a cache.

    A run does not remove its own shards to make room: an epoch reads each sample once, in an order of its own, so that any part of
    the set that stays serves as many reads as another, and one that changes has to be fetched besides. Raises UserError: the
    cache is the source's folder.
    """

    def __init__(self, source: ShardFiles, cache: ShardCache, shards: list[ShardInfo], samples: np.ndarray) -> None:
        check_cache(cache, source, "data.cache")
        self.source, self.cache = source, cache
        self.folder, self.repeats = source.folder, source.repeats
        self._bytes = {shard.file: shard.bytes for shard in shards}
        self._filler = Filler(source, cache, shards, samples)
        self._copies = self._filler.copies
        self._thread: threading.Thread | None = None
        self._starting = threading.Lock()
        weakref.finalize(self, self._filler.stop)

    def read(self, name: str, offset: int, size: int) -> bytes | memoryview:
        data = self._from_cache(name, offset, size)
        return self.source.read(name, offset, size) if data is None else data

    def read_many(self, ranges: list[Range]) -> Iterable[bytes | memoryview | OSError]:
        found = [self._from_cache(*wanted) for wanted in ranges]
        rest = iter(self.source.read_many([wanted for wanted, data in zip(ranges, found) if data is None]))
        return (next(rest) if data is None else data for data in found)

    def will_need(self, ranges: list[Range]) -> None:
        """Read copies ahead, and fetch shards without a copy next."""
        lacking = []
        for name, begin, size in ranges:
            if copy := self._copies.get(name):
                copy.advise(begin, size)
            else:
                self._filler.announced.append(name)
                lacking.append((name, begin, size))
        if lacking:
            self.fill()
            self.source.will_need(lacking)

    def forget_if_replaced(self, name: str) -> None:
        if name in self._copies:
            self._filler.suspect(name)  # the next read is from the source
        else:
            self.source.forget_if_replaced(name)

    def take_counts(self) -> dict[str, int] | None:
        return self.source.take_counts()

    def close(self) -> None:
        self._filler.stop()
        if self._thread:
            self._thread.join()

    def _from_cache(self, name: str, offset: int, size: int) -> bytes | None:
        """Bytes of a copy; None if there is none, or it has not all of them."""
        self.fill()  # also with a full cache: the thread records what is in use
        if copy := self._copies.get(name):
            with suppress(OSError):
                data = copy.read(offset, size)
                if len(data) == min(size, max(0, self._bytes[name] - offset)):
                    self._filler.used.add(name)
                    return data
            self._filler.suspect(name)
        return None

    def fill(self) -> None:
        """Begin to fetch what is missing and to look after what is there, in a thread. Returns immediately."""
        if self._thread is None:
            with self._starting:
                if self._thread is None:
                    self._thread = threading.Thread(target=self._filler.run, name="shard cache", daemon=True)
                    self._thread.start()


def cache_of(config: "DataConfig") -> ShardCache | None:
    if config.cache is None:
        return None
    return ShardCache(Path(config.cache), None if config.cache_gib is None else round(config.cache_gib * GIB))


def check_cache(cache: ShardCache, source: ShardFiles, name: str) -> None:
    """Check that a cache is not its source's own folder; if it is, a ``UserError`` that names the setting."""
    with suppress(OSError):
        if os.path.samefile(cache.folder, source.folder):
            problem = f"{name} must not be the folder of the shards themselves, got {cache.folder}"
            raise UserError(problem, "choose a folder on a disk of the node")
