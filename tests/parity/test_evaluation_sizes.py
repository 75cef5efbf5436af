"""What evaluation resizes images to and crops from them, beside the authors' transforms."""

from __future__ import annotations

import numpy as np
import pytest

from pipeline.augment.crop import eval_geometry
from support import parity

FAMILIES = ("pervit", "convit", "deit", "lsat", "posmlp")


@pytest.mark.parametrize("family", FAMILIES)
def test_short_sides(family: str) -> None:
    """Guards against rounding up: 249 pixels instead of 248 for 224 / 0.9."""
    theirs = parity.load(family)["evaluation"]
    for size, short in theirs["short"].items():
        resize = eval_geometry(np.array([700]), np.array([900]), int(size), theirs["crop"]).resize[0]
        assert resize.min() == short, size


@pytest.mark.parametrize("family", FAMILIES)
def test_sizes_and_corners_at_224_pixels(family: str) -> None:
    """Guards against another rounding of the long side or of the corner of the crop."""
    theirs = parity.load(family)["evaluation"]
    stored = np.array([image["stored"] for image in theirs["images"]])
    geometry = eval_geometry(*stored.T, 224, theirs["crop"])
    corners = np.rint(geometry.crop * (geometry.resize - 224))
    assert geometry.resize.tolist() == [image["resized"] for image in theirs["images"]]
    assert corners.tolist() == [image["corner"] for image in theirs["images"]]
