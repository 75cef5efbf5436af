"""What a dry run says of the node's cache."""

from __future__ import annotations

from pathlib import Path

import pytest

from pipeline.config import load_config
from pipeline.errors import UserError
from pipeline.shards.shard_set import ShardSet
from pipeline.training.dry_run import check_cache_room
from support.runs import write_small_config


def test_what_fits_is_said_and_nothing_is_written(digits_shards: Path, tmp_path: Path) -> None:
    """Guards against a job that waits for days in a queue and then reads all of its data over the network."""
    config = write_small_config(digits_shards, tmp_path)
    sets = [ShardSet(digits_shards, split) for split in ("train", "val")]

    def check(*overrides: object) -> str | None:
        return check_cache_room(load_config(config, list(map(str, overrides))).data, sets)

    assert check() is None
    cache = tmp_path / "cache"
    said = check(f"data.cache={cache}")
    assert said and said.startswith(f"{cache} on ") and "GB there; all of it fits" in said
    sizes = [shard.bytes for one in sets for shard in one.info.shards]
    half = sum(sizes) / 2 / 2**30
    assert half * 2**30 > max(sizes)
    assert "the rest is read from data.path" in str(check(f"data.cache={cache}", f"data.cache_gib={half}"))
    assert not cache.exists()

    with pytest.raises(UserError, match=r"must have room for one shard, \S+ MB, got 0\.0 MB .*data.cache_gib=1e-06"):
        check(f"data.cache={cache}", "data.cache_gib=0.000001")
    with pytest.raises(UserError, match=rf"data.cache {tmp_path}/no/cache cannot be used on \S+: {tmp_path}/no does not exist"):
        check(f"data.cache={tmp_path}/no/cache")
    with pytest.raises(UserError, match="it is not a folder"):
        check(f"data.cache={config}")
    with pytest.raises(UserError, match=f"data.cache must not be the folder of the shards themselves, got {digits_shards}"):
        check(f"data.cache={digits_shards}")
