"""A picture and its bytes in any file format."""

from __future__ import annotations

import io

import numpy as np
from PIL import Image


def picture(side: int = 48, seed: int = 0) -> Image.Image:
    """A smooth RGB picture, (side + 16) x side pixels."""
    rough = np.random.default_rng(seed).integers(0, 256, size=(6, 8, 3), dtype=np.uint8)
    return Image.fromarray(rough).resize((side + 16, side), Image.Resampling.BICUBIC)


def encoded(image: Image.Image, kind: str = "JPEG", **options: object) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()
