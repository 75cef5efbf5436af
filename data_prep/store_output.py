"""Write a shard set into a store: finish each file in a scratch folder, upload it in one piece, compare it, remove the local copy.

The store holds what a folder would: tars, indexes, a record of each finished shard, and a marker with the description of the set, until
the manifest lists the split. So any machine can continue an interrupted set, and the tasks of a job array see each other's shards.

There are no locks in a store. The marker, the lists and the manifest are written under the condition that nobody has written them since
they were read. Whoever has the same description writes the same bytes; whoever has another one finds the marker and stops.
"""

from __future__ import annotations

import errno
import hashlib
import os
import random
import re
import shutil
import time
from collections.abc import Callable, Iterable
from concurrent.futures import wait
from contextlib import suppress
from functools import lru_cache, partial
from pathlib import Path
from typing import BinaryIO, TypeVar

from data_prep import SPLITS, STAGED
from data_prep.output import FolderLock, Output, check_space_for_shards
from data_prep.workers import stop_if_asked
from pipeline.errors import UserError
from pipeline.files import file_sha256, lock_bytes, replace_file
from pipeline.shards.manifest import MANIFEST, REENCODED, REJECTED
from pipeline.stores.client import Version
from pipeline.stores.place import Place, RemotePath, check_bucket
from pipeline.stores.store import NoBucket, Store, StoreFails

Result = TypeVar("Result")

_SHARED = (MANIFEST, REJECTED, REENCODED, *(f".{split}-in-progress" for split in SPLITS))  # read, then written anew
_RECORD = re.compile(r"\.\w+-\d+\.finished\.npz")
_OWNER = ".owner"  # of the scratch folder: locked by the process that uses it
_TRIES = 30  # of an update that others come in between of: the tasks of an array begin at the same moment
_AGAIN = "check the store and run the same command again, which continues with what is missing"


class StoreOutput(Output):
    """A shard set in a store; leaving the context removes what is left in the scratch folder.

    Args:
        place: the shard set.
        scratch: an existing folder of this machine, which gets a folder for this set.
        part: of the set, that this process writes: a split, a task of a job array. Each part has a scratch folder of its own.

    Raises:
        UserError: the place or the scratch folder cannot be written to, or another process of this machine writes this part.
    """

    locks = False

    def __init__(self, place: RemotePath, scratch: Path, part: str = "") -> None:
        check_bucket(place, "--output")
        name = hashlib.sha256(f"{place} {part}".encode()).hexdigest()[:16]
        super().__init__(scratch / f"pervit-shards-{os.getuid()}-{name}")
        self.place: Place = place
        self._store = Store(place, probe="")
        self._listed: dict[str, int] = {}
        self._etags: dict[str, str] = {}  # by the list, of the files in the folder
        self._versions: dict[str, Version] = {}
        self._lock = self._own_folder(scratch)
        try:
            self._clear()  # of killed processes
            self.refresh()
        except BaseException:
            self.__exit__()
            raise

    def _own_folder(self, scratch: Path) -> BinaryIO:
        path = self.folder / _OWNER
        try:
            while True:
                self.folder.mkdir(mode=0o700, exist_ok=True)
                if self.folder.lstat().st_uid != os.getuid() or self.folder.is_symlink():
                    raise PermissionError(errno.EACCES, "it is another user's", str(self.folder))
                file = open(path, "ab")
                if not lock_bytes(file.fileno(), path):
                    raise UserError(
                        f"{self.place} is being written by another process of this machine, whose scratch folder is {self.folder}",
                        "wait for it or stop it",
                    )
                with suppress(FileNotFoundError):  # the folder was removed by the process that had the lock
                    if os.path.samestat(os.fstat(file.fileno()), path.stat()):
                        return file
                file.close()
        except OSError as error:
            raise UserError(
                f"--scratch must be an existing, writable folder, got {scratch} ({error.strerror})",
                "pass another one",
            ) from None

    def __getstate__(self) -> dict:
        return {"folder": self.folder, "place": self.place}

    def __setstate__(self, state: dict) -> None:
        self.__dict__.update(state, _store=_store_of_worker(state["place"]), _listed={}, _etags={}, _versions={})

    def __exit__(self, *_: object) -> None:
        with suppress(FileNotFoundError):  # somebody has removed the folder
            self._clear()
        if not any(self.folder.glob(STAGED)):
            shutil.rmtree(self.folder, ignore_errors=True)
        self._lock.close()

    def _clear(self) -> None:
        for path in self.folder.iterdir():
            if path.name not in (_OWNER, STAGED):  # an interrupted copy of images goes on
                path.unlink(missing_ok=True)

    def refresh(self) -> None:
        with told(self.place, "read"):
            listed = {name: about for name, about in self._store.objects().items() if "/" not in name}
            wanted = [name for name in listed if (name in _SHARED or _RECORD.fullmatch(name)) and name != MANIFEST]
            changed = [name for name in wanted if self._etags.get(name) != listed[name][1]]
            # The manifest last, whatever the list says: where a record has vanished, the manifest is there.
            answers = [*self._store.threads.map(self._fetch, changed), self._fetch(MANIFEST)]
            for name, found in zip([*changed, MANIFEST], answers):
                if isinstance(found, BaseException):
                    raise found
                if not found:
                    listed.pop(name, None)
                else:
                    listed[name] = (found, listed[name][1] if name in listed else "")
        for name in {path.name for path in self.folder.iterdir() if path.name in _SHARED or _RECORD.fullmatch(path.name)}:
            if name not in listed:
                (self.folder / name).unlink()
        self._listed = {name: size for name, (size, _) in listed.items()}
        self._etags = {name: listed[name][1] for name in wanted if name in listed}
        self._versions = {name: version for name, version in self._versions.items() if name in listed}

    def _fetch(self, name: str) -> int:
        """Copy an object into the folder; its size, 0 if it is not there."""
        try:
            found = self._store.fetch(name)
        except FileNotFoundError:
            return 0
        replace_file(self.folder / name, lambda file: file.write(found.data))
        self._versions[name] = found.version
        return found.size

    def update(self, lock: FolderLock, act: Callable[[], Result]) -> Result:
        for number in range(_TRIES):
            with lock.manifest():
                self.refresh()
                try:
                    return act()
                except FileExistsError:
                    pass
            time.sleep(random.uniform(0, min(2.0, 0.1 * 2**number)))
        raise UserError(f"{self.place} is being written by other processes all the time", _AGAIN)

    def sizes(self) -> dict[str, int]:
        return dict(self._listed)

    def publish(self, name: str, sha256: str = "") -> None:
        path = self.folder / name
        size = path.stat().st_size
        if name in _SHARED:  # small
            with told(self.place, "written", name):
                replaced = self._versions.get(name, Version())
                self._versions[name] = self._store.put(name, path.read_bytes(), replaces=replaced)
                self._etags.pop(name, None)
        else:
            checked_size(path, sha256)
            put_file(self._store, self.place, name, path, sha256)
            path.unlink()
        self._listed[name] = size

    def withdraw(self, names: Iterable[str]) -> None:
        there = [name for name in names if self._listed.pop(name, None) is not None]
        with told(self.place, "removed"):
            self._store.delete(there)
        for name in there:
            (self.folder / name).unlink(missing_ok=True)
            self._versions.pop(name, None)

    def check_space(self, needed: int, written: int, share_at_once: float, estimate: bool) -> None:
        at_once = round(needed * share_at_once)
        check_space_for_shards(
            self.folder, at_once, 0, estimate, "choose another --scratch, fewer --workers or --samples-per-shard"
        )


