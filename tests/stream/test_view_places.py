"""Repeated augmentation: the places of an image's views, the same on any number of processes."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from pathlib import Path

import numpy as np
import pytest

from pipeline.augment import mixing
from pipeline.config import AugmentConfig, DataConfig
from pipeline.loader.batches import TrainBatches
from pipeline.shards.shard_set import ShardSet
from pipeline.stream.order import Placing, epoch_length
from support.batches import train_batches

FULL, BLOCK = DataConfig(), DataConfig(order="block", block_size=50, window_blocks=4)
EVERYTHING = AugmentConfig(rand_augment_ops=2, erasing=0.25, mixup=0.8, cutmix=1.0, mix_group=6, repeats=3)


def batches_of(
    shards: ShardSet,
    augment: AugmentConfig,
    rank: int = 0,
    world_size: int = 1,
    micro_batch: int = 48,
    data: DataConfig = FULL,
) -> TrainBatches:
    split = {"rank": rank, "world_size": world_size, "micro_batch": micro_batch}
    return train_batches(shards, global_batch=48, data=data, augment=augment, **split)


def global_batch(shards: ShardSet, step: int, world_size: int, micro_batch: int) -> dict[str, np.ndarray]:
    """All that is drawn for the images of a step, in the order of the global batch: name -> (48 or its groups, ...)."""
    by_rank = [batches_of(shards, EVERYTHING, rank, world_size, micro_batch, BLOCK) for rank in range(world_size)]
    per_step = by_rank[0].batches_per_step
    parts = [dict(_arrays(batches.request(step * per_step + part))) for part in range(per_step) for batches in by_rank]
    return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}


def _arrays(values: object, prefix: str = "") -> Iterator[tuple[str, np.ndarray]]:
    for field in fields(values):
        value = getattr(values, field.name)
        if is_dataclass(value):
            yield from _arrays(value, f"{prefix}{field.name}.")
        elif isinstance(value, dict):
            for augmentation, draw in value.items():
                yield from _arrays(draw, f"{type(augmentation).__name__}.")
        elif isinstance(value, np.ndarray):
            yield prefix + field.name, value


def test_views_are_as_far_apart_as_arithmetic_allows() -> None:
    """Guards against views that meet in a micro-batch where a step begins or ends in the middle of an image, or an epoch ends in it;
    against a slot that depends on which others are asked for."""
    rng = np.random.default_rng(0)
    formula = 0
    for _ in range(2000):
        size, views, length = int(rng.integers(1, 60)), int(rng.integers(2, 9)), int(rng.integers(1, 200))
        step, case = int(rng.integers(0, 50)), (size, views, length)
        placing = Placing(size, views, length, 1)
        positions = placing.positions(step, np.arange(size))
        assert np.array_equal(np.sort(positions), step * size + np.arange(size)), (*case, step)
        some = rng.permutation(size)[:5]
        assert np.array_equal(placing.positions(step, some), positions[some])
        epoch, position = np.divmod(positions, length)
        slot_of: dict[tuple[int, int], int] = {}
        for slot, image in enumerate(zip(epoch.tolist(), (position // views).tolist())):
            assert slot - slot_of.get(image, -size) >= size // views, (*case, step)
            slot_of[image] = slot
        if size % views == 0 and epoch.min() == epoch.max() and position.min() % views == 0:
            v, i = np.divmod(np.arange(size), size // views)
            assert np.array_equal(positions - step * size, i * views + v), (*case, step)
            formula += 1
    assert formula > 20, "the plain case: view v of the i-th image at slot v G / R + i"


def test_different_images_in_the_micro_batches_of_the_papers() -> None:
    """Guards against a BatchNorm over 43 images instead of 128, and against images mixed with themselves: ImageNet, batch 1,024."""
    length = epoch_length(1_281_167, 3)
    placing = Placing(1024, 3, length, 8)
    for step in (0, 1, 2, 700, 1249, 1250, 1251):  # the first epoch ends with step 1,250
        images = placing.positions(step, np.arange(1024)) % length // 3
        for size in (128, 8):
            assert {len(set(part.tolist())) for part in images.reshape(-1, size)} == {size}, (step, size)


def reference_repeated_epoch(order: np.ndarray, repeats: int, world_size: int, rank: int) -> list[int]:
    """DeiT's RASampler: what one process reads in an epoch whose images come in this order."""
    repeated = np.repeat(order, repeats)
    total = math.ceil(len(order) * repeats / world_size) * world_size
    repeated = np.concatenate([repeated, repeated[: total - len(repeated)]])
    selected = math.floor(len(order) // 256 * 256 / world_size)
    return repeated[rank:total:world_size][:selected].tolist()


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_repeated_augmentation_reads_what_the_reference_sampler_reads(world_size: int, digits_shards: Path) -> None:
    """Guards against another epoch length, other images in a step, or views that are the same crop: 1,438 images, three views each."""
    shards = ShardSet(digits_shards, "train")
    by_rank = [batches_of(shards, AugmentConfig(repeats=3), rank, world_size, 48 // world_size) for rank in range(world_size)]
    length = by_rank[0].epoch_length
    assert length == epoch_length(1438, 3) == 1280 and epoch_length(1438, 1) == 1438 and epoch_length(100, 3) == 100
    steps = -(-length // 48)
    requests = [batches.request(step) for step in range(steps) for batches in by_rank]
    epoch = np.concatenate([r.epoch for r in requests])
    index = np.concatenate([r.index for r in requests])[epoch == 0]
    position = np.concatenate([r.position for r in requests])[epoch == 0]
    start = np.concatenate([r.geometry.start for r in requests])[epoch == 0]

    full_order = batches_of(shards, AugmentConfig()).request  # without repeats: the epoch's permutation itself
    order = np.concatenate([full_order(step).index for step in range(30)])[:1438]
    reference = [reference_repeated_epoch(order, 3, world_size, rank) for rank in range(world_size)]
    assert sorted(index) == sorted(sample for part in reference for sample in part)
    for step in range(length // 48):  # each global batch too holds the images of the reference's
        part = slice(step * 48 // world_size, (step + 1) * 48 // world_size)
        assert sorted(index[step * 48 : (step + 1) * 48]) == sorted(sample for rank in reference for sample in rank[part])
    in_order = np.argsort(position)[: length // 3 * 3].reshape(-1, 3)
    assert (index[in_order] == order[: len(in_order), None]).all()
    assert (start[in_order[:, 0]] == start[in_order[:, 1]]).all(axis=1).mean() < 0.1


@pytest.mark.parametrize("group", [8, 16, 24, 48])
def test_views_of_one_image_are_never_mixed_with_each_other(group: int, digits_shards: Path) -> None:
    """Guards against Mixup partners that are the same image, also in groups too large to hold different images only."""
    batches = batches_of(ShardSet(digits_shards, "train"), AugmentConfig(repeats=3, mixup=0.8, cutmix=1.0, mix_group=group))
    distances = set()
    for step in range(27):
        request = batches.request(step)
        other, _ = mixing.mixed_labels(request.index, request.drawn(mixing.MixupCutmix))
        assert (other != request.index)[request.epoch == request.epoch.min()].all()
        distances |= set(request.drawn(mixing.MixupCutmix).distance.tolist())
        if group <= 16 and request.epoch.max() == 0:
            assert all(len(set(members)) == group for members in request.index.reshape(-1, group).tolist())
    least = 3 if group > 16 else 1
    assert min(distances) >= least and (group > 16 or distances == set(range(least, group - least + 1)))


def test_a_chain_of_world_sizes_has_the_same_views_at_the_same_slots(digits_shards: Path) -> None:
    """Guards against an elastic resume that trains on other views, or mixes them with others, every number that is drawn, in block order, past the end of an epoch."""
    shards = ShardSet(digits_shards, "train")
    splits = [(1, 48), (1, 12), (2, 24), (2, 6), (4, 12), (4, 6)]
    for step in range(30):
        alone = global_batch(shards, step, 1, 48)
        assert {
            "epoch",
            "position",
            "geometry.start",
            "RandAugment.op",
            "RandomErasing.box",
            "MixupCutmix.distance",
        } <= alone.keys()
        changed = global_batch(shards, step, *splits[step // 5])  # a resume on other processes every five steps
        for name, values in changed.items():
            assert np.array_equal(values, alone[name]), (name, step)
    assert alone["epoch"].max() == 1
