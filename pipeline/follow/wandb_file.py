"""What an offline file of Weights & Biases holds (``run-ID.wandb``), as far as it was written when its process ended.

The file is a LevelDB log: after a header of 7 bytes, blocks of 32 KiB; in these, chunks of checksum (4 bytes), length (2) and type (1:
whole, 2: first, 3: middle, 4: last part of a record). A record is a protocol buffer of the client's own. The client keeps up to a
block in memory, so a kill costs the newest rows; they are sent again.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

_FILE_HEADER, _CHUNK_HEADER, _BLOCK = 7, 7, 1 << 15  # bytes
_WHOLE, _LAST = 1, 4


def history(path: Path) -> Iterator[dict[str, Any]]:
    """The rows of an offline file: name -> value, with ``_step``; names of parts are joined by a dot.

    Raises:
        OSError, ValueError: it cannot be read, or not any further.
    """
    from google.protobuf.message import DecodeError
    from wandb.proto.wandb_internal_pb2 import Record

    for data in _records(path.read_bytes()):
        try:
            record = Record.FromString(data)
        except DecodeError as error:
            raise ValueError(f"{path} is damaged ({error})") from None
        if record.WhichOneof("record_type") == "history":
            items = record.history.item
            yield {item.key or ".".join(item.nested_key): json.loads(item.value_json) for item in items}


def _records(data: bytes) -> Iterator[bytes]:
    place, begun = _FILE_HEADER, b""
    while place + _CHUNK_HEADER <= len(data):
        left = _BLOCK - place % _BLOCK
        if left < _CHUNK_HEADER:
            place += left  # the rest of a block is empty where no header fits
            continue
        _, length, kind = struct.unpack_from("<IHB", data, place)
        place += _CHUNK_HEADER
        if kind == 0 or place + length > len(data):
            return  # not yet written
        begun += data[place : place + length]
        place += length
        if kind in (_WHOLE, _LAST):
            yield begun
            begun = b""
