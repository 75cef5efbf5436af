"""Read a run's pictures from the event files that it writes for TensorBoard.

An event file is a sequence of records: length (8 bytes), checksum (4), an ``Event`` as protocol buffer, checksum (4). Those that a later
start repeats are left out, as TensorBoard does: a file says from which step on it takes the place of earlier ones.
"""

import os
import struct
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

IMAGES = "train/images"  # the name of the pictures of training batches
_HEADER, _FOOTER = 12, 4  # bytes
_BEGINNING = 8  # records of a file in which it tells from which step on it counts
_SMALLEST_PICTURE = 512  # bytes of a record; scalars take less
_BLOCK = 1 << 22


@dataclass(frozen=True)
class Found:
    """Where a picture lies."""

    name: str
    step: int
    time: float
    file: Path
    place: int
    size: int

    @property
    def key(self) -> str:
        """Tells it from the run's other pictures."""
        return f"{self.name}@{self.step}"

    def png(self) -> bytes:
        """The encoded image. Raises OSError, ValueError: it is no longer there."""
        with open(self.file, "rb") as file:
            file.seek(self.place)
            event = _event(file.read(self.size))
        for value in event.summary.value:
            if value.tag == self.name and value.HasField("image"):
                return value.image.encoded_image_string
        raise ValueError(f"{self.file}: {self.key} is not there")


class PictureFiles:
    """The pictures that count, as the files grow. ``folder``: ``RUN/tensorboard``, which need not exist yet."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._places: dict[Path, tuple[int, int]] = {}  # bytes and records that were read
        self._found: dict[str, Found] = {}

    def look(self) -> list[Found]:
        """All that count, by step."""
        for file in sorted(self._folder.glob("events.out.tfevents.*")):
            with suppress(OSError, ValueError):
                self._read(file)
        return sorted(self._found.values(), key=lambda found: (found.step, found.name))

    def _read(self, path: Path) -> None:
        place, number = self._places.get(path, (0, 0))
        with open(path, "rb", buffering=_BLOCK) as file:
            size = os.fstat(file.fileno()).st_size
            while place + _HEADER <= size:
                file.seek(place)  # within the buffer this reads nothing
                (length,) = struct.unpack_from("<Q", file.read(_HEADER))
                end = place + _HEADER + length + _FOOTER
                if end > size:
                    break  # it is being written
                if number < _BEGINNING or length >= _SMALLEST_PICTURE:
                    self._note(path, place + _HEADER, file.read(length))
                place, number = end, number + 1
                self._places[path] = place, number

    def _note(self, path: Path, place: int, record: bytes) -> None:
        event = _event(record)
        if event.HasField("session_log"):
            self._found = {key: found for key, found in self._found.items() if found.step < event.step or found.file == path}
        for value in event.summary.value:
            if value.HasField("image"):
                found = Found(value.tag, event.step, event.wall_time, path, place, len(record))
                self._found[found.key] = found


def _event(record: bytes) -> Any:
    from google.protobuf.message import DecodeError
    from tensorboard.compat.proto.event_pb2 import Event

    try:
        return Event.FromString(record)
    except DecodeError as error:
        raise ValueError(str(error)) from None
