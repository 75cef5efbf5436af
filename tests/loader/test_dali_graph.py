"""DALI's whole graph, which GPUs run, against the pixels of the CPU path; here the graph runs on the CPU."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from packaging.version import Version

from pipeline.config import AugmentConfig, DataConfig
from pipeline.loader.batches import EvalBatches, TrainBatches
from pipeline.loader.cpu_transform import Normalization
from pipeline.loader.dali_graph import REGIONS, WHOLE, full_graph, full_inputs
from pipeline.loader.loader import Loader
from pipeline.shards.shard_set import ShardSet
from support.launching import REPOSITORY

CONFIG = DataConfig(num_threads=1)
BATCH = 48


@pytest.mark.parametrize(
    ("mode", "size", "eval_crop"), [("train", 224, 0.875), ("train", 64, 0.875), ("eval", 224, 0.875), ("eval", 96, 1.0)]
)
def test_the_graph_is_within_two_levels_of_the_cpu(mode: str, size: int, eval_crop: float, imagenet_shards: Path) -> None:
    """Guards against a resize that keeps more than 8 bits between its two directions, or repeats the border's pixels.

    DALI's own differs by up to 21 of 255 levels, and in 17 % of the values.
    """
    shards = ShardSet(imagenet_shards, "train")
    common = {"shards": shards, "image_size": size, "batch_size": BATCH, "rank": 0, "world_size": 1}
    if mode == "train":
        batches = TrainBatches(**common, seed=7, global_batch_size=BATCH, data=CONFIG, augment=AugmentConfig())
    else:
        batches = EvalBatches(**common, eval_crop=eval_crop)
    request = batches.request(0)
    inputs = full_inputs(list(map(shards.read, request.index)), request)
    (output,) = full_graph(lambda: inputs, batches, None, 1, 1).run()
    whole = Normalization(CONFIG.mean, CONFIG.std)(torch.from_dlpack(output.as_tensor()).permute(0, 3, 1, 2))
    with torch.no_grad():
        split = next(Loader(batches, CONFIG, torch.device("cpu"))).images
    difference = np.rint(((whole - split) * torch.tensor(CONFIG.std)[:, None, None] * 255).abs().numpy())
    assert difference.max() <= 2
    assert (difference > 0).mean() < 0.015 and (difference > 1).mean() < 1e-5


@pytest.mark.parametrize("images", ["digits_shards", "imagenet_shards"])
@pytest.mark.parametrize("crop", ["random_resized", "simple", "padded"])
def test_regions_and_whole_images_give_the_same_pixels(images: str, crop: str, request: pytest.FixtureRequest) -> None:
    """Guards against a GPU that trains on other pixels because it must decode whole images."""
    shards = ShardSet(request.getfixturevalue(images), "train")
    data = DataConfig(num_threads=1, train_crop=crop)
    common = {"image_size": 64, "batch_size": BATCH, "global_batch_size": BATCH, "seed": 7}
    batches = TrainBatches(shards=shards, data=data, augment=AugmentConfig(), **common)
    asked = batches.request(0)
    inputs = full_inputs(list(map(shards.read, asked.index)), asked)
    pixels = [full_graph(lambda: inputs, batches, None, 1, 1, form).run()[0].as_tensor() for form in (REGIONS, WHOLE)]
    regions, whole = map(np.array, pixels)
    assert regions.shape == (BATCH, 64, 64, 3) and np.array_equal(regions, whole)


def test_nvjpeg_interpolates_colour_within_a_window() -> None:
    """Guards against an nvJPEG before 13.2: nvImageCodec warns that a window's edge may be wrong there."""
    pinned = (line.split("==") for line in (REPOSITORY / "constraints.txt").read_text().splitlines() if "==" in line)
    assert Version(dict(pinned)["nvidia-nvjpeg"]) >= Version("13.2")
