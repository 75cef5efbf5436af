"""The stream of samples is what it was: samples, order and every number that is drawn, in all recipes, on any number of ranks."""

from __future__ import annotations

import hashlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pipeline.config import AugmentConfig, DataConfig
from pipeline.loader.batches import TrainBatches
from pipeline.logs.run_files import augmentation_digests
from pipeline.shards.manifest import SAMPLE_DTYPE
from pipeline.stream.samples import Mixture

DEIT = {"rand_augment_ops": 2, "erasing": 0.25, "mixup": 0.8, "cutmix": 1.0, "mix_group": 8}
POSMLP = {"rand_augment_ops": 3, "rand_augment_magnitude": 6, "rand_augment_std": 1.0, "erasing": 0.25, "cutmix": 1.0}
DEIT3 = {"three_augment": True, "color_jitter": 0.3, "mixup": 0.8, "cutmix": 1.0, "mix_group": 8, "repeats": 3}
BLOCK = {"order": "block", "block_size": 16, "window_blocks": 4}
# First half of the SHA-256 of what is drawn; a change here means that runs do not go on with the same images.
STREAM: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "plain": ({}, {}, "c30ea78f0a8c2ae75d6304134f8e12e2"),
    "deit": ({}, DEIT, "e7ba67892707572b2c919f79cf3192b1"),
    "deit, repeats": ({}, {**DEIT, "repeats": 3}, "998fbc0e591b93c6024fc7dfd6ff6e07"),
    "a group of more than one view": ({}, {"mixup": 0.8, "mix_group": 24, "repeats": 5}, "48c49f90951958c68e7c5663d83290ea"),
    "posmlp": ({"train_interpolation": "random"}, POSMLP, "7d97217890abaa55a6757657c39641f1"),
    "deit 3": ({"train_crop": "simple"}, DEIT3, "ec37c2c82ef65278d589a8e6ada9a081"),
    "deit 3, filters": (
        {"train_interpolation": "random", "crop_scale": (0.5, 1.0)},
        {"three_augment": True},
        "d531952dc4673652b765919f34e52da6",
    ),
    "jitter, block order": (
        {"train_interpolation": "bilinear", **BLOCK},
        {"color_jitter": 0.4, "erasing": 0.5},
        "21f842da942b74d5b598c5e4137e636f",
    ),
    "mixture": ({"flip": 0.2}, DEIT, "a1a6d00aac6c9a412521395fec0917af"),
    "mixture, block order": (BLOCK, {"repeats": 2}, "75841cc87490a5a90494fc3606e0714c"),
}


class Images:
    """1,438 images of many sizes, which are never read."""

    def __init__(self, mixture: Mixture | None) -> None:
        self.mixture = mixture
        number = np.arange(1438)
        self.samples = np.zeros(len(number), dtype=SAMPLE_DTYPE)
        self.samples["height"], self.samples["width"] = 20 + number * 37 % 900, 20 + number * 101 % 1300
        self.samples["label"] = number % 10
        self.folder, self.classes = Path("images"), [str(name) for name in range(10)]

    def __len__(self) -> int:
        return len(self.samples)


@pytest.mark.parametrize("name", STREAM)
def test_the_stream_is_what_it_was(name: str) -> None:
    """Guards against a change of sample order, placing, draws or the log's digests: digests of the first version of the stream."""
    data, augment, expected = STREAM[name]
    images: Any = Images(Mixture((1000, 438), (1.0, 0.5)) if "mixture" in name else None)
    drawn = hashlib.sha256()
    for ranks, rank, size in ((1, 0, 48), (2, 1, 24)):
        batches = TrainBatches(
            shards=images,
            seed=7,
            image_size=64,
            global_batch_size=96,
            batch_size=size,
            rank=rank,
            world_size=ranks,
            data=DataConfig(**data),
            augment=AugmentConfig(**augment),
        )
        for i in (0, 1, 2, 29, 30, 31, 200):
            request = batches.request(i, {3: 4, 700: 701})
            for values in (request.index, request.label, request.epoch, request.position):
                drawn.update(values.astype("<i8").tobytes())
            drawn.update(repr([augmentation_digests(request), batches.coming_blocks(i)]).encode())
    assert drawn.hexdigest()[:32] == expected


def test_batches_do_not_depend_on_those_asked_for_before() -> None:
    """Guards against samples of another batch: the order of many batches is computed at a time, while threads read ahead."""

    def batches() -> TrainBatches:
        images: Any = Images(None)
        return TrainBatches(
            shards=images,
            seed=7,
            image_size=64,
            global_batch_size=500,
            batch_size=500,
            data=DataConfig(),
            augment=AugmentConfig(),
        )

    numbers = [0, 9, 4, 3, 4, 400, 8, 0, *range(20), 7, 6]  # four batches at a time
    shared = batches()
    with ThreadPoolExecutor(4) as threads:
        found = [request.index.tolist() for request in threads.map(shared.request, numbers)]
    assert found == [batches().request(i).index.tolist() for i in numbers]
