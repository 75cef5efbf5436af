"""The CPU's pixels in the two forms in which they leave it, float32 for a CPU and uint8 for a GPU; their normalization."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from pipeline.augment.crop import Geometry
from pipeline.augment.randaugment import RandAugment
from pipeline.config import AugmentConfig, DataConfig
from pipeline.loader.batches import TrainBatches
from pipeline.loader.cpu_transform import Finisher, Normalization, resize_and_crop
from pipeline.shards.shard_set import ShardSet

CONFIG = DataConfig()


@pytest.mark.parametrize("size", [56, 57])  # 57: its bytes cannot be mirrored eight at a time
def test_uint8_batches_normalized_are_the_float_batches(size: int, digits_shards: Path) -> None:
    """Guards against a GPU that trains on other pixels when the CPU decodes: flips, RandAugment and channels, exactly."""
    shards = ShardSet(digits_shards, "train")
    batches = TrainBatches(
        shards=shards,
        seed=7,
        image_size=size,
        global_batch_size=32,
        batch_size=32,
        data=CONFIG,
        augment=AugmentConfig(rand_augment_ops=2),
    )
    request = batches.request(0)
    augmented, flip = request.drawn(RandAugment).op.any(axis=1), request.geometry.flip.astype(bool)
    assert all((augmented == a)[flip == f].any() for a in (False, True) for f in (False, True)), "every case occurs"
    generator = torch.Generator().manual_seed(0)
    windows = [
        torch.randint(0, 256, (*shape.tolist(), 3), dtype=torch.uint8, generator=generator) for shape in request.geometry.shape
    ]
    finisher = Finisher(32, size, CONFIG.mean, CONFIG.std, num_threads=2)
    pixels, floats = finisher.finish_pixels(windows, request), finisher.finish(windows, request)
    finisher.close()
    assert pixels.shape == (32, 3, size, size) and pixels.dtype == torch.uint8
    assert pixels.is_contiguous(memory_format=torch.channels_last)
    assert floats.is_contiguous()
    assert torch.equal(Normalization(CONFIG.mean, CONFIG.std)(pixels), floats)


@pytest.mark.parametrize(("side", "operations", "threads"), [(32, 0, 2), (224, 0, 5), (32, 1, 16)])
def test_small_images_take_few_threads(
    side: int, operations: int, threads: int, digits_shards: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards against threads that wait for Python's lock: on 16 cores sixteen of them made half as many CIFAR images as two."""
    batches = TrainBatches(
        shards=ShardSet(digits_shards, "train"),
        seed=7,
        image_size=side,
        global_batch_size=32,
        batch_size=32,
        data=CONFIG,
        augment=AugmentConfig(rand_augment_ops=operations),
    )
    finisher, used, shared = Finisher(32, side, CONFIG.mean, CONFIG.std, num_threads=16), [], ThreadPoolExecutor.map
    monkeypatch.setattr(finisher._pool, "map", lambda *call: used.extend(call[1]) or shared(finisher._pool, *call))
    white = torch.full((40, 40, 3), 255, dtype=torch.uint8)
    images = finisher.finish([white] * 32, batches.request(0))
    finisher.close()
    assert len(used) == threads
    if not operations:
        assert torch.equal(images, images[:1].expand_as(images)) and images.min() > 2, "every image is made"


def test_resized_pixels_stay_interleaved() -> None:
    """Guards against a resize that spends a third of its time on planes, which a tensor of other strides makes PyTorch do."""
    window = np.random.default_rng(0).integers(0, 256, (61, 83, 3), dtype=np.uint8)
    geometry = Geometry(*(np.zeros((1, 2)) for _ in range(2)), np.array([[40.0, 60.0]]), np.array([[0.5, 1.0]]), np.zeros(1))
    pixels = resize_and_crop(torch.from_numpy(window), geometry, 0, 32)
    assert pixels.strides == (60 * 3, 3, 1)
    pillow = np.asarray(Image.fromarray(window).resize((60, 40), Image.Resampling.BICUBIC))[4:36, 28:60]
    assert np.abs(pixels.astype(int) - pillow).max() <= 2


def every_level() -> torch.Tensor:
    """(2, 3, 16, 24) uint8: every level in every channel."""
    levels = torch.arange(256, dtype=torch.uint8).repeat(3)[: 2 * 16 * 24]
    return torch.stack([levels, levels.flip(0), levels.roll(7)]).reshape(3, 2, 16, 24).transpose(0, 1).contiguous()


def expected(pixels: torch.Tensor) -> np.ndarray:
    """The formula with one rounding to float32 for each operation."""
    scale = np.array([1 / (255 * s) for s in CONFIG.std], dtype=np.float32)[:, None, None]
    shift = np.array([-m / s for m, s in zip(CONFIG.mean, CONFIG.std)], dtype=np.float32)[:, None, None]
    return pixels.numpy().astype(np.float32) * scale + shift


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_every_level_in_every_layout(layout: torch.memory_format) -> None:
    """Guards against channels that get another channel's constants, and another rounding than earlier runs trained with."""
    pixels = every_level()
    images = Normalization(CONFIG.mean, CONFIG.std)(pixels.contiguous(memory_format=layout))
    np.testing.assert_array_equal(images.numpy(), expected(pixels))
    assert images.is_contiguous()


def test_the_gpus_kernel_differs_by_one_rounding() -> None:
    """Guards against a GPU's batches that are not the CPU's: the operator that a GPU runs, here on the CPU."""
    pixels = every_level()
    scale, shift = Normalization(CONFIG.mean, CONFIG.std)._on(torch.device("cpu"))
    images = torch.addcmul(shift, pixels.contiguous(memory_format=torch.channels_last), scale)
    assert images.dtype == torch.float32
    difference = np.abs(images.numpy() - expected(pixels))
    assert difference.max() <= 2**-22  # half a unit in the last place of the product, which is below 4.4


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
def test_a_gpu_normalizes_like_the_cpu() -> None:
    """Guards against a kernel that does not convert the pixels, or mixes the layouts up."""
    pixels = every_level()
    for layout in (torch.contiguous_format, torch.channels_last):
        images = Normalization(CONFIG.mean, CONFIG.std)(pixels.cuda().contiguous(memory_format=layout))
        assert np.abs(images.cpu().numpy() - expected(pixels)).max() <= 2**-21
