"""Images other than JPEG that shards hold as they are: those of which DALI and Pillow decode the same pixels.

==========  ===================================================================================================
PNG         8 bits or fewer a channel; grey, colour or palette, with or without alpha; not animated
WebP        lossy or lossless, with or without alpha; not animated, without EXIF
TIFF        one page, 8 bits a channel, grey or RGB without alpha, upright; uncompressed, LZW or Deflate, in strips
BMP         24 bits, or a palette of 8 bits; not compressed
==========  ===================================================================================================

Alpha is dropped, as Pillow's ``convert("RGB")`` drops it. What is not listed is stored as a JPEG: DALI 2.4 rounds 16 bits where Pillow
cuts them off, ignores that a TIFF is rotated, which Pillow does not, and cannot read WebP with some EXIF blocks. Headers are parsed
strictly, because malformed ones must never reach DALI (:mod:`pipeline.data.jpeg`).
"""

from __future__ import annotations

import struct
import zlib
from typing import NamedTuple

from pipeline.data.jpeg import CutOff

IMAGE_SUFFIXES = (".jpeg", ".jpg", ".png", ".webp", ".tif", ".tiff", ".bmp")  # of the files in folders, zips and tars
_JPEG_SUFFIXES = (".jpeg", ".jpg")
FORMATS = ("png", "webp", "tif", "bmp")  # suffixes of these members of a shard
_LONGEST_SIDE = 65_500  # pixels, as of a JPEG
_PNG = b"\x89PNG\r\n\x1a\n"
_PNG_DEPTHS = {0: (1, 2, 4, 8), 2: (8,), 3: (1, 2, 4, 8), 4: (8,), 6: (8,)}  # colour type -> bits a channel
_PNG_CHANNELS = {0: 1, 2: 3, 3: 1, 4: 2, 6: 4}  # colour type -> channels
_ADAM7 = ((0, 0, 8, 8), (4, 0, 8, 8), (0, 4, 4, 8), (2, 0, 4, 4), (0, 2, 2, 4), (1, 0, 2, 2), (0, 1, 1, 2))  # left, top, steps
_MOST_PIXELS = 178_956_970  # above, Pillow refuses an image
_AT_ONCE = 1 << 20  # bytes
_WEBP_CHUNKS = {b"VP8 ", b"VP8L", b"VP8X", b"ALPH", b"ICCP", b"XMP "}
_TIFF_ORDER = {b"II*\0": "<", b"MM\0*": ">"}
_TIFF_SIZES = {1: 1, 2: 1, 3: 2, 4: 4, 5: 8, 6: 1, 7: 1, 8: 2, 9: 4, 10: 8, 11: 4, 12: 8}  # bytes of a value by type
_BMP_HEADERS = (40, 108, 124)  # bytes of the header's versions that name what follows


class KeptFormat(NamedTuple):
    """What the header of such an image says."""

    suffix: str  # of its member in a shard
    width: int  # pixels
    height: int


def claims_jpeg(name: str) -> bool:
    """Whether a file's name is that of a JPEG."""
    return name.lower().endswith(_JPEG_SUFFIXES)


def kept_format(data: bytes) -> KeptFormat | None:
    """What an encoded image is if it is one of the table above, by its header and the list of its parts; None: another one.

    Raises:
        CutOff: the end is missing.
    """
    found: KeptFormat | None = None
    try:
        if data.startswith(_PNG):
            found = _png(data)
        elif data[:4] == b"RIFF" and data[8:12] == b"WEBP":
            found = _webp(data)
        elif data[:4] in _TIFF_ORDER:
            found = _tiff(data)
        elif data[:2] == b"BM":
            found = _bmp(data)
    except (struct.error, IndexError):  # a header that ends too early: Pillow says what is wrong with it
        return None
    return found if found and 0 < min(found[1:]) and max(found[1:]) <= _LONGEST_SIDE else None


def _png(data: bytes) -> KeptFormat | None:
    if data[-12:-4] != b"\0\0\0\0IEND":
        raise CutOff("a PNG that is cut off")
    length, kind, width, height, depth, colour, *methods = struct.unpack_from(">I4sIIBBBBB", data, 8)
    if (length, kind) != (13, b"IHDR") or depth not in _PNG_DEPTHS.get(colour, ()) or methods not in ([0, 0, 0], [0, 0, 1]):
        return None
    place, packed, pixels = 8, [], memoryview(data)
    while place < len(data):
        length, kind = struct.unpack_from(">I4s", data, place)
        (checksum,) = struct.unpack_from(">I", data, place + 8 + length)
        if kind == b"acTL" or zlib.crc32(pixels[place + 4 : place + 8 + length]) != checksum:
            return None
        if kind == b"IDAT":
            packed.append(pixels[place + 8 : place + 8 + length])
        place += 12 + length
    whole = width * height <= _MOST_PIXELS and _png_bytes(width, height, depth * _PNG_CHANNELS[colour], bool(methods[2]))
    return KeptFormat("png", width, height) if whole and _inflates_to(packed, whole) else None


