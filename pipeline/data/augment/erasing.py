"""Random erasing (Zhong et al., AAAI 2020) in its pixel mode: a rectangle of some images is replaced by Gaussian noise.

Ranges are those of timm, which the papers use: 2 % to a third of the area, aspect ratio 0.3 to 1/0.3, ten attempts.
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
    """The rectangles to erase from B images."""

    box: np.ndarray  # (B, 4) int64: top, left, height, width in pixels; height 0: none
    noise_seed: np.ndarray  # (B,) int64


def draw_erasing(uniforms: np.ndarray, image_size: int, probability: float) -> Erasing:
    """Sample the rectangles.

    Args:
        uniforms: (B, UNIFORMS_PER_SAMPLE) in [0, 1), multiples of 2**-32.
        image_size: side of the images.
        probability: of erasing a rectangle of an image.
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
        noise_seed=(words[0] << 31) ^ words[1],  # 63 bits: non-negative int64
    )


def erase_(images: Tensor, erasing: Erasing) -> None:
    """Fill the rectangles with N(0, 1) noise, the scale of normalized pixels, in place.

    The generator is seeded per image, so that the noise is reproducible on the same type of device.

    Args:
        images: (B, 3, H, W) float32, normalized.
        erasing: rectangles and seeds.
    """
    generator = torch.Generator(images.device)
    for i in np.flatnonzero(erasing.box[:, 2]):
        top, left, height, width = erasing.box[i].tolist()
        generator.manual_seed(int(erasing.noise_seed[i]))
        noise = torch.empty(images.shape[1], height, width, device=images.device).normal_(generator=generator)  # (3, h, w)
        images[i, :, top : top + height, left : left + width] = noise
