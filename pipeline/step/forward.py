"""Run a model's forward pass: its precision, its random numbers, and random images instead of real ones."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from pipeline.augment import BatchRequest
from pipeline.augment.crop import eval_geometry
from pipeline.config import ModelConfig
from pipeline.loader.device_stream import to_device
from pipeline.loader.loader import Batch
from pipeline.models.common.base import VisionModel
from pipeline.stream.philox import Stream, random_words, uniforms

BF16, FP32 = "bf16", "fp32"
_BELOW_ONE = np.float32(1 - 2.0**-24)  # the largest float32 in [0, 1)


def autocast(device: torch.device, precision: str) -> torch.autocast:
    """The context in which a forward pass computes in ``precision``, "bf16" or "fp32"."""
    return torch.autocast(device.type, torch.bfloat16, enabled=precision == BF16)


def sample_noise(model: VisionModel, batch: Batch, seed: int) -> Tensor | None:
    """The uniform numbers that the model may draw for each image (stochastic depth), a function of its place in the stream.

    A model that also draws from PyTorch's generator (timm's dropout) is told what to seed it with.

    Returns:
        (B, noise_per_sample) float32 on the batch's device, or None when the model draws none.
    """
    count = model.noise_per_sample
    if model.draws_from_generator:
        model.generator_seed = _generator_seed(batch, seed, count)
    if count == 0:
        return None
    noise = uniforms(Stream.STOCHASTIC_DEPTH, seed, batch.request.epoch, batch.request.position, count).astype(np.float32)
    noise = np.minimum(noise, _BELOW_ONE)  # rounding must not make a 1 of it
    return to_device(noise, batch.images.device)


def _generator_seed(batch: Batch, seed: int, used: int) -> int:
    """Below 2**63: the words of the micro-batch's first image that follow those ``used`` for stochastic depth.

    The image's place belongs to one step, micro-batch and rank, and differs between them.
    """
    first = (batch.request.epoch[:1], batch.request.position[:1])
    low, high = random_words(Stream.STOCHASTIC_DEPTH, seed, *first, used + 2)[0, used:].tolist()
    return low | (high & 0x7FFFFFFF) << 32


def random_batch(size: int, model: ModelConfig, device: torch.device) -> Batch:
    """A micro-batch of ``size`` random images: everything that a step takes of a batch, without data."""
    side = model.image_size
    images = torch.randn(size, 3, side, side, device=device)
    labels = torch.arange(size, device=device) % model.num_classes
    numbers = np.arange(size, dtype=np.int64)
    sides = np.full(size, side)
    geometry = eval_geometry(sides, sides, side, 1.0)
    request = BatchRequest(numbers, numbers, np.zeros_like(numbers), numbers, np.ones(size, dtype=bool), geometry)
    weight = torch.ones(size, device=device)
    return Batch(images, labels, labels, weight, weight > 0, request, 0)
