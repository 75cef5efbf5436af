"""The random numbers of a forward pass: a function of each image's place in the stream, as everything that is drawn."""

from __future__ import annotations

import numpy as np
from torch import Tensor

from pipeline.data.device_stream import to_device
from pipeline.data.loader import Batch
from pipeline.models.common.base import VisionModel
from pipeline.philox import Stream, random_words, uniforms

_BELOW_ONE = np.float32(1 - 2.0**-24)  # the largest float32 in [0, 1)


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

    The image's place is of one step, micro-batch and rank, and differs between them.
    """
    first = (batch.request.epoch[:1], batch.request.position[:1])
    low, high = random_words(Stream.STOCHASTIC_DEPTH, seed, *first, used + 2)[0, used:].tolist()
    return low | (high & 0x7FFFFFFF) << 32
