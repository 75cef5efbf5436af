"""Copy the shards of a split into the cache of a node, by threads, together with other processes that do the same."""

from __future__ import annotations

import threading
import time
from collections import Counter
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from dataclasses import dataclass, field

from tqdm import tqdm

from data_prep.workers import interrupts_noted
from pipeline.errors import UserError, counted
from pipeline.shards.files.cache import CachedShard, ShardCache, Unclaimed
from pipeline.shards.files.cache_filler import Fault, allow_open_copies, fetch_shard, rows_of
from pipeline.shards.shard_set import ShardSet

_WAIT_SECONDS = 0.2  # until the next look for a shard that another process fetches
_TRIES = 3  # of a shard that its source does not give
_FETCHED, _THERE, _BY_OTHERS, _NO_ROOM = "fetched", "already there", "fetched by another process", "without room"
_OUTCOMES = (_FETCHED, _THERE, _BY_OTHERS, _NO_ROOM)


@dataclass
class Staged:
    """What became of the shards of one split."""

    shards: ShardSet
    cache: ShardCache
    outcomes: dict[int, str] = field(default_factory=dict)  # number of the shard -> one of _OUTCOMES, or why it was not fetched
    seconds: float = 0.0
    kept: list[CachedShard] = field(default_factory=list)  # open, so that nobody removes them before this command ends

    @property
    def failed(self) -> list[str]:
        """Sentences about the shards that could not be fetched."""
        return [outcome for outcome in self.outcomes.values() if outcome not in _OUTCOMES]

    def sentence(self) -> str:
        """A summary in one line."""
        counts, info = Counter(self.outcomes.values()), self.shards.info
        parts = [f"{counts[outcome]} {outcome}" for outcome in _OUTCOMES if counts[outcome] or outcome is _FETCHED]
        if self.failed:
            parts.append(f"{len(self.failed)} could not be fetched ({self.failed[0]})")
        about = f"{counted(len(info.shards), 'shard')} of {self.shards.split}, {sum(shard.bytes for shard in info.shards) / 1e9:.3g} GB"
        rest = f"; training reads the others from {self.shards.folder}" if self.failed or counts[_NO_ROOM] else ""
        return f"{self.cache.folder}: {about}: {', '.join(parts)}{rest} ({self.seconds:.1f} s)"


def stage(shards: ShardSet, cache: ShardCache, workers: int) -> Staged:
    """Fetch the shards of a split that a cache has not.

    Args:
        shards: the split.
        cache: of this node.
        workers: shards to fetch at a time.

    Raises:
        UserError: the cache's folder cannot be written.
    """
    started, info = time.monotonic(), shards.info
    with tqdm(
        total=sum(shard.bytes for shard in info.shards), desc=shards.split, unit="B", unit_scale=True, disable=None
    ) as bar:
        work, numbers = _Work(Staged(shards, cache), bar), list(range(len(info.shards)))
        with interrupts_noted() as raise_if_interrupted, ThreadPoolExecutor(workers) as pool:
            try:
                while numbers:
                    futures = {pool.submit(work.do, number): number for number in numbers}
                    pending, again = set(futures), []
                    while pending:
                        done, pending = wait(pending, _WAIT_SECONDS, FIRST_EXCEPTION)
                        raise_if_interrupted()
                        again += [futures[future] for future in done if not future.result()]
                    numbers = again
                    if numbers:
                        time.sleep(_WAIT_SECONDS)
            except BaseException:
                work.stop.set()
                pool.shutdown(cancel_futures=True)
                raise
    work.result.seconds = time.monotonic() - started
    return work.result


class _Work:
    """The work on each shard, by threads."""

    def __init__(self, result: Staged, bar: tqdm) -> None:
        self.result, self.stop = result, threading.Event()
        self._bar, self._rows = bar, rows_of(result.shards.info.shards)
        self._most = allow_open_copies(len(result.shards.info.shards))
        self._lock = threading.Lock()
        self._waited: set[int] = set()  # shards that another process was fetching
        self._refusals: Counter[int] = Counter()  # of the source

    def do(self, number: int) -> bool:
        """Fetch one shard; False if it is to be tried again later, since another process fetches it or its source refused."""
        shards, cache = self.result.shards, self.result.cache
        shard, came = shards.info.shards[number], 0
        if self._keep(number, _BY_OTHERS if number in self._waited else _THERE):
            return self._advance(shard.bytes)

        def go_on(count: int) -> bool:
            nonlocal came
            came += count
            self._advance(count)
            return not self.stop.is_set()

        try:
            hindrance = fetch_shard(cache, shards.files, shard, shards.samples[self._rows[shard.file]], go_on)
        except Fault as fault:
            if fault.of == "cache":
                remedy = "check the folder, or choose another one on a disk of this node"
                raise UserError(f"--cache {cache.folder} cannot be filled ({fault})", remedy) from None
            self._refusals[number] += 1
            self._advance(-came)
            if fault.of == "source" and self._refusals[number] < _TRIES:
                return False
            self.result.outcomes[number] = f"{shard.file}: {fault}"
            return True
        if hindrance is Unclaimed.NO_ROOM:
            self.result.outcomes[number] = _NO_ROOM
            return True
        if hindrance is None and self._keep(number, _FETCHED):
            return True
        self._advance(-came)
        self._waited.add(number)
        self._refusals[number] += hindrance is Unclaimed.CACHED  # and yet it cannot be opened
        if self._refusals[number] == _TRIES:
            self.result.outcomes[number] = f"{cache.path(shard)} is there, but cannot be used or removed by this user"
            return True
        return False

    def _keep(self, number: int, outcome: str) -> bool:
        """Hold a shard of the cache until the end; False if it is not there."""
        try:
            copy = self.result.cache.open(self.result.shards.info.shards[number])
        except OSError:
            return False
        if copy is None:
            return False
        copy.touch()
        with self._lock:
            if len(self.result.kept) < self._most:
                self.result.kept.append(copy)
        self.result.outcomes[number] = outcome
        return True

    def _advance(self, count: int) -> bool:
        with self._lock:
            self._bar.update(count)
        return True
