"""ImageLoader gives the training stream to any loop: the same images, each once in an epoch, on any number of processes."""

from __future__ import annotations

import gc
import json
import threading
from dataclasses import replace
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch

from pipeline import ImageLoader
from pipeline.config import AugmentConfig, DataConfig
from pipeline.errors import UserError
from pipeline.loader.epochs import EpochBatches
from pipeline.loader.loader import Loader
from pipeline.shards.shard_set import ShardSet
from support.batches import SAMPLES, SMALL, train_batches

CPU = torch.device("cpu")
MIXED = {"rand_augment_ops": 2, "erasing": 0.25, "mixup": 0.8, "cutmix": 1.0, "mix_group": 4}


def ranks_of(shards: Path, world_size: int, batch_size: int, **options) -> list[ImageLoader]:
    options = {**SMALL, "augment": {}, "seed": 7, **options}
    return [
        ImageLoader(shards, batch_size=batch_size, rank=rank, world_size=world_size, **options) for rank in range(world_size)
    ]


def closed(loaders: list[ImageLoader]) -> None:
    for loader in loaders:
        loader.close()


def test_a_state_moves_from_2_to_3_to_1_processes(digits_shards: Path) -> None:
    """Guards against samples that are lost or shown twice where a state is loaded on other processes, and against images that depend
    on where it was saved: the main promise of the loader."""
    reference = Loader(
        train_batches(ShardSet(digits_shards, "train"), global_batch=48, micro_batch=48, image_size=32), DataConfig(), CPU
    )
    expected: dict[tuple[int, int], torch.Tensor] = {}
    while max((epoch for epoch, _ in expected), default=0) < 3:
        batch = next(reference)
        expected |= {
            key: image for key, image in zip(zip(batch.request.epoch.tolist(), batch.request.index.tolist()), batch.images)
        }
    reference.close()

    shown: dict[int, list[np.ndarray]] = {}
    state = None
    # Processes, images in a batch, and steps: within an epoch, over its end, to its very end.
    for world_size, batch_size, steps in ((2, 24, 10), (3, 16, 12), (1, 40, 40), (3, 20, 5), (2, 10, None)):
        loaders = ranks_of(digits_shards, world_size, batch_size)
        for loader in loaders if state else ():
            loader.load_state_dict(json.loads(json.dumps(state)))  # plain values
        taken = 0
        while loaders[0].epoch < 3 and taken != steps:
            epoch = loaders[0].epoch
            for batches in zip(*loaders, strict=True):  # as many batches on every rank
                for batch in batches:
                    images, labels = batch
                    assert images.shape[1:] == (3, 32, 32) and len(images) == len(labels) == len(batch.samples) <= batch_size
                    assert taken or len(images) == batch_size
                    shown.setdefault(epoch, []).append(batch.samples)
                    for sample, image in zip(batch.samples.tolist(), images):
                        assert torch.equal(image, expected[epoch, sample])
                states = [loader.state_dict() for loader in loaders]
                assert states[1:] == states[:-1]
                taken += 1
                if taken == steps:
                    break
        state = loaders[0].state_dict()
        closed(loaders)
    assert state["epoch"] == 3 and state["position"] == 0 and sorted(shown) == [0, 1, 2]
    for samples in shown.values():
        assert np.array_equal(np.sort(np.concatenate(samples)), np.arange(SAMPLES))


def test_the_batches_are_those_of_a_run(digits_shards: Path) -> None:
    """Guards against other augmentation, mixing or labels than a training run has, on one process and on two."""
    augment = AugmentConfig(**MIXED, repeats=2)
    source = train_batches(ShardSet(digits_shards, "train"), global_batch=48, micro_batch=48, image_size=32, augment=augment)
    run = Loader(source, DataConfig(), CPU)
    alone, *pair = ranks_of(digits_shards, 1, 48, augment=augment.model_dump()) + ranks_of(
        digits_shards, 2, 24, augment={**MIXED, "repeats": 2}
    )
    for whole, *halves in zip(alone, *pair):
        batch, joined = next(run), [torch.cat([half[part] for half in halves]) for part in (0, 1)]
        if len(whole.samples) < 48:
            break
        assert torch.equal(whole[0], batch.images) and torch.equal(whole[0], joined[0])
        assert torch.equal(whole[1], batch.labels) and torch.equal(whole[1], joined[1])
        soft = torch.zeros(48, 10)
        for i, (own, other, weight) in enumerate(zip(batch.labels, batch.other_labels, batch.weight)):
            soft[i, own] += weight
            soft[i, other] += 1 - weight
        torch.testing.assert_close(whole.mixed, soft)
        torch.testing.assert_close(torch.cat([half.mixed for half in halves]), soft)
    closed([alone, *pair])
    run.close()


