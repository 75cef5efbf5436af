"""Is there room for the shards? Asked before hours of work, not answered by the disk after them."""

from __future__ import annotations

import shutil
from pathlib import Path

from data_prep.sources import Source
from pipeline.data.image_checks import ImageRules
from pipeline.errors import UserError
from pipeline.files import check_space

# Two members of a block each beside the image, three headers, the image's last block, and what lies beside the tars.
_BYTES_PER_SAMPLE = 3 * 1024
_MARGIN = 1.02
_ASPECT_RATIO = 1.5  # of a long image; most are 4:3
_BYTES_PER_PIXEL = ((90, 0.5), (95, 0.8), (100, 2.0))  # of photographs, generously, up to each quality (4:2:0)


def needed_bytes(source: Source, rules: ImageRules) -> int:
    """About what the shards will take; an upper estimate where images are resized.

    Args:
        source: all images that go in.
        rules: how they are stored.
    """
    images = source.total_bytes() * _MARGIN
    if rules.resize_short_side is not None:
        pixels = _ASPECT_RATIO * rules.resize_short_side**2
        per_pixel = next(value for quality, value in _BYTES_PER_PIXEL if rules.quality <= quality)
        images = min(images, len(source) * pixels * per_pixel)
    return round(images + len(source) * _BYTES_PER_SAMPLE)


def check_space_for_shards(folder: Path, needed: int, written: int, estimate: bool) -> None:
    """See that the shards fit.

    Args:
        folder: where they go; exists.
        needed: bytes of the whole split.
        written: bytes of it that are there already.
        estimate: ``needed`` is one, because images are resized.

    Raises:
        UserError: they do not.
    """
    missing = max(0, needed - written)
    try:
        check_space(folder, missing)
    except OSError:
        about = " (an estimate: images are resized)" if estimate else ""
        raise UserError(
            f"the disk of {folder} has {shutil.disk_usage(folder).free / 1e9:.2f} GB free, {missing / 1e9:.2f} GB needed for the "
            f"shards{about}",
            "free some space or choose another --output",
        ) from None
