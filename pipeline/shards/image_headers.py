"""Check the headers of encoded images when shards are written and verified: is the image complete, and can DALI decode it as it is?

Malformed headers must never reach DALI 2.4: it raises while its worker threads still use memory that it then frees, and the process
dies of a segmentation fault. (At training time a checksum shows that the bytes are the checked ones.) Damage within the compressed data
is found by decoding, not here.

Shards keep JPEGs, and those images of other formats of which DALI and Pillow decode the same pixels:

==========  ===================================================================================================
PNG         8 bits or fewer a channel; grey, colour or palette, with or without alpha; not animated
WebP        lossy or lossless, with or without alpha; not animated, without EXIF
TIFF        one page, 8 bits a channel, grey or RGB without alpha, upright; uncompressed, LZW or Deflate, in strips
BMP         24 bits, or a palette of 8 bits; not compressed
==========  ===================================================================================================

Alpha is dropped, as Pillow's ``convert("RGB")`` drops it. All others are stored as JPEGs: DALI 2.4 rounds 16 bits where Pillow
cuts them off, ignores that a TIFF is rotated, which Pillow does not, and cannot read WebP with some EXIF blocks.
"""

import io
import re
import struct
import zlib
from typing import NamedTuple

from PIL import Image

# Decoding time grows with the number of scans: an empty progressive scan over 16 megapixels has 50 bytes and takes 13 ms.
# Encoders write about ten.
MAX_SCANS = 100
LONGEST_SIDE = 65_500  # pixels, libjpeg's limit
_SOI, _EOI, _SOS = b"\xff\xd8", b"\xff\xd9", 0xDA
_MARKER = re.compile(rb"\xff[\x01-\xcf\xd8-\xfe]")  # excludes stuffed zeros and restart markers, which occur in compressed data
_SIZE_MARKERS = frozenset(range(0xC0, 0xD0)) - {0xC4, 0xC8, 0xCC}  # SOF0 to SOF15 without DHT, JPG, DAC
_ADAM7 = ((0, 0, 8, 8), (4, 0, 8, 8), (0, 4, 4, 8), (2, 0, 4, 4), (0, 2, 2, 4), (1, 0, 2, 2), (0, 1, 1, 2))  # left, top, steps
_WEBP_CHUNKS = {b"VP8 ", b"VP8L", b"VP8X", b"ALPH", b"ICCP", b"XMP "}
_TIFF_NUMBERS = (256, 257, 258, 259, 262, 273, 274, 277, 278, 279, 284, 317, 339)  # tags that are read
_BMP_HEADERS = (40, 108, 124)  # bytes of the header's versions that name what follows


class CutOff(ValueError):
    """A truncated image; re-encoding cannot restore it."""


class TooManyScans(ValueError):
    """A progressive JPEG crafted to exhaust decoders; re-encoding it would take as long."""


class FrameHeader(NamedTuple):
    """The fields of a JPEG's frame header (ITU-T T.81, B.2.2)."""

    coding: int  # second byte of the SOFn marker: 0xC0 baseline, 0xC1 extended sequential, 0xC2 progressive, ...
    precision: int  # bits per sample
    width: int  # pixels, as stored
    height: int
    components: int  # 1 grayscale, 3 YCbCr or RGB, 4 CMYK or YCCK


def jpeg_header(data: bytes) -> FrameHeader:
    """Parse the frame header of a complete JPEG (ITU-T T.81, Annex B), more strictly than decoders do. Raises ValueError: not a
    JPEG, or a damaged header; a CutOff or TooManyScans."""
    if data[:2] != _SOI:
        raise ValueError("not a JPEG")
    _check_scans(data)  # first, because decoders continue past damage in the header
    frame, place = None, 2
    while place + 4 <= len(data):
        if data[place] != 0xFF:
            raise ValueError("a JPEG with a damaged header")
        marker = data[place + 1]
        if marker == 0xFF:  # fill byte
            place += 1
            continue
        if marker in _SIZE_MARKERS and place + 10 <= len(data):
            precision, height, width, components = struct.unpack_from(">BHHB", data, place + 4)
            frame = FrameHeader(marker, precision, width, height, components)
        if marker == _SOS:
            # Compressed data cannot contain the end marker (zeros are stuffed): its presence shows that the image is complete.
            if frame is None or 0 in (frame.width, frame.height):
                raise ValueError("a JPEG without a size")
            if data.rfind(_EOI, place) < 0:
                raise CutOff("a JPEG that is cut off")
            return frame
        place += 2 + int.from_bytes(data[place + 2 : place + 4], "big")
    raise CutOff("a JPEG that is cut off")


def size_damage(data: bytes, size: tuple[int, int]) -> str:
    """Compare an image's header with the width and height for which crops are drawn; 6 us for a JPEG. Empty if they are the same."""
    try:
        found = jpeg_header(data)[2:4] if data.startswith(_SOI) else Image.open(io.BytesIO(data), formats=list(_CHECKS)).size
    except Exception:  # Pillow raises nearly anything; decoding will say what is wrong
        return ""
    return "" if found == size else "has {} x {} pixels, {} x {} by the sample table".format(*found, *size)


def _check_scans(data: bytes) -> None:
    """Count the scans of a progressive JPEG the way libjpeg finds them, skipping bytes between segments.

    Other codings store bits for every block in every scan, so that their size bounds their decoding time.
    """
    scans, place = 0, 2
    while marker := _MARKER.search(data, place):
        code, place = data[marker.end() - 1], marker.end()
        if code == _EOI[1] or code in _SIZE_MARKERS and code % 4 != 2:  # not SOF2, 6, 10 or 14
            return
        if code == _SOS:
            scans += 1
            if scans > MAX_SCANS:
                raise TooManyScans(f"a progressive JPEG of more than {MAX_SCANS} scans, made to take long")
        if code != 0x01 and code != _SOI[1]:  # TEM and SOI have no length field
            place += int.from_bytes(data[place : place + 2], "big")


