"""Batches of small trainings."""

from __future__ import annotations

from pipeline.config import AugmentConfig, DataConfig
from pipeline.loader.batches import TrainBatches
from pipeline.shards.shard_set import ShardSet


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
