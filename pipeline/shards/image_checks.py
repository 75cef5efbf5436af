"""Check every image before it is stored: keep it unchanged, re-encode it, or reject it with a reason.

A JPEG that every decoder supports (Huffman-coded baseline, extended or progressive, 8 bits, one or three components) is kept
byte for byte. DALI's decoders, especially on the GPU, do not support all of the rest: CMYK and YCCK JPEGs (ImageNet has 22),
arithmetic and lossless coding, GIF, PPM, some forms of PNG, WebP, TIFF and BMP. These are decoded with Pillow and re-encoded as JPEG;
the other forms of these four are kept (:mod:`pipeline.shards.image_headers`), unless the file's name says that it is a JPEG, as that of
one PNG in ImageNet does. Images that Pillow cannot decode are rejected, as are JPEGs of more than 100 scans, which are crafted to
exhaust decoders. EXIF is not parsed and may be malformed; orientation is ignored in writing and in reading.
"""

import io
import os
import warnings
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from PIL import Image, UnidentifiedImageError

from pipeline.shards.image_headers import LONGEST_SIDE, CutOff, FrameHeader, TooManyScans, jpeg_header, kept_format

IMAGE_SUFFIXES = (".jpeg", ".jpg", ".png", ".webp", ".tif", ".tiff", ".bmp")  # of the files in folders, zips and tars
REENCODED_QUALITY = 95  # with 4:4:4 chroma: re-encoded images are so few that their size does not matter
_HUFFMAN_CODED = (0xC0, 0xC1, 0xC2)  # baseline, extended sequential, progressive
_FORMATS = ("JPEG", "PNG", "GIF", "BMP", "WEBP", "TIFF", "PPM")  # no EPS: Pillow would start a PostScript interpreter
_KEPT_MODES = ("1", "L", "LA", "P", "RGB", "RGBA")

# Silences Pillow's warning about large images. Above twice its limit (179 million pixels) Pillow still raises.
warnings.filterwarnings("ignore", module="PIL")


def is_image(name: str) -> bool:
    return name.lower().endswith(IMAGE_SUFFIXES) and not name.startswith(".")


def walk_images(folder: Path) -> Iterator[tuple[str, bool]]:
    """Every file of a folder and of the folders in it, by name: ``name`` or ``folder/name``, and whether it is an image.

    Hidden folders are passed over; a link to a folder is not followed, and counts as a file.
    """
    for entry in sorted(os.scandir(folder), key=lambda entry: entry.name):
        if not entry.is_dir():
            yield entry.name, entry.is_file() and is_image(entry.name)
        elif entry.is_symlink():
            yield entry.name, False
        elif not entry.name.startswith("."):
            yield from ((f"{entry.name}/{name}", image) for name, image in walk_images(Path(entry.path)))


class Rejected(ValueError):
    """The image cannot be stored; the message is the reason."""


@dataclass(frozen=True)
class ImageRules:
    decode: bool = True  # decode every image, which finds truncation and damage; False: parse headers only
    resize_short_side: int | None = None  # resize images whose short side is longer than this, in pixels; None: never
    quality: int = 90  # JPEG quality of resized images, 1 to 100
    keep_formats: bool = True  # keep PNG, WebP, TIFF and BMP where decoders agree on them; False: store everything as JPEG

    def resizes(self, width: int, height: int) -> bool:
        return self.resize_short_side is not None and min(width, height) > self.resize_short_side

    def description(self) -> dict:
        """The settings that determine the stored bytes."""
        return {**asdict(self), "quality": self.quality if self.resize_short_side else None}


@dataclass(frozen=True)
class StoredImage:
    data: bytes
    width: int  # pixels
    height: int
    reencoded: str | None = None  # why the source's file was not kept; None also for JPEGs that were only resized
    suffix: str = "jpg"  # of its member in a shard


def prepare_image(data: bytes, rules: ImageRules, name: str = "") -> StoredImage:
    """Check one encoded image and convert it to the stored form. A file whose name is that of a JPEG is stored as one. Raises
    Rejected: empty, truncated, too many scans, or Pillow cannot decode it."""
    if not data:
        raise Rejected("an empty file")
    try:
        if rules.keep_formats and not name.lower().endswith((".jpeg", ".jpg")) and (kept := _keep(data, rules)):
            return kept
        frame = jpeg_header(data)
        reason = _why_reencode(frame)
    except (Rejected, CutOff, TooManyScans) as error:
        raise Rejected(str(error)) from None
    except ValueError as error:
        return _encode_anew(data, rules, str(error))
    if reason or rules.resizes(frame.width, frame.height):
        return _encode_anew(data, rules, reason)
    if rules.decode:
        check_decodes(data)
    return StoredImage(data, frame.width, frame.height)


