"""The noise of a step follows the place of an image in the stream."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import torch

from pipeline.step.train_step import sample_noise
from pipeline.stream.philox import Stream, uniforms

KNOWN = [0.9184434413909912, 0.7966806292533875, 0.4182141423225403]  # of seed 7, epoch 0, position 5


def test_noise_is_that_of_the_epoch_and_position() -> None:
    """Guards against an image that loses the same branches in every epoch, and against noise by the place in a batch."""
    epoch, position = np.array([0, 0, 1, 1]), np.array([5, 6, 5, 6])
    model = SimpleNamespace(noise_per_sample=3, draws_from_generator=False)

    def noise(order: slice, seed: int = 7) -> torch.Tensor:
        request = SimpleNamespace(epoch=epoch[order], position=position[order])
        return sample_noise(model, SimpleNamespace(request=request, images=torch.zeros(4, 1)), seed)  # type: ignore[arg-type]

    found = noise(slice(None))
    assert found.shape == (4, 3) and found.dtype == torch.float32 and len(found.unique()) == 12
    expected = uniforms(Stream.STOCHASTIC_DEPTH, 7, epoch, position, 3)
    np.testing.assert_allclose(found.numpy(), expected, rtol=1e-6)
    assert torch.equal(noise(slice(None, None, -1)), found.flip(0))
    assert not torch.equal(noise(slice(None), seed=8), found)
    assert found[0].tolist() == KNOWN, "runs would drop other branches when they resume"
