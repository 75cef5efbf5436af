"""Random erasing (Zhong et al., AAAI 2020), per-pixel noise: a rectangle of some images becomes normal noise.

Ranges as in the reference code of the papers: 2 % to a third of the area, aspect ratio 0.3 to 1/0.3, ten attempts.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

AREA = (0.02, 1 / 3)  # share of the image
ASPECT = (0.3, 1 / 0.3)  # height / width
ATTEMPTS = 10
UNIFORMS_PER_SAMPLE = 2 * ATTEMPTS + 5  # area and aspect per attempt; whether, top, left, and two for the noise's seed


@dataclass(frozen=True)
class Erasing:
    """What is erased from B images."""

    box: np.ndarray  # (B, 4) int64: top, left, height, width in pixels; height 0: nothing
    noise_seed: np.ndarray  # (B,) int64


def draw_erasing(uniforms: np.ndarray, image_size: int, probability: float) -> Erasing:
    """Decide what is erased.

    Args:
        uniforms: (B, UNIFORMS_PER_SAMPLE) in [0, 1), multiples of 2**-32.
        image_size: side of the images.
        probability: that an image loses a rectangle.
    """
    rows = np.arange(len(uniforms))
    area_draw, aspect_draw = uniforms[:, :ATTEMPTS], uniforms[:, ATTEMPTS : 2 * ATTEMPTS]
    whether, top_draw, left_draw, *seed_draws = uniforms[:, 2 * ATTEMPTS :].T

    area = image_size**2 * (AREA[0] + area_draw * (AREA[1] - AREA[0]))  # (B, attempts)
    aspect = np.exp(np.log(ASPECT[0]) + aspect_draw * (np.log(ASPECT[1]) - np.log(ASPECT[0])))
    height = np.rint(np.sqrt(area * aspect)).astype(np.int64)
    width = np.rint(np.sqrt(area / aspect)).astype(np.int64)
    fits = (height < image_size) & (width < image_size)
    attempt = fits.argmax(axis=1)  # the first that fits
    height, width = height[rows, attempt], width[rows, attempt]
    top = (top_draw * (image_size - height + 1)).astype(np.int64)
    left = (left_draw * (image_size - width + 1)).astype(np.int64)
    erased = fits.any(axis=1) & (whether < probability)
    words = [(draw * 2.0**32).astype(np.int64) for draw in seed_draws]
    return Erasing(
        box=np.where(erased[:, None], np.stack([top, left, height, width], axis=1), 0),
        noise_seed=(words[0] << 31) ^ words[1],  # 63 bits
    )


def erase_(images: Tensor, erasing: Erasing) -> None:
    """Fill the rectangles with noise of the normalized pixels' scale, N(0, 1), in place.

    The noise is that of a generator seeded per image: on one kind of device the same wherever and whenever it is drawn.

    Args:
        images: (B, 3, H, W) float32, normalized.
    """
    generator = torch.Generator(images.device)
    for i in np.flatnonzero(erasing.box[:, 2]):
        top, left, height, width = erasing.box[i].tolist()
        generator.manual_seed(int(erasing.noise_seed[i]))
        noise = torch.empty(images.shape[1], height, width, device=images.device).normal_(generator=generator)
        images[i, :, top : top + height, left : left + width] = noise