def _png_bytes(width: int, height: int, bits: int, interlaced: bool) -> int:
    """Bytes of a PNG's rows, each with the number of its filter, of all seven passes if it is interlaced (Adam7)."""
    passes = _ADAM7 if interlaced else ((0, 0, 1, 1),)
    sizes = [(-(-(width - left) // across), -(-(height - top) // down)) for left, top, across, down in passes]
    return sum(rows * (1 + (columns * bits + 7) // 8) for columns, rows in sizes if columns > 0 and rows > 0)


def _inflates_to(parts: list[memoryview], size: int) -> bool:
    """Whether parts of a zlib stream give so many bytes: Pillow leaves rows that are missing black, DALI fails."""
    stream, total = zlib.decompressobj(), 0
    for part in parts:
        rest: bytes | memoryview = part
        while len(rest) and total <= size:
            try:
                total += len(stream.decompress(rest, _AT_ONCE))
            except zlib.error:
                return False
            rest = stream.unconsumed_tail
    return total == size and stream.eof


def _webp(data: bytes) -> KeptFormat | None:
    (length,) = struct.unpack_from("<I", data, 4)
    if length + 8 > len(data):
        raise CutOff("a WebP that is cut off")
    place, size = 12, (0, 0)
    while place < length + 8:
        kind, part = struct.unpack_from("<4sI", data, place)
        if kind not in _WEBP_CHUNKS or place + 8 + part > len(data):
            return None
        if kind == b"VP8 ":
            width, height = struct.unpack_from("<HH", data, place + 14)
            size = width & 0x3FFF, height & 0x3FFF
        elif kind == b"VP8L":
            (bits,) = struct.unpack_from("<I", data, place + 9)
            size = (bits & 0x3FFF) + 1, (bits >> 14 & 0x3FFF) + 1
        place += 8 + part + part % 2
    return KeptFormat("webp", *size)


def _tiff(data: bytes) -> KeptFormat | None:
    order = _TIFF_ORDER[data[:4]]
    (place,) = struct.unpack_from(order + "I", data, 4)
    (count,) = struct.unpack_from(order + "H", data, place)
    tags: dict[int, tuple[int, ...]] = {}
    for entry in range(place + 2, place + 2 + 12 * count, 12):
        tag, kind, values = struct.unpack_from(order + "HHI", data, entry)
        size = _TIFF_SIZES.get(kind, 0) * values
        (start,) = struct.unpack_from(order + "I", data, entry + 8) if size > 4 else (entry + 8,)
        if tag in tags or not size or start + size > len(data):
            return None
        if kind in (3, 4):
            tags[tag] = struct.unpack_from(f"{order}{values}{'HI'[kind - 3]}", data, start)
        else:
            tags[tag] = ()
    (following,) = struct.unpack_from(order + "I", data, place + 2 + 12 * count)
    channels = tags.get(277, (1,))
    plain = (  # compression, photometric interpretation, orientation, planes, sample format
        tags.get(259, (1,))
        in ((1,), (5,), (8,), (32946,))  # none, LZW, Deflate; of damaged PackBits decoders make different pixels
        and (tags.get(262), channels) in (((1,), (1,)), ((2,), (3,)))
        and tags.get(258) == (8,) * channels[0]
        and tags.get(274, (1,)) == tags.get(284, (1,)) == (1,)
        and set(tags.get(339, (1,))) == {1}
        and tags.get(317, (1,)) in ((1,), (2,))  # predictor: none or horizontal
        and not following
        and not tags.keys() & {322, 323, 324, 325, 330, 338}  # tiles, further pictures, alpha
    )
    width, height, rows = tags.get(256, ()), tags.get(257, ()), tags.get(278, tags.get(257, ()))
    if not plain or (len(width), len(height), len(rows)) != (1, 1, 1) or not rows[0]:
        return None
    places, sizes = tags.get(273, ()), tags.get(279, ())  # of the strips
    if len(places) != len(sizes) or len(places) != -(-height[0] // rows[0]) or not all(sizes):
        return None
    if any(place + size > len(data) for place, size in zip(places, sizes)):
        raise CutOff("a TIFF that is cut off")
    unpacked = width[0] * height[0] * channels[0]
    if tags.get(259, (1,)) == (1,) and sum(sizes) != unpacked:
        return None
    return KeptFormat("tif", width[0], height[0])


def _bmp(data: bytes) -> KeptFormat | None:
    length, _, start, header, width, height, planes, bits, compression = struct.unpack_from("<IIIIiiHHI", data, 2)
    if header not in _BMP_HEADERS or planes != 1 or bits not in (8, 24) or compression != 0 or width <= 0:
        return None
    (colours,) = struct.unpack_from("<I", data, 46)
    if colours > 256 or start != 14 + header + (4 * (colours or 256) if bits == 8 else 0):
        return None
    if start + (width * bits + 31) // 32 * 4 * abs(height) > len(data):
        raise CutOff("a BMP that is cut off")
    return KeptFormat("bmp", width, abs(height)) if length in (0, len(data)) else None
