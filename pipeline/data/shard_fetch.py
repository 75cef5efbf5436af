"""Copies one shard from its source into the cache of the node, verified before anybody can open it there."""

from __future__ import annotations

import errno
from collections.abc import Callable
from itertools import accumulate
from pathlib import Path

import numpy as np
from xxhash import xxh3_64_intdigest

from pipeline.data.manifest import ShardInfo
from pipeline.data.shard_cache import Partial, ShardCache, Unclaimed
from pipeline.data.shard_files import ShardFiles
from pipeline.errors import UserError
from pipeline.files import disk_reason

CHUNK = 8 << 20  # bytes of a request to the source: 50 ms of latency cost a third of the time at 100 MB/s


class CacheFault(Exception):
    """The cache cannot be written or locked; the message is the reason."""


class SourceFault(Exception):
    """A shard cannot be had from its source now; the message is the reason."""


class WrongContent(Exception):
    """What the source has is not what the sample table says; the message is the reason."""


class Stopped(Exception):
    """The caller asked to stop. What was fetched is left to be continued."""


def fetch_shard(
    cache: ShardCache, source: ShardFiles, shard: ShardInfo, rows: np.ndarray, go_on: Callable[[int], bool]
) -> Unclaimed | None:
    """Fetch a shard, unless it is there or another process is about it.

    Args:
        cache: of the node.
        source: has the shard.
        shard: its entry in the manifest.
        rows: (n,) of ``SAMPLE_DTYPE``, its rows of the sample table.
        go_on: called with the number of bytes after each step, also with those that an earlier process had fetched; False stops.

    Returns:
        None if the shard was fetched, else why it was not.

    Raises:
        CacheFault, SourceFault, WrongContent, Stopped: see there.
    """
    try:
        partial = cache.claim(shard)
    except OSError as error:
        raise CacheFault(_reason(cache.folder, error)) from None
    if isinstance(partial, Unclaimed):
        return partial
    try:
        continued = partial.begun > 0
        _step(go_on, partial.begun)
        _fill(partial, source, shard, go_on)
        if continued and find_damage(partial.read, rows):  # it was left by a machine that lost power: with zeros, for example
            partial.restart()
            _fill(partial, source, shard, lambda _: go_on(0))
        if damage := find_damage(partial.read, rows):
            partial.discard()
            raise WrongContent(damage)
        partial.publish()
    except OSError as error:
        partial.discard()  # the disk may be full: it is not this file that should fill it
        raise CacheFault(_reason(cache.folder, error)) from None
    finally:
        partial.close()
    return None


def rows_of(shards: list[ShardInfo]) -> dict[str, slice]:
    """Name of each shard -> its rows of the split's sample table."""
    ends = accumulate(shard.samples for shard in shards)
    return {shard.file: slice(end - shard.samples, end) for shard, end in zip(shards, ends)}


def find_damage(read: Callable[[int, int], bytes], rows: np.ndarray) -> str:
    """Compare a shard with its part of the sample table.

    Args:
        read: gives bytes of the shard by offset and size.
        rows: (n,) of ``SAMPLE_DTYPE``.

    Returns:
        What is wrong with the first damaged sample; empty if all are as they were written.

    Raises:
        OSError: from ``read``.
    """
    for place, row in enumerate(rows):
        offset, size = int(row["offset"]), int(row["bytes"])
        data = read(offset, size)
        if len(data) != size:
            return f"sample {place} of it is cut off: {len(data)} of its {size} bytes are there, at offset {offset}"
        checksum = xxh3_64_intdigest(data)
        if checksum != row["checksum"]:
            return f"sample {place} of it has checksum {checksum:016x}, {int(row['checksum']):016x} needed"
    return ""


def _fill(partial: Partial, source: ShardFiles, shard: ShardInfo, go_on: Callable[[int], bool]) -> None:
    while partial.begun < shard.bytes:
        wanted = min(CHUNK, shard.bytes - partial.begun)
        try:
            data = source.read(shard.file, partial.begun, wanted)
        except OSError as error:
            raise SourceFault(f"it cannot be read ({error.strerror or error})") from None
        except UserError as error:
            raise SourceFault(error.problem) from None
        if len(data) != wanted:
            raise SourceFault(f"it ends at {partial.begun + len(data)} of its {shard.bytes} bytes")
        partial.append(data)
        _step(go_on, len(data))


def _step(go_on: Callable[[int], bool], count: int) -> None:
    if not go_on(count):
        raise Stopped


def _reason(folder: Path, error: OSError) -> str:
    if error.errno == errno.ENOENT and not folder.parent.is_dir():
        return f"{folder.parent} does not exist"
    if error.errno == errno.ENOTDIR:
        return "it is no folder"
    return disk_reason(folder / "shard", error)