def checked_size(path: Path, sha256: str) -> int:
    """The size of a file that is as it was written, by its SHA-256; empty: that is not known.

    Raises:
        UserError: it is not, or it cannot be read.
    """
    try:
        if sha256 and file_sha256(path) != sha256:
            raise UserError(
                f"{path} was changed after it was written", "restore it; data_prep.verify_shards names all such files"
            )
        return path.stat().st_size
    except OSError as error:
        raise UserError(
            f"{path} cannot be read ({error.strerror})", "restore it, or shard again into an empty folder"
        ) from None


def put_file(store: Store, place: Place, name: str, path: Path, sha256: str) -> None:
    """Upload a file as a whole, and ask the store what arrived.

    Args:
        store: of the place.
        place: of the shard set, for messages.
        name: of the object.
        path: the file.
        sha256: of the file, by which an upload that goes on knows it; empty: it is not known.

    Raises:
        UserError: it cannot be written.
        Stopped: the parent of this worker asked it to stop.
    """
    size = path.stat().st_size
    with told(place, "written", name):
        future = store.threads.submit(partial(_put, store, name, path, sha256, size))
        while not future.done():  # not result(): a store that is away is waited for, and Ctrl-C is not
            wait([future], 0.2)
            stop_if_asked()
        future.result()


def _put(store: Store, name: str, path: Path, sha256: str, size: int) -> None:
    store.put(name, path, sha256)
    if size and store.describe(name) != (size, sha256):
        raise OSError(errno.EIO, f"what is there is not what was sent, {size} bytes with the SHA-256 {sha256[:8]}...", name)


class told:
    """Says in one sentence what failed: the store's own sentences speak of training."""

    def __init__(self, place: Place, what: str, name: str = "") -> None:
        self._place, self._what = place / name if name else place, what

    def __enter__(self) -> None:
        pass

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        if isinstance(error, StoreFails) and not isinstance(error, NoBucket):  # whose remedy holds here too
            raise UserError(f"{error.problem}, so that {self._place} cannot be {self._what}", _AGAIN) from None
        if isinstance(error, OSError) and not isinstance(error, FileExistsError):
            raise UserError(f"{self._place} cannot be {self._what} ({error.strerror})", _AGAIN) from None


@lru_cache(maxsize=1)
def _store_of_worker(place: RemotePath) -> Store:
    return Store(place, probe="")
