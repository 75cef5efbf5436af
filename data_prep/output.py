"""Write a shard set to a folder; :mod:`data_prep.store_output` writes it to a store.

The sharder finishes every file in :attr:`Output.folder`, then publishes it. In a folder, what is finished is published; with a store,
the folder is a scratch folder of this machine, and publishing uploads the whole file. :class:`FolderLock` keeps writers apart, and the
space that shards need is estimated before hours of work instead of found missing after them.
"""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TypeVar

from data_prep import SPLITS
from data_prep.sources import Source
from pipeline.errors import UserError
from pipeline.files import check_space, lock_bytes
from pipeline.shards.image_checks import ImageRules
from pipeline.shards.manifest import MANIFEST, ShardManifest
from pipeline.stores.place import Place

LOCK_FILE = ".lock"
# Per sample: .cls and .json of one 512-byte block each, three headers, the image's padding, index line and table row.
_BYTES_PER_SAMPLE = 3 * 1024
_MARGIN = 1.02  # slack, for example for images that grow when re-encoded
_ASPECT_RATIO = 1.5  # upper estimate of the average; most photographs are 4:3
_BYTES_PER_PIXEL = ((90, 0.5), (95, 0.8), (100, 2.0))  # (quality up to, bytes): upper estimate for photographs at 4:2:0
_MANIFEST_BYTE = 0
_SHARDS_OF_A_SPLIT = 1 << 32


class FolderLock:
    """POSIX locks for concurrent writers, on one node or several.

    Locks bytes of an empty file (:func:`pipeline.files.lock_bytes`), one for the manifest and one per shard, so that the tasks
    of a job array write concurrently and no two processes write the same shard.

    Args:
        folder: the shard set.
    """

    def __init__(self, folder: Path) -> None:
        self._path = folder / LOCK_FILE
        self._file = open(self._path, "ab")  # the only handle: closing any handle of a file releases all of its POSIX locks

    def __enter__(self) -> FolderLock:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def take_shards(self, split: str, numbers: Iterable[int]) -> None:
        """Lock shards until this object is closed.

        Raises:
            UserError: another process is writing one of them.
        """
        first = 1 + SPLITS.index(split) * _SHARDS_OF_A_SPLIT
        for number in numbers:
            if not lock_bytes(self._file.fileno(), self._path, first + number, 1):
                raise UserError(
                    f"{self._path.parent}: {split} shard {number} is being written by another process",
                    "wait for it or stop it",
                )

    @contextmanager
    def manifest(self) -> Iterator[None]:
        """Hold the lock on the manifest and the lists beside it; blocks until it is free."""
        lock_bytes(self._file.fileno(), self._path, _MANIFEST_BYTE, 1, wait=True)
        try:
            yield
        finally:
            fcntl.lockf(self._file, fcntl.LOCK_UN, 1, _MANIFEST_BYTE)


Result = TypeVar("Result")


class Output:
    """A shard set in a folder. Picklable: workers publish what they have written.

    Args:
        folder: the shard set; need not exist.

    Attributes:
        folder: where files are finished. What is read back, such as the manifest and the records of finished shards, is there too,
            as of the last :meth:`update`.
        place: the shard set, for messages and for its readers.
        locks: whether :class:`FolderLock` keeps all writers of the set apart.
    """

    locks = True

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        self.place: Place = self.folder

    def __enter__(self) -> Output:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def refresh(self) -> None:
        """Bring what other processes have published into the folder."""

    def update(self, lock: FolderLock, act: Callable[[], Result]) -> Result:
        """Call ``act``, which reads and publishes files that all writers of the set share, without another one in between.

        It is called again if another one came in between all the same.
        """
        with lock.manifest():
            return act()

    def sizes(self) -> dict[str, int]:
        """Name and bytes of the files of the set, as of the last :meth:`update`."""
        found = {}
        for entry in os.scandir(self.folder):
            with suppress(FileNotFoundError):  # a temporary file of another process
                found[entry.name] = entry.stat().st_size
        return found

    def manifest(self) -> ShardManifest | None:
        """The manifest, as of the last :meth:`update`; None while there is none."""
        return ShardManifest.read(self.folder) if (self.folder / MANIFEST).exists() else None

    def publish(self, name: str, sha256: str = "") -> None:
        """Make a finished file of the folder part of the set, instead of one that has its name.

        Args:
            name: of the file.
            sha256: of its content, if it is known.
        """

    def withdraw(self, names: Iterable[str]) -> None:
        """Remove files from the set, if they are there."""
        for name in names:
            (self.folder / name).unlink(missing_ok=True)

    def check_space(self, needed: int, written: int, share_at_once: float, estimate: bool) -> None:
        """Check that the shards fit on the disk.

        Args:
            needed: bytes of the whole split.
            written: bytes already written.
            share_at_once: of the split's shards, those that workers write at the same time.
            estimate: whether ``needed`` is an estimate, because images are resized; for the message.

        Raises:
            UserError: they do not.
        """
        check_space_for_shards(self.folder, needed, written, estimate)


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
        otherwise: what can be done instead of freeing space.

    Raises:
        UserError: not enough free space.
    """
    missing = max(0, needed - written)
    try:
        check_space(folder, missing)
    except OSError:
        about = " (an estimate: images are resized)" if estimate else ""
        raise UserError(
            f"the disk of {folder} must have {missing / 1e9:.2f} GB free for the shards{about}, got "
            f"{shutil.disk_usage(folder).free / 1e9:.2f} GB",
            f"free some space or {otherwise}",
        ) from None