@pytest.mark.parametrize(
    "augment", [{}, {"mixup": 1.0, "mix_group": 4}, {"repeats": 3}, {"mixup": 1.0, "repeats": 2, "mix_group": 4}]
)
def test_ranks_keep_pace_and_share_what_is_left(augment: dict, digits_shards: Path) -> None:
    """Guards against a rank that has a batch less than the others, for which their collectives would wait for ever."""
    shards, settings = ShardSet(digits_shards, "train"), AugmentConfig(**augment)
    for world_size in (1, 3, 7):
        for size in (8, 20):
            for begin in (0, 840, 1400):
                ranks = [
                    EpochBatches(
                        shards=shards,
                        seed=1,
                        image_size=32,
                        global_batch_size=world_size * size,
                        batch_size=size,
                        rank=rank,
                        world_size=world_size,
                        data=DataConfig(),
                        augment=settings,
                        epoch=2,
                        begin=begin,
                    )
                    for rank in range(world_size)
                ]
                length, steps = ranks[0].epoch_length, ranks[0].steps(begin)
                if begin >= length:
                    continue
                assert sum(steps) == length - begin and all(0 < step <= world_size * size for step in steps)
                seen = []
                for i in [*range(len(steps))][-3:]:
                    requests = [rank.request(i) for rank in ranks]
                    seen += [request.position[request.valid] for request in requests]
                    if len(steps) > 1:
                        assert all(request.valid.any() for request in requests)
                    assert max(r.valid.sum() for r in requests) - min(r.valid.sum() for r in requests) <= 2 * settings.unit
                    assert all(
                        (np.diff(request.valid.astype(int)) <= 0).all() for request in requests
                    )  # the valid ones come first
                positions = np.sort(np.concatenate(seen))
                assert np.array_equal(positions, np.arange(length - len(positions), length))
                assert ranks[0].place(len(steps)) == (3, 0, ranks[0].steps(0)[0])


@pytest.mark.parametrize(("epoch", "begin"), [(0, 0), (1, 0), (1, 700)])
def test_the_disk_is_told_of_blocks_from_any_place_on(epoch: int, begin: int, digits_shards: Path) -> None:
    """Guards against blocks that are announced late, or all blocks from the first epoch on where a state is loaded in a later one."""
    data = {"order": "block", "block_size": 50, "window_blocks": 4}
    (loader,) = ranks_of(digits_shards, 1, 48, data=data)
    batches = replace(loader._batches, epoch=epoch, begin=begin)
    loader.close()
    announced: set[int] = set()
    first = batches.request(0).index
    for i in range(60):
        for start, count in batches.coming_blocks(i):
            announced |= set(range(start, start + count))
        if i == 0:
            assert len(announced) <= 450, "one window, and what is left over at the end of the set"
        if i >= 9:  # the window that it begins in comes unannounced, and the last one is longer
            assert announced.issuperset(batches.request(i).index.tolist()), i
    assert len(np.unique(first)) == 48


def test_memory_threads_and_descriptors_stay_flat_and_are_given_back(digits_shards: Path) -> None:
    """Guards against a loader that grows with its batches or its restarts, and against one that keeps files open when it is closed."""
    process = psutil.Process()

    def held() -> tuple[int, int]:
        return process.num_fds(), threading.active_count()

    with ImageLoader(digits_shards, batch_size=32, augment="deit", **SMALL):
        pass  # whatever libraries keep from the first use
    for loader in ranks_of(digits_shards, 1, 32):
        next(iter(loader))
        loader.close()
    gc.collect()
    gc.disable()  # nothing is left to a collection
    before = held()
    loader = ImageLoader(digits_shards, batch_size=32, augment="deit", **SMALL)
    seen = []
    for _ in range(4):
        assert len(list(map(len, loader))) == 45
        seen.append((*held(), process.memory_info().rss))
    for _ in range(3):  # left early
        loader.load_state_dict(loader.state_dict())  # begins anew
        next(iter(loader))
        seen.append((*held(), process.memory_info().rss))
    descriptors, threads, memory = zip(*seen)
    assert set(descriptors[1:]) == {descriptors[1]} and max(memory) < memory[1] + (32 << 20)
    assert max(threads) <= before[1] + 4 + 1 + 1  # that read, as many as are needed; one that finishes batches; SMALL's one
    loader.close()
    assert held() == before
    gc.enable()
    loader.close()
    for use in (lambda: next(iter(loader)), lambda: loader.random_access, lambda: loader.load_state_dict(loader.state_dict())):
        with pytest.raises(UserError, match="^this ImageLoader is closed: make a new one.$"):
            use()


