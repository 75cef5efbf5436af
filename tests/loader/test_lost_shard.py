"""A whole shard whose samples are bad: each of them is looked at once, and sound images of the batch are not read again for it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from pipeline.loader.reader import BadSamples, Reader
from pipeline.shards.shard_set import ShardSet
from support.batches import train_batches


def test_sound_images_are_read_once(copied_shards: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against a batch that is read anew for each of hundreds of substitutes, every image a request to a store."""
    tar = copied_shards / "train-000001.tar"
    tar.write_bytes(bytes(tar.stat().st_size))
    shards, asked = ShardSet(copied_shards, "train"), list[int]()
    read_batch = shards.read_batch
    monkeypatch.setattr(shards, "read_batch", lambda indices: (asked.extend(indices), read_batch(indices))[1])
    bad = BadSamples(shards, len(shards))
    reader = Reader(train_batches(shards, global_batch=32, micro_batch=32), bad, 0, 0)
    read = reader.next()
    reader.close()
    lost = np.flatnonzero(shards.samples["shard"] == 1)
    assert len(bad) > 100 and set(bad.replacement) <= set(lost.tolist()) and read.replaced
    assert not np.isin(read.request.index, lost).any() and len(asked) == len(set(asked)) <= 32 + len(bad) + 1