def kept_format(data: bytes) -> tuple[str, int, int] | None:
    """The suffix in shards, the width and the height of an encoded image that is in the table above; None: another one.

    It is recognised by its header and the list of its parts. Raises CutOff: the end is missing.
    """
    try:
        image = Image.open(io.BytesIO(data), formats=list(_CHECKS))
        suffix, is_kept = _CHECKS[str(image.format)]
        kept = is_kept(data, image) and max(image.size) <= LONGEST_SIDE
    except CutOff:
        raise
    except Exception:  # Pillow and the checks raise nearly anything on damaged headers; decoding says what is wrong
        return None
    return (suffix, *image.size) if kept else None


def _is_kept_png(data: bytes, image: Image.Image) -> bool:
    if data[-12:-4] != b"\0\0\0\0IEND":
        raise CutOff("a PNG that is cut off")
    length, bits, colour, compression, row_filter, interlaced = struct.unpack_from(">I12x5B", data, 8)
    if length != 13 or bits > 8 or compression or row_filter or interlaced > 1:
        return False
    place, packed, content = 8, [], memoryview(data)
    while place < len(data):
        length, kind = struct.unpack_from(">I4s", data, place)
        (checksum,) = struct.unpack_from(">I", data, place + 8 + length)
        if kind == b"acTL" or zlib.crc32(content[place + 4 : place + 8 + length]) != checksum:
            return False
        if kind == b"IDAT":
            packed.append(content[place + 8 : place + 8 + length])
        place += 12 + length
    # Pillow leaves missing rows black, DALI fails.
    channels = {0: 1, 2: 3, 3: 1, 4: 2, 6: 4}[colour]
    # Bytes of the rows, each with the number of its filter, of all seven passes if it is interlaced (Adam7).
    passes, (width, height), size = _ADAM7 if interlaced else ((0, 0, 1, 1),), image.size, 0
    for left, top, across, down in passes:
        columns, rows = -(-(width - left) // across), -(-(height - top) // down)
        if columns > 0 and rows > 0:
            size += rows * (1 + (columns * bits * channels + 7) // 8)
    stream = zlib.decompressobj()
    return len(stream.decompress(b"".join(packed), size + 1)) == size and stream.eof


def _is_kept_webp(data: bytes, image: Image.Image) -> bool:
    end = 8 + int.from_bytes(data[4:8], "little")
    if end > len(data):
        raise CutOff("a WebP that is cut off")
    place = 12
    while place < end:
        kind, size = struct.unpack_from("<4sI", data, place)
        if kind not in _WEBP_CHUNKS or place + 8 + size > len(data):
            return False
        place += 8 + size + size % 2
    return True


def _is_kept_tiff(data: bytes, image: Image.Image) -> bool:
    tags = image.tag_v2  # type: ignore[attr-defined]
    order = "<" if data.startswith(b"II") else ">"
    (place,) = struct.unpack_from(order + "I", data, 4)
    (entries,) = struct.unpack_from(order + "H", data, place)
    channels, rows, compression = tags.get(277, 1), tags.get(278, image.height), tags.get(259, 1)
    plain = (
        len(tags) == entries  # Pillow leaves out what it cannot read, or is there twice
        and compression in (1, 5, 8, 32946)  # none, LZW, Deflate; of damaged PackBits decoders make different pixels
        and (tags.get(262), channels) in ((1, 1), (2, 3))  # photometric interpretation
        and tags.get(258) == (8,) * channels  # bits
        and tags.get(274, 1) == tags.get(284, 1) == 1  # orientation, planes
        and set(tags.get(339, (1,))) == {1}  # sample format
        and tags.get(317, 1) in (1, 2)  # predictor: none or horizontal
        and not tags.next  # further pages
        and not tags.keys() & {322, 323, 324, 325, 330, 338}  # tiles, further pictures, alpha
        and {tags.tagtype.get(tag, 3) for tag in _TIFF_NUMBERS} <= {3, 4}  # SHORT, LONG: DALI is stricter than Pillow
    )
    places, sizes = tags.get(273, ()), tags.get(279, ())  # of the strips
    if not plain or not len(places) == len(sizes) == -(-image.height // rows) or not all(sizes):
        return False
    if any(place + size > len(data) for place, size in zip(places, sizes)):
        raise CutOff("a TIFF that is cut off")
    return compression != 1 or sum(sizes) == image.width * image.height * channels


def _is_kept_bmp(data: bytes, image: Image.Image) -> bool:
    length, start, header, width, height, planes, bits, compression = struct.unpack_from("<I4xIIiiHHI", data, 2)
    if header not in _BMP_HEADERS or planes != 1 or bits not in (8, 24) or compression != 0 or width <= 0:
        return False
    (colours,) = struct.unpack_from("<I", data, 46)
    if colours > 256 or start != 14 + header + (4 * (colours or 256) if bits == 8 else 0):
        return False
    if start + (width * bits + 31) // 32 * 4 * abs(height) > len(data):
        raise CutOff("a BMP that is cut off")
    return length in (0, len(data))


# Pillow's name of a format -> the suffix of its members in shards, and whether an image of it is kept.
_CHECKS = {
    "PNG": ("png", _is_kept_png),
    "WEBP": ("webp", _is_kept_webp),
    "TIFF": ("tif", _is_kept_tiff),
    "BMP": ("bmp", _is_kept_bmp),
}