def test_epochs_are_counted(digits_shards: Path) -> None:
    """Guards against images that are skipped or repeated by a loop that is left early, or one that takes as many batches as there are."""
    (loader,) = ranks_of(digits_shards, 1, 500)
    assert len(loader) == 3 and loader.epoch == 0
    orders = [np.concatenate([batch.samples for batch in loader]) for _ in range(2)]
    assert loader.epoch == 2 and not np.array_equal(*orders)
    first = next(iter(loader))
    state = loader.state_dict()
    assert loader.epoch == 2 and state["position"] == 500
    iterator = iter(loader)
    rest = [next(iterator) for _ in range(2)]  # not to its end, as loops that count batches do
    assert loader.epoch == 3 and len(list(loader)) == 3 and loader.epoch == 4 and list(iterator) == []
    loader.load_state_dict(state)
    again = list(loader)
    for samples in (rest, again):
        assert np.array_equal(np.sort(np.concatenate([batch.samples for batch in [first, *samples]])), np.arange(SAMPLES))
    loader.close()
    (plain,) = ranks_of(digits_shards, 1, 500, shuffle=False, augment=None, drop_last=True)
    assert [batch.samples.tolist() for batch in plain] == [list(range(500)), list(range(500, 1000))]
    assert len(plain) == 2
    plain.close()


def test_samples_come_as_often_as_their_weights_say(digits_shards: Path) -> None:
    """Guards against samples that come too often or never, against weights that depend on the processes, and against another order
    where all weights are equal."""
    shards = ShardSet(digits_shards, "train")
    classes = shards.samples["label"].astype(int)
    weights = np.random.default_rng(0).pareto(1.0, SAMPLES)
    weights[::7] = 0
    due = weights * SAMPLES / weights.sum()

    def shown(epochs: int, **options) -> np.ndarray:
        (loader,) = ranks_of(digits_shards, 1, 100, image_size=8, **options)
        batches = replace(loader._batches, batch_size=SAMPLES, global_batch_size=SAMPLES)
        loader.close()
        return np.stack([batches.request(epoch).index for epoch in range(epochs)])

    weighted = shown(40, sampling=weights)
    counts = np.stack([np.bincount(index, minlength=SAMPLES) for index in weighted])
    assert (counts >= np.floor(due)).all() and (counts <= np.ceil(due)).all() and (counts[:, ::7] == 0).all()
    assert np.abs(counts.mean(axis=0) - due).max() < 0.1  # independent draws: 0.3
    assert not np.array_equal(weighted[0], weighted[1])
    assert np.array_equal(shown(2, sampling=np.full(SAMPLES, 0.3)), shown(2))
    of_classes = np.stack([np.bincount(classes[index]) for index in shown(2, sampling="balanced", labels=classes)])
    assert of_classes.min() >= 143 and of_classes.max() <= 144, "of 1438 images"
    assert np.bincount(classes).max() > 144
    pair = ranks_of(digits_shards, 2, 100, image_size=8, sampling=weights)
    parts = [[loader._batches.request(i) for loader in pair] for i in range(len(pair[0]))]
    assert np.array_equal(np.concatenate([r.index[r.valid] for step in parts for r in step]), weighted[0])
    state = pair[0].state_dict()
    closed(pair)
    (plain,) = ranks_of(digits_shards, 1, 100)
    with pytest.raises(UserError, match="the state must be of a loader with weights None"):
        plain.load_state_dict(state)
    plain.close()


def test_labels_of_ones_own_a_transform_and_mixed_targets(digits_shards: Path) -> None:
    """Guards against labels of other samples, and partners' labels that are not mixed as the images are."""
    classes = ShardSet(digits_shards, "train").samples["label"].astype(int)
    options = {"augment": {"mixup": 0.8, "cutmix": 1.0, "mix_group": 4}, "seed": 7}
    vectors = np.eye(10, dtype=np.float64)[classes] * 3 + 1
    loaders = [
        *ranks_of(digits_shards, 1, 48, **options),
        *ranks_of(digits_shards, 1, 48, labels=vectors, **options),
        *ranks_of(
            digits_shards, 1, 48, labels=classes.tolist(), mixed_targets=True, transform=lambda x: x.mean((2, 3)), **options
        ),
        *ranks_of(digits_shards, 1, 48, labels=classes / 2, **options),
    ]
    for plain, vector, mixed, number in zip(*loaders):
        images, labels = plain
        assert labels.tolist() == classes[plain.samples].tolist() and torch.equal(images, vector[0])
        assert torch.equal(vector[1], torch.from_numpy(vectors[plain.samples]).float())
        torch.testing.assert_close(vector.mixed, plain.mixed * 3 + 1)
        assert torch.equal(mixed[1], plain.mixed) and torch.equal(mixed[0], images.mean((2, 3)))
        torch.testing.assert_close(number.mixed, (plain.mixed * torch.arange(10)).sum(1) / 2)
        assert (plain.mixed.max(dim=1).values < 1).any() and type(plain)(list(plain)) == plain
    closed(loaders)
