"""What a dry run says of ``data.cache``, of which a training only warns: whether the node can write it, and what fits into it."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterable
from pathlib import Path

from pipeline.config import Config
from pipeline.data.cached_files import cache_of, check_cache
from pipeline.data.mixed_set import MixedSet
from pipeline.data.shards import ShardSet
from pipeline.errors import UserError


def check_cache_room(config: Config, sets: Iterable[ShardSet | MixedSet]) -> str | None:
    """Look at the cache on this node, and write nothing.

    Args:
        config: of the run.
        sets: that are read, opened without a cache.

    Returns:
        How much of the shards is there and fits; None without a cache.

    Raises:
        UserError: the folder cannot be written on this node, is that of the shards, or has no room for one of them.
    """
    cache = cache_of(config.data)
    if cache is None:
        return None
    parts = [part for each in sets for part in (each.sets if isinstance(each, MixedSet) else [each])]
    for part in parts:
        check_cache(cache, part.files, "data.cache")
    folder, host = cache.folder, socket.gethostname()
    if why := _refusal(folder):
        raise UserError(
            f"data.cache {folder} cannot be used on {host}: {why}",
            "have it made on every node, choose another folder, or leave data.cache out",
        )
    shards = {cache.path(shard): shard.bytes for part in parts for shard in part.info.shards}
    wanted, largest = sum(shards.values()), max(shards.values())
    there = sum(size for path, size in shards.items() if path.is_file() and path.stat().st_size == size)
    room = cache.room()
    if room < largest:
        limit = "" if cache.limit is None else f"; data.cache_gib={config.data.cache_gib:g}"
        raise UserError(
            f"data.cache {folder} on {host} has room for {max(room, 0) / 1e9:,.2f} GB of shards, {largest / 1e9:,.2f} GB needed "
            f"for one of them (the last {cache.keep_free:.0%} of the disk stay free{limit})",
            "free some space, or choose another folder",
        )
    fits = "all of it fits" if room >= wanted else f"{room / 1e9:,.2f} GB fit, the rest is read from data.path"
    return f"{folder} on {host}: {there / 1e9:,.2f} of {wanted / 1e9:,.2f} GB there; {fits}"


def _refusal(folder: Path) -> str:
    """Why shards cannot be written into a folder, which is made if the one that it is in is there; empty if they can."""
    if folder.exists():
        if not folder.is_dir():
            return "it is no folder"
        return "" if os.access(folder, os.W_OK | os.X_OK) else "it cannot be written to"
    if not folder.absolute().parent.is_dir():
        return f"{folder.absolute().parent} does not exist"
    return "" if os.access(folder.absolute().parent, os.W_OK | os.X_OK) else f"{folder.absolute().parent} cannot be written to"
