"""The CPU's pixels in the two forms in which they leave it: float32 for a CPU, uint8 for a GPU."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from PIL import Image

from pipeline.config import AugmentConfig, DataConfig
from pipeline.data.augment.crop import Geometry
from pipeline.data.augment.randaugment import RandAugment
from pipeline.data.batches import TrainBatches
from pipeline.data.cpu_transform import Finisher, Normalization, resize_and_crop
from pipeline.data.shards import ShardSet

CONFIG = DataConfig()
SIZE = 56


def test_uint8_batches_normalized_are_the_float_batches(digits_shards: Path) -> None:
    """Guards against a GPU that trains on other pixels when the CPU decodes: flips, RandAugment and channels, exactly."""
    shards = ShardSet(digits_shards, "train")
    plan = TrainBatches(
        shards=shards,
        seed=7,
        image_size=SIZE,
        global_batch_size=32,
        batch_size=32,
        data=CONFIG,
        augment=AugmentConfig(rand_augment_ops=2),
    )
    request = plan.request(0)
    augmented, flip = request.drawn(RandAugment).op.any(axis=1), request.geometry.flip.astype(bool)
    assert all((augmented == a)[flip == f].any() for a in (False, True) for f in (False, True)), "every case occurs"
    generator = torch.Generator().manual_seed(0)
    windows = [
        torch.randint(0, 256, (*shape.tolist(), 3), dtype=torch.uint8, generator=generator) for shape in request.geometry.shape
    ]
    finisher = Finisher(32, SIZE, CONFIG.mean, CONFIG.std, num_threads=2)
    pixels, floats = finisher.finish_pixels(windows, request), finisher.finish(windows, request)
    finisher.close()
    assert pixels.shape == (32, 3, SIZE, SIZE) and pixels.dtype == torch.uint8
    assert pixels.is_contiguous(memory_format=torch.channels_last)
    assert floats.is_contiguous()
    assert torch.equal(Normalization(CONFIG.mean, CONFIG.std)(pixels), floats)


def test_resized_pixels_stay_interleaved() -> None:
    """Guards against a resize that spends a third of its time on planes, which a tensor of other strides makes PyTorch do."""
    window = np.random.default_rng(0).integers(0, 256, (61, 83, 3), dtype=np.uint8)
    geometry = Geometry(*(np.zeros((1, 2)) for _ in range(2)), np.array([[40.0, 60.0]]), np.array([[0.5, 1.0]]), np.zeros(1))
    pixels = resize_and_crop(torch.from_numpy(window), geometry, 0, 32)
    assert pixels.strides == (60 * 3, 3, 1)
    pillow = np.asarray(Image.fromarray(window).resize((60, 40), Image.Resampling.BICUBIC))[4:36, 28:60]
    assert np.abs(pixels.astype(int) - pillow).max() <= 2
