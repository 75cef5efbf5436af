"""Random erasing (Zhong et al., AAAI 2020) in its pixel mode: a rectangle of some images is replaced by Gaussian noise.

Ranges are those of timm, which the papers use: 2 % to a third of the area, aspect ratio 0.3 to 1/0.3, ten attempts.
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from pipeline.augment import BatchAugmentation, BatchRequest, Places, register
from pipeline.augment.crop import random_sides
from pipeline.config import AugmentConfig, DataConfig
from pipeline.stream.philox import Stream

AREA = (0.02, 1 / 3)  # share of the image
ASPECT = (0.3, 1 / 0.3)  # height / width
ATTEMPTS = 10
UNIFORMS_PER_SAMPLE = 2 * ATTEMPTS + 5  # area and aspect per attempt; whether, top, left, and two for the noise's seed


@dataclass(frozen=True)
class Erasing:
    box: np.ndarray  # (B, 4) int64: top, left, height, width in pixels; height 0: none
    noise_seed: np.ndarray  # (B,) int64


@register
@dataclass(frozen=True)
class RandomErasing(BatchAugmentation):
    """Random erasing; noise has the scale of normalized pixels."""

    probability: float  # of erasing a rectangle of an image
    image_size: int  # side, pixels
    stream = Stream.ERASING
    place = 10

    @classmethod
    def from_config(cls, augment: AugmentConfig, data: DataConfig, image_size: int) -> "RandomErasing | None":
        return cls(augment.erasing, image_size) if augment.erasing else None

    def draw(self, places: Places) -> Erasing:
        return self.sample(places.uniforms(self.stream, UNIFORMS_PER_SAMPLE))

    def sample(self, uniforms: np.ndarray) -> Erasing:
        """The rectangles that (B, UNIFORMS_PER_SAMPLE) numbers in [0, 1), multiples of 2**-32, make."""
        whether, top_draw, left_draw, *seed_draws = uniforms[:, 2 * ATTEMPTS :].T
        height, width = random_sides(self.image_size**2, AREA, ASPECT, uniforms[:, : 2 * ATTEMPTS])
        fits = (height < self.image_size) & (width < self.image_size)
        first = np.arange(len(uniforms)), fits.argmax(axis=1)  # the first attempt that fits
        height, width = height[first], width[first]
        top = (top_draw * (self.image_size - height + 1)).astype(np.int64)
        left = (left_draw * (self.image_size - width + 1)).astype(np.int64)
        erased = fits.any(axis=1) & (whether < self.probability)
        words = [(draw * 2.0**32).astype(np.int64) for draw in seed_draws]
        seed = (words[0] << 31) ^ words[1]  # 63 bits: non-negative int64
        return Erasing(np.where(erased[:, None], np.stack([top, left, height, width], axis=1), 0), seed)

    def apply_(self, images: Tensor, request: BatchRequest) -> None:
        erasing, channels = request.draws[self], images.shape[1]
        noise, end = erasing_noise(erasing, channels), 0
        for i in np.flatnonzero(erasing.box[:, 2]):
            top, left, height, width = erasing.box[i].tolist()
            begin, end = end, end + channels * height * width
            images[i, :, top : top + height, left : left + width] = noise[begin:end].view(channels, height, width)

    def device_arrays(self, request: BatchRequest, shape: tuple[int, ...]) -> tuple[np.ndarray, ...]:
        """The noise; where :meth:`apply_batch_` puts it: for each of the R rows of all rectangles, its place in the flattened images minus
        that in the noise, and its width; (R,) int64 each."""
        erasing, (_, channels, height, width) = request.draws[self], shape
        if not erasing.box.any():
            return ()
        image = np.flatnonzero(erasing.box[:, 2])
        top, left, rows, columns = erasing.box[image].T  # (n,) each
        rectangle = np.repeat(np.arange(len(image)), channels * rows)  # (R,): a row's
        within = np.arange(len(rectangle)) - np.repeat(np.cumsum(channels * rows) - channels * rows, channels * rows)
        channel, row = np.divmod(within, rows[rectangle])
        first = ((image[rectangle] * channels + channel) * height + top[rectangle] + row) * width + left[rectangle]
        widths = columns[rectangle]
        return erasing_noise(erasing, channels).numpy(), first - (np.cumsum(widths) - widths), widths

    def apply_batch_(self, images: Tensor, request: BatchRequest, *arrays: Tensor) -> None:
        if arrays:
            noise, offset, width = arrays
            place = torch.repeat_interleave(offset, width, output_size=len(noise))  # (n,); with its size, nothing synchronizes
            place += torch.arange(len(noise), device=noise.device)
            images.view(-1).index_copy_(0, place, noise)  # no place occurs twice


def erasing_noise(erasing: Erasing, channels: int) -> Tensor:
    """The noise of all rectangles of a batch, on the CPU: (n,) float32, one rectangle (channels, height, width) after the other.

    PyTorch's generators give other numbers on a GPU. Drawn on the CPU, at 0.03 ms for an image, the noise of an image is a
    function of its seed on any device.
    """
    counts = channels * erasing.box[:, 2] * erasing.box[:, 3]
    noise = torch.empty(int(counts.sum()))
    generator = torch.Generator()
    for part, seed in zip(noise.split(counts.tolist()), erasing.noise_seed.tolist()):
        if len(part):
            part.normal_(generator=generator.manual_seed(seed))
    return noise