def _keep(data: bytes, rules: ImageRules) -> StoredImage | None:
    """A non-JPEG image that can be kept, decoded to its end whatever the rules say: no header bounds its damage."""
    found = kept_format(data)
    if found is None or rules.resizes(*found[1:]):
        return None
    suffix, width, height = found
    image = _open(data)
    same = image.size == (width, height) and image.mode in _KEPT_MODES
    return StoredImage(data, width, height, suffix=suffix) if same else None


def check_decodes(data: bytes) -> None:
    """Check that an image decodes to its end; if not, it is :class:`Rejected`.

    A JPEG is decoded at an eighth of its size, which reads all of its entropy-coded data but saves a third of the time (in the
    inverse DCT). Damage that leaves valid codes is not found, just as in a full decode.
    """
    _open(data, eighth=True)


def _why_reencode(frame: FrameHeader) -> str | None:
    """The reason why a JPEG must be re-encoded; None if it can be kept."""
    if frame.coding not in _HUFFMAN_CODED:
        return f"a JPEG with coding SOF{frame.coding - 0xC0} (arithmetic, lossless or hierarchical)"
    if frame.precision != 8:
        return f"a JPEG of {frame.precision} bits per sample"
    if frame.components not in (1, 3):
        return f"a JPEG of {frame.components} components (CMYK or YCCK)"
    return None


def _encode_anew(data: bytes, rules: ImageRules, reason: str | None) -> StoredImage:
    image = _open(data)
    if image.format not in ("JPEG", "MPO"):  # MPO: a JPEG with further pictures behind it
        reason = f"{image.format}, not a JPEG"
    image = _to_gray_or_rgb(image)
    quality, subsampling = REENCODED_QUALITY, "4:4:4"
    if rules.resize_short_side and rules.resizes(*image.size):
        quality, subsampling = rules.quality, "4:2:0"
        scale = rules.resize_short_side / min(image.size)
        width, height = (max(1, round(side * scale)) for side in image.size)
        image = image.resize((width, height), Image.Resampling.BICUBIC)  # antialiased
    if max(image.size) > LONGEST_SIDE:
        raise Rejected(f"{image.width}x{image.height} pixels, a JPEG has at most {LONGEST_SIDE} a side")
    encoded = io.BytesIO()
    image.save(encoded, "JPEG", quality=quality, subsampling=subsampling)
    return StoredImage(encoded.getvalue(), image.width, image.height, reason)


def _open(data: bytes, eighth: bool = False) -> Image.Image:
    """Decode with Pillow, at an eighth of the size if ``eighth`` (JPEG only)."""
    try:
        image = Image.open(io.BytesIO(data), formats=_FORMATS)
        if eighth:
            image.draft(None, (1, 1))
        image.load()
    except UnidentifiedImageError:  # its message holds a memory address, but rejected.jsonl must be reproducible
        raise Rejected("not an image that can be decoded") from None
    except MemoryError:
        raise
    except Image.DecompressionBombError:
        most = 2 * (Image.MAX_IMAGE_PIXELS or 0)
        raise Rejected(f"has more than {most:,} pixels, the most that are decoded: make it smaller") from None
    except Exception as error:  # Pillow's decoders raise nearly anything on damaged input
        raise Rejected(f"cannot be decoded ({' '.join(str(error).split()) or type(error).__name__})") from None
    return image


def _to_gray_or_rgb(image: Image.Image) -> Image.Image:
    """Convert to mode L or RGB: alpha is dropped, as in common image loaders, and 16 bits are reduced to the upper 8."""
    if image.mode == "L":
        return image
    # Pillow's mode "I" of a PNG or a PPM has 16 bits.
    if image.mode == "F" or (image.mode == "I" and image.format not in ("PNG", "PPM")):
        raise Rejected(f"has 32-bit pixels (mode {image.mode}), whose range is not known: convert it to 8 or 16 bits")
    if image.mode.startswith("I"):
        return Image.fromarray((np.asarray(image) >> 8).clip(0, 255).astype(np.uint8))  # (H, W)
    return image.convert("L" if image.mode in ("1", "LA", "La") else "RGB")
