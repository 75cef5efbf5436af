"""Copy sources that can only be read from front to back, such as parquet files and tars behind a URL.

Shards are shuffled over the whole set, which takes random access. So the images are first copied once, part by part, into files of
the staging folder: ``NNNNN.bin`` has the encoded images of a part one after another, ``NNNNN.npz`` their names, classes, offsets and
sizes. The second is written last, so that an interrupted copy goes on with the next part.
"""

from __future__ import annotations

import json
import zipfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import BinaryIO

import numpy as np

from data_prep.sources.base import Entry, ListedSource, changed, in_order
from pipeline.errors import UserError
from pipeline.files import replace_file

_PART = 1 << 44  # an entry's place is number of the part times this, plus the offset in its file: parts of up to 17 TB


@dataclass(frozen=True)
class Part:
    """A file of the source. Attributes: name: for messages; identity: of its content, such as path and size; images: reads it."""

    name: str
    identity: str
    images: Callable[[], Iterable[tuple[str, str, bytes]]]  # (name, class, encoded image) each


class Staged(ListedSource):
    """Images that were copied into a staging folder.

    Args:
        path: of the source, for the manifest and messages.
        kind: of the source.
        parts: its files, in order.
        folder: the staging folder of this split.
        class_names: in index order; None: those that occur, numbers in numeric order.
        finished: the shards are written, so that the list of images is enough.
        say: called with a message for each part.

    Raises:
        UserError: a part cannot be read, two images have the same name, or there are none.
    """

    def __init__(
        self,
        path: str | Path,
        kind: str,
        parts: Sequence[Part],
        folder: Path,
        class_names: Sequence[str] | None = None,
        finished: bool = False,
        say: Callable[[str], object] = print,
    ) -> None:
        self.kind, self._folder = kind, folder
        folder.mkdir(parents=True, exist_ok=True)
        entries: list[Entry] = []
        for number, part in enumerate(parts):
            names, classes, offsets, sizes = _stage(part, folder, number, f"{number + 1} of {len(parts)}", finished, say)
            for name, class_name, offset, size in zip(names, classes, offsets.tolist(), sizes.tolist()):
                entries.append(Entry(class_name, name, size, number * _PART + offset))
        if not entries:
            raise UserError(
                f"{path} must have at least 1 image with a class, got 0", "pass a data set for image classification"
            )
        if len({(entry.class_name, entry.name) for entry in entries}) != len(entries):
            raise UserError(f"{path} must have distinct names within a class, got one twice", "remove the duplicate files")
        super().__init__(path, list(class_names or in_order({entry.class_name for entry in entries})), entries)

    def _bytes(self, sample: int) -> bytes:
        number, offset = divmod(int(self._places[sample]), _PART)
        size, file = int(self._sizes[sample]), self._folder / f"{number:05d}.bin"
        try:
            opened = _opened(str(file))
            opened.seek(offset)
            data = opened.read(size)
        except FileNotFoundError:
            raise changed(file, "is gone") from None
        if len(data) != size:
            raise changed(file, f"ends within {self._names[sample]}")
        return data


def _stage(
    part: Part, folder: Path, number: int, place: str, finished: bool, say: Callable[[str], object]
) -> tuple[list[str], list[str], np.ndarray, np.ndarray]:
    """Copy a part, unless it is there: names, classes, offsets and sizes of its images."""
    index, images = folder / f"{number:05d}.npz", folder / f"{number:05d}.bin"
    try:
        with np.load(index) as held:
            about = json.loads(held["about"].tobytes())
            if about["identity"] == part.identity and (finished or images.exists()):
                return about["names"], about["classes"], held["offsets"], held["sizes"]
    except (OSError, EOFError, ValueError, KeyError, zipfile.BadZipFile):
        pass
    say(f"copying {part.name} ({place})")
    names: list[str] = []
    classes: list[str] = []
    sizes: list[int] = []

    def copy(file: BinaryIO) -> None:
        for name, class_name, data in _read(part):
            names.append(name)
            classes.append(class_name)
            sizes.append(len(data))
            file.write(data)

    replace_file(images, copy)
    lengths = np.array(sizes, dtype=np.int64)  # (n,)
    offsets = np.cumsum(lengths) - lengths  # (n,)
    encoded = np.frombuffer(
        json.dumps({"identity": part.identity, "names": names, "classes": classes}).encode(), dtype=np.uint8
    )
    replace_file(index, lambda file: np.savez(file, about=encoded, offsets=offsets, sizes=lengths))
    return names, classes, offsets, lengths


def _read(part: Part) -> Iterator[tuple[str, str, bytes]]:
    try:
        yield from part.images()
    except (UserError, MemoryError, KeyboardInterrupt):
        raise
    except Exception as error:  # readers of foreign formats, and networks, raise nearly anything
        if isinstance(error, OSError) and error.filename is not None:
            raise
        reason = " ".join(str(error).split())[:200] or type(error).__name__
        raise UserError(f"{part.name} cannot be read ({reason})", "download it again; parts that are copied are kept") from None


def drop_copies(stage: Path) -> None:
    """Remove the copied images of all splits, whose shards are written. The lists stay: the next start need not read the source."""
    for images in stage.glob("*/*.bin"):
        images.unlink()


# Cached: a worker reads the images of many shards.
@lru_cache(maxsize=64)
def _opened(path: str) -> BinaryIO:
    return open(path, "rb")
