"""Estimates the disk space that shards need, to fail before hours of work instead of after them."""

from __future__ import annotations

import shutil
from pathlib import Path

from data_prep.sources import Source
from pipeline.data.image_checks import ImageRules
from pipeline.errors import UserError
from pipeline.files import check_space

# Per sample: .cls and .json of one 512-byte block each, three headers, the image's padding, index line and table row.
_BYTES_PER_SAMPLE = 3 * 1024
_MARGIN = 1.02  # slack, for example for images that grow when re-encoded
_ASPECT_RATIO = 1.5  # upper estimate of the average; most photographs are 4:3
_BYTES_PER_PIXEL = ((90, 0.5), (95, 0.8), (100, 2.0))  # (quality up to, bytes): upper estimate for photographs at 4:2:0


def needed_bytes(source: Source, rules: ImageRules) -> int:
    """Estimated size of the shards in bytes; an upper estimate if images are resized.

    Args:
        source: all images of the split.
        rules: how images are stored.
    """
    images = source.total_bytes() * _MARGIN
    if rules.resize_short_side is not None:
        pixels = _ASPECT_RATIO * rules.resize_short_side**2
        per_pixel = next(value for quality, value in _BYTES_PER_PIXEL if rules.quality <= quality)
        images = min(images, len(source) * pixels * per_pixel)
    return round(images + len(source) * _BYTES_PER_SAMPLE)


def check_space_for_shards(
    folder: Path, needed: int, written: int, estimate: bool, otherwise: str = "choose another --output"
) -> None:
    """Check that the shards fit on the disk.

    Args:
        folder: existing output folder.
        needed: bytes of the whole split.
        written: bytes already written.
        estimate: whether ``needed`` is an estimate, because images are resized; for the message.
        otherwise: what can be done in place of freeing space.

    Raises:
        UserError: not enough free space.
    """
    missing = max(0, needed - written)
    try:
        check_space(folder, missing)
    except OSError:
        about = " (an estimate: images are resized)" if estimate else ""
        raise UserError(
            f"the disk of {folder} has {shutil.disk_usage(folder).free / 1e9:.2f} GB free, {missing / 1e9:.2f} GB needed for the "
            f"shards{about}",
            f"free some space or {otherwise}",
        ) from None
