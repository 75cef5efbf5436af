"""Where a shard set is written: a folder, or a store (:mod:`data_prep.store_output`).

The sharder finishes every file in :attr:`Output.folder`, then publishes it. In a folder, what is finished is published; with a store,
the folder is a scratch folder of this machine, and publishing uploads the whole file.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

from data_prep.folder_lock import FolderLock
from data_prep.space import check_space_for_shards
from pipeline.stores.place import Place

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

    def publish(self, name: str, sha256: str = "") -> None:
        """Make a finished file of the folder part of the set, in place of one that has its name.

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
