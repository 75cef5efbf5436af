"""A shard set's samples one by one, as PyTorch's map-style data sets give them."""

from __future__ import annotations

import io
import pickle
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from pipeline import ImageLoader
from pipeline.errors import UserError
from pipeline.shards.shard_set import ShardSet
from support.batches import SAMPLES, SMALL

ALONE = {**SMALL, "rank": 0, "world_size": 1}


def test_random_access(digits_shards: Path, copied_shards: Path) -> None:
    """Guards against another sample's image or label, also in workers of a DataLoader that are started anew."""
    loader = ImageLoader(digits_shards, batch_size=48, augment={}, seed=7, **ALONE)
    data, shards = loader.random_access, ShardSet(digits_shards, "train")
    loader.close()
    copy = pickle.loads(pickle.dumps(data))
    assert len(data) == len(copy) == SAMPLES
    for at in (0, 700, -1):
        (image, label), (again, _) = data[at], copy[at]
        index = at % SAMPLES
        expected = np.asarray(Image.open(io.BytesIO(shards.read(index).tobytes())).convert("RGB"))
        assert torch.equal(image, again) and np.array_equal(image.permute(1, 2, 0), expected)
        assert label == shards.samples["label"][index] and type(label) is int
    with pytest.raises(IndexError):
        data[SAMPLES]
    labelled = ImageLoader(copied_shards, batch_size=48, augment={}, seed=7, labels=np.ones((SAMPLES, 2)), **ALONE)
    with next(copied_shards.glob("train-*0.tar")).open("r+b") as tar:
        tar.seek(int(shards.samples["offset"][3]))
        tar.write(b"\0" * 8)
    with pytest.raises(UserError, match="checksum.*: restore the file"):
        labelled.random_access[3]
    assert labelled.random_access[0][1].tolist() == [1, 1]
    assert 3 not in np.concatenate([batch.samples for batch in labelled]) and set(labelled.bad_samples) == {3}
    labelled.close()
