"""The random numbers of a forward pass: a function of each image's place in the stream, as everything that is drawn."""

from __future__ import annotations

import numpy as np
from torch import Tensor

from pipeline.data.device_stream import to_device
from pipeline.data.loader import Batch
from pipeline.models.common.base import VisionModel
from pipeline.philox import Stream, uniforms

_BELOW_ONE = np.float32(1 - 2.0**-24)  # the largest float32 in [0, 1)


def sample_noise(model: VisionModel, batch: Batch, seed: int) -> Tensor | None:
    """The uniform numbers that the model may draw for each image (stochastic depth), a function of its place in the stream.

    Returns:
        (B, noise_per_sample) float32 on the batch's device, or None when the model draws none.
    """
    count = model.noise_per_sample
    if count == 0:
        return None
    noise = uniforms(Stream.STOCHASTIC_DEPTH, seed, batch.request.epoch, batch.request.position, count).astype(np.float32)
    noise = np.minimum(noise, _BELOW_ONE)  # rounding must not make a 1 of it
    return to_device(noise, batch.images.device)
