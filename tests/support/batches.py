"""Batches of small trainings."""

from __future__ import annotations

import pytest
import torch

from pipeline.config import AugmentConfig, DataConfig
from pipeline.loader.batches import TrainBatches
from pipeline.loader.probe import decoding_verdict
from pipeline.shards.shard_set import ShardSet

SAMPLES = 1438  # of the digits' train split
SMALL = {"image_size": 32, "threads": 1, "device": "cpu"}  # options of an ImageLoader


def train_batches(
    shards: ShardSet,
    *,
    global_batch: int,
    micro_batch: int,
    rank: int = 0,
    world_size: int = 1,
    image_size: int = 64,
    seed: int = 7,
    data: DataConfig | None = None,
    augment: AugmentConfig | None = None,
) -> TrainBatches:
    """The micro-batches of one rank."""
    return TrainBatches(
        shards=shards,
        seed=seed,
        image_size=image_size,
        global_batch_size=global_batch,
        batch_size=micro_batch,
        rank=rank,
        world_size=world_size,
        data=data or DataConfig(),
        augment=augment or AugmentConfig(),
    )


def form_of_gpu(shards: ShardSet) -> str:
    """In which form the first GPU decodes a set; a test for a GPU that does not decode is skipped."""
    form, reason = decoding_verdict(shards, torch.device("cuda", 0))
    if form == "cpu":
        pytest.skip(reason)
    return form
