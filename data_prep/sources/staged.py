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

from data_prep.sources.base import Entry, Source, changed, in_order
from data_prep.sources.labels import NoClass, without_class
from pipeline.errors import UserError
from pipeline.files import replace_file

_PART = 1 << 44  # an entry's place is number of the part times this, plus the offset in its file: parts of up to 17 TB


@dataclass(frozen=True)
class Part:
    """A file of the source. Attributes: name: for messages; identity: of its content, such as path and size; images: reads it."""

    name: str
    identity: str
    images: Callable[[], Iterable[tuple[str, str, bytes]]]  # (name, class or NoClass, encoded image) each


class Staged(Source):
    """Images that were copied into a staging folder.

    Args:
        path: of the source, for the manifest and messages.
        kind: of the source.
        parts: its files, in order.
        folder: the staging folder of this split.
        class_names: in index order; None: those that occur, numbers in numeric order.
        finished: the shards are written, so that the list of images is enough.
        say: called with a message for each part.
        skip: leave out images without a class, instead of refusing the first part that has some.

    Raises:
        UserError: a part cannot be read, an image has no class, two images have the same name, or there are none.
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
        skip: bool = False,
    ) -> None:
        self.kind, self._folder = kind, folder
        folder.mkdir(parents=True, exist_ok=True)
        entries: list[Entry] = []
        without: list[str] = []
        for number, part in enumerate(parts):
            names, classes, offsets, sizes, its = _stage(part, folder, number, f"{number + 1} of {len(parts)}", finished, say)
            self.unlabelled = without_class(part.name, without := without + its, skip)
            for name, class_name, offset, size in zip(names, classes, offsets.tolist(), sizes.tolist()):
                entries.append(Entry(class_name, name, size, number * _PART + offset))
        if not entries:
            raise UserError(f"{path} must have at least 1 image with a class, got 0", "pass a labelled data set, or --split")
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
) -> tuple[list[str], list[str], np.ndarray, np.ndarray, list[str]]:
    """Copy a part, unless it is there: names, classes, offsets and sizes of its images; and those without a class, not copied."""
    index, images = folder / f"{number:05d}.npz", folder / f"{number:05d}.bin"
    try:
        with np.load(index) as held:
            about = json.loads(held["about"].tobytes())
            if about["identity"] == part.identity and (finished or images.exists()):
                return about["names"], about["classes"], held["offsets"], held["sizes"], about["unlabelled"]
    except (OSError, EOFError, ValueError, KeyError, zipfile.BadZipFile):
        pass
    say(f"copying {part.name} ({place})")
    names: list[str] = []
    classes: list[str] = []
    sizes: list[int] = []
    without: list[str] = []

    def copy(file: BinaryIO) -> None:
        for name, class_name, data in _read(part):
            if isinstance(class_name, NoClass):
                without.append(f"{name}: {class_name}")
                continue
            names.append(name)
            classes.append(class_name)
            sizes.append(len(data))
            file.write(data)

    replace_file(images, copy)
    lengths = np.array(sizes, dtype=np.int64)  # (n,)
    offsets = np.cumsum(lengths) - lengths  # (n,)
    about = {"identity": part.identity, "names": names, "classes": classes, "unlabelled": without}
    encoded = np.frombuffer(json.dumps(about).encode(), dtype=np.uint8)
    replace_file(index, lambda file: np.savez(file, about=encoded, offsets=offsets, sizes=lengths))
    return names, classes, offsets, lengths, without


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
