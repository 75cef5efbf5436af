"""Is this a whole image? A look at the headers that costs microseconds, when shards are written and when they are verified.

DALI 2.4 cannot be trusted with anything else: when an image's header cannot be parsed it raises while its worker threads
still use what it frees, and the process dies with a segmentation fault. (At training time a checksum says that the bytes
are still those that were looked at.) Damage inside the compressed data is not found here.
"""

from __future__ import annotations

import re
from typing import NamedTuple

# Decoding time grows with the scans: a progressive scan over 16 million pixels that says nothing is 50 bytes and costs 13 ms.
# Encoders write about ten of them.
MAX_SCANS = 100

_SOI, _EOI, _SOS = b"\xff\xd8", b"\xff\xd9", 0xDA
_MARKER = re.compile(rb"\xff[\x01-\xcf\xd8-\xfe]")  # not a stuffed zero or a restart marker, which compressed data holds
_SIZE_MARKERS = frozenset(range(0xC0, 0xD0)) - {0xC4, 0xC8, 0xCC}  # SOF0 to SOF15 without DHT, JPG, DAC
_PNG = b"\x89PNG\r\n\x1a\n"  # one image of ImageNet is a PNG under a JPEG's name


class CutOff(ValueError):
    """An image that ends before it should: nothing can restore it."""


class TooManyScans(ValueError):
    """A progressive JPEG made to keep decoders busy; to encode it anew would take as long."""


class FrameHeader(NamedTuple):
    """What a JPEG's frame header says (ITU-T T.81, B.2.2)."""

    coding: int  # second byte of the SOFn marker: 0xC0 baseline, 0xC1 extended sequential, 0xC2 progressive, ...
    precision: int  # bits per sample
    width: int  # pixels, as stored
    height: int
    components: int  # 1 grayscale, 3 YCbCr or RGB, 4 CMYK or YCCK


def image_size(data: bytes) -> tuple[int, int]:
    """(width, height) in pixels, as stored, of a complete JPEG or PNG.

    Raises:
        ValueError: neither, or cut off; the message says which.
    """
    if data[:8] == _PNG:
        if data[-12:-4] != b"\0\0\0\0IEND":
            raise CutOff("a PNG that is cut off")
        if any(data[16:18] + data[20:22]):
            raise ValueError("a PNG of more than 65,535 pixels a side")
        return int.from_bytes(data[16:20], "big"), int.from_bytes(data[20:24], "big")
    frame = frame_header(data)
    return frame.width, frame.height


def frame_header(data: bytes) -> FrameHeader:
    """The frame header of a complete JPEG (ITU-T T.81, Annex B).

    Raises:
        ValueError: not a JPEG, or one with a damaged header.
        CutOff: a JPEG whose end is missing.
        TooManyScans: more than ``MAX_SCANS``.
    """
    if data[:2] != _SOI:
        raise ValueError("not a JPEG")
    _check_scans(data)  # first: decoders go on where the header is damaged
    frame, place = None, 2
    while place + 4 <= len(data):
        if data[place] != 0xFF:
            raise ValueError("a JPEG with a damaged header")
        marker = data[place + 1]
        if marker == 0xFF:  # fill byte
            place += 1
            continue
        if marker in _SIZE_MARKERS and place + 10 <= len(data):
            height, width = (
                int.from_bytes(data[place + 5 : place + 7], "big"),
                int.from_bytes(data[place + 7 : place + 9], "big"),
            )
            frame = FrameHeader(marker, data[place + 4], width, height, data[place + 9])
        if marker == _SOS:
            # Compressed data never contains the end marker, so finding it means that the data is all there.
            if frame is None or 0 in (frame.width, frame.height):
                raise ValueError("a JPEG without a size")
            if data.rfind(_EOI, place) < 0:
                raise CutOff("a JPEG that is cut off")
            return frame
        place += 2 + int.from_bytes(data[place + 2 : place + 4], "big")
    raise CutOff("a JPEG that is cut off")


def _check_scans(data: bytes) -> None:
    """Count a progressive JPEG's scans as libjpeg finds them, which passes over what lies between two segments.

    Other codings need bits for every block of every scan, so that their time is bounded by their size.
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
        if code != 0x01 and code != _SOI[1]:  # these two have no length
            place += int.from_bytes(data[place : place + 2], "big")
