"""Normalization of 8-bit pixels, in the forms in which batches reach a device."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from pipeline.config import DataConfig
from pipeline.data.cpu_transform import Normalization

CONFIG = DataConfig()


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
@pytest.mark.parametrize("result", [None, torch.contiguous_format, torch.channels_last])
def test_every_level_in_every_layout(layout: torch.memory_format, result: torch.memory_format | None) -> None:
    """Guards against channels that get another channel's constants, and another rounding than earlier runs trained with."""
    pixels = every_level()
    out = None if result is None else torch.empty(pixels.shape).contiguous(memory_format=result)
    images = Normalization(CONFIG.mean, CONFIG.std)(pixels.contiguous(memory_format=layout), out)
    np.testing.assert_array_equal(images.numpy(), expected(pixels))
    assert out is None or images.data_ptr() == out.data_ptr()


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
