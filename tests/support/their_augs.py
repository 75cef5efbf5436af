"""Augmentations as users write them: files that the package knows nothing of, ``augment.imported={support.their_augs:Posterize: ...}``."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from PIL import Image, ImageOps

from pipeline.augment import BatchAugmentation, BatchRequest, PixelAugmentation, Places


@dataclass(frozen=True)
class Bits:
    mask: np.ndarray  # (B,) uint8


@dataclass(frozen=True)
class Posterize(PixelAugmentation):
    """Keeps some of the bits of each pixel."""

    least: int = 4
    stream = "their_posterize"
    place = 7

    @property
    def graph_types(self) -> tuple[tuple[type, int], ...]:
        return ((np.uint8, 0),)

    def draw(self, places: Places) -> Bits:
        dropped = (places.uniforms(self.stream, 1)[:, 0] * (9 - self.least)).astype(np.uint8)
        return Bits((255 << dropped.astype(np.int64)).astype(np.uint8))

    def applies(self, request: BatchRequest, i: int) -> bool:
        return request.draws[self].mask[i] != 255

    def on_picture(self, picture: Image.Image, request: BatchRequest, i: int) -> Image.Image:
        return ImageOps.posterize(picture, int(request.draws[self].mask[i]).bit_count())

    def in_graph(self, images, *inputs):
        return images & inputs[0]


@dataclass(frozen=True)
class Shift:
    value: np.ndarray  # (B,) float64


@dataclass(frozen=True)
class Brightness(BatchAugmentation):
    """Adds to normalized images."""

    strength: float
    stream = "their_brightness"
    place = 15

    def draw(self, places: Places) -> Shift:
        return Shift(self.strength * places.uniforms(self.stream, 1)[:, 0])

    def apply_(self, images, request: BatchRequest) -> None:
        import torch

        images += torch.from_numpy(request.draws[self].value).to(images)[:, None, None, None]


class Sequential(Brightness):
    """Draws from a generator of its own, whose numbers depend on what was drawn before."""

    stream = "their_sequence"

    def draw(self, places: Places) -> Shift:
        return Shift(np.random.default_rng(0).random(len(places.position)))


class HalfDone(PixelAugmentation):
    stream, place = "their_half", 8
