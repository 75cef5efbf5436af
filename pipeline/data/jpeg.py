"""Checks that an image is complete by parsing its headers, in microseconds, when shards are written and verified.

Images with malformed headers must never reach DALI 2.4: it raises while its worker threads still use memory that it then frees,
and the process dies of a segmentation fault. (At training time a checksum shows that the bytes are the checked ones.) Damage
within the compressed data is not detected here.
"""

from __future__ import annotations

import re
from typing import NamedTuple

# Decoding time grows with the number of scans: an empty progressive scan over 16 megapixels has 50 bytes and takes 13 ms.
# Encoders write about ten.
MAX_SCANS = 100

_SOI, _EOI, _SOS = b"\xff\xd8", b"\xff\xd9", 0xDA
_MARKER = re.compile(rb"\xff[\x01-\xcf\xd8-\xfe]")  # excludes stuffed zeros and restart markers, which occur in compressed data
_SIZE_MARKERS = frozenset(range(0xC0, 0xD0)) - {0xC4, 0xC8, 0xCC}  # SOF0 to SOF15 without DHT, JPG, DAC
_PNG = b"\x89PNG\r\n\x1a\n"  # one image of ImageNet is a PNG under a JPEG's name


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


def image_size(data: bytes) -> tuple[int, int]:
    """(width, height) in pixels, as stored, of a complete JPEG or PNG.

    Raises:
        ValueError: neither of the two, damaged or truncated; the message says which.
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
    """Parse the frame header of a complete JPEG (ITU-T T.81, Annex B).

    Raises:
        ValueError: not a JPEG, or a damaged header.
        CutOff: the end is missing.
        TooManyScans: more than ``MAX_SCANS`` scans.
    """
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
            height, width = (
                int.from_bytes(data[place + 5 : place + 7], "big"),
                int.from_bytes(data[place + 7 : place + 9], "big"),
            )
            frame = FrameHeader(marker, data[place + 4], width, height, data[place + 9])
        if marker == _SOS:
            # Compressed data cannot contain the end marker (zeros are stuffed): its presence shows that the image is complete.
            if frame is None or 0 in (frame.width, frame.height):
                raise ValueError("a JPEG without a size")
            if data.rfind(_EOI, place) < 0:
                raise CutOff("a JPEG that is cut off")
            return frame
        place += 2 + int.from_bytes(data[place + 2 : place + 4], "big")
    raise CutOff("a JPEG that is cut off")


def _check_scans(data: bytes) -> None:
    """Count the scans of a progressive JPEG the way libjpeg finds them, skipping bytes between segments.

    Other codings store bits for every block in every scan, so that their size bounds their decoding time.

    Raises:
        TooManyScans: more than ``MAX_SCANS``.
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
