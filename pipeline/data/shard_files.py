"""Where the files of a shard set are read from; a :class:`~pipeline.data.shards.ShardSet` does not know more than this of it."""

from __future__ import annotations

import errno
import os
import resource
import stat
import threading
from collections import OrderedDict
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Protocol, runtime_checkable

from pipeline.data.manifest import MANIFEST, SHARDER, ShardManifest
from pipeline.errors import UserError
from pipeline.files import open_regular
from pipeline.stores.place import Place, RemotePath, parse_place

_OTHERS = 256  # open files of everything else: libraries, sockets, logs, checkpoints


class ShardFiles(Protocol):
    """The files of one shard set, by their plain names in the manifest. All methods are thread-safe.

    Attributes:
        folder: where they are, for messages: ``folder / name`` is what a message calls a file.
    """

    @property
    def folder(self) -> Place: ...

    def manifest(self) -> ShardManifest:
        """The set's manifest.

        Raises:
            UserError: as :meth:`ShardManifest.read`.
        """

    def expect(self, name: str, size: int, remedy: str) -> None:
        """Check, before anything is read, that a file is there and as large as the manifest says.

        Args:
            name: of the file.
            size: in bytes.
            remedy: if it is not.

        Raises:
            UserError: missing, not a regular file, or of another size.
        """

    def will_open(self, count: int) -> None:
        """Announce that ``count`` tars will be read in turns."""

    def whole(self, name: str) -> Path:
        """A path on this machine with a file's whole content, to be mapped into memory. It may not exist.

        Raises:
            OSError: it cannot be had.
        """

    def read(self, name: str, offset: int, size: int) -> bytes | memoryview:
        """Bytes of a file; fewer than ``size`` where it ends.

        Raises:
            OSError: they cannot be read; ``strerror`` is the reason.
            UserError: none of the files can be read any more.
        """

    def will_need(self, name: str, begin: int, size: int) -> None:
        """Announce that these bytes will be read soon. Returns immediately, and never fails."""

    def forget_if_replaced(self, name: str) -> None:
        """If the file is another one than when it was read first, read that from now on."""


@runtime_checkable
class ManyFiles(Protocol):
    """:class:`ShardFiles` that are read faster many ranges at a time."""

    def read_many(self, wanted: list[tuple[str, int, int]]) -> list[bytes | memoryview | OSError]:
        """For each (name, offset, size) what :meth:`ShardFiles.read` returns, or the error that it raises.

        Raises:
            UserError: none of the files can be read any more.
        """


@runtime_checkable
class BlockFiles(Protocol):
    """:class:`ShardFiles` that read the blocks of a window as a whole."""

    def will_need_blocks(self, ranges: list[tuple[str, int, int]]) -> None:
        """Announce all ranges, (name, begin, size) each, of a window. Returns immediately, and never fails."""


@runtime_checkable
class Counting(Protocol):
    """:class:`ShardFiles` that count their requests."""

    def take_counts(self) -> dict[str, int]:
        """Since the last call; see :meth:`pipeline.stores.store.Store.take_counts`."""


class OpenFile:
    """A file that is closed when nobody holds it any more: another thread may be reading from it when it is given up.

    All that needs the descriptor is done here, by methods, which hold the object: the number of a closed file is the next opened
    one's.
    """

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    def __del__(self, close: Callable[[int], None] = os.close) -> None:  # bound here: at exit the module may be gone first
        close(self._descriptor)

    def read(self, offset: int, size: int) -> bytes:
        """Bytes at an offset; fewer than asked for if the file ends before.

        Raises:
            OSError: from the system.
        """
        return os.pread(self._descriptor, size, offset)

    def advise(self, offset: int, size: int) -> None:
        """Ask the kernel to read bytes into the page cache. Only a hint: it never fails."""
        with suppress(OSError):
            os.posix_fadvise(self._descriptor, offset, size, os.POSIX_FADV_WILLNEED)

    def is_at(self, path: Path) -> bool:
        """Whether it is the file of that name, or that a link of that name leads to."""
        try:
            return os.path.samestat(os.fstat(self._descriptor), path.stat())
        except OSError:
            return False


class LocalFiles:
    """:class:`ShardFiles` in a folder of a file system. Tars that were read stay open, as many as the system allows: those read last.

    They are read with ``pread`` and not mapped, so that truncation of a tar under a running job is an error that names the file,
    not a SIGBUS.

    Args:
        folder: holds the files.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._descriptors: OrderedDict[str, OpenFile] = OrderedDict()  # the one read last comes last
        self._most = 1 << 20  # open at a time
        self._opening = threading.Lock()

    def manifest(self) -> ShardManifest:
        return ShardManifest.read(self.folder)

    def expect(self, name: str, size: int, remedy: str) -> None:
        path = self.folder / name
        try:
            found = path.stat()
        except FileNotFoundError:
            raise UserError(f"{path} is missing, {size} bytes needed by {MANIFEST}", remedy) from None
        if not stat.S_ISREG(found.st_mode):
            raise UserError(f"{path} is not a regular file, one of {size} bytes needed by {MANIFEST}", remedy)
        if found.st_size != size:
            raise UserError(f"{path} has {found.st_size} bytes, {size} needed by {MANIFEST}", remedy)

    def will_open(self, count: int) -> None:
        """Raise the soft limit on open files, up to the hard limit. If that is less, not all stay open."""
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        endless = hard == resource.RLIM_INFINITY
        self._most = count if endless else max(1, min(count, hard - _OTHERS))
        wanted = soft + self._most
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted if endless else min(wanted, hard), hard))

    def whole(self, name: str) -> Path:
        return self.folder / name

    def read(self, name: str, offset: int, size: int) -> bytes:
        try:
            return self._open(name).read(offset, size)
        except OSError as error:
            if error.errno not in (errno.EMFILE, errno.ENFILE):
                raise
            if self._close_half():
                return self.read(name, offset, size)
            # Too many open files is not the sample's fault.
            raise UserError(f"{self.folder}: {error.strerror}", "raise `ulimit -n`, or use larger shards") from None

    def will_need(self, name: str, begin: int, size: int) -> None:
        """Ask the kernel to read into the page cache."""
        with suppress(OSError):  # only a hint: read() reports errors
            self._open(name).advise(begin, size)

    def forget_if_replaced(self, name: str) -> None:
        with self._opening:
            file = self._descriptors.get(name)
            if file is not None and not file.is_at(self.folder / name):
                del self._descriptors[name]

    def _open(self, name: str) -> OpenFile:
        with self._opening:
            if name in self._descriptors:
                self._descriptors.move_to_end(name)
            else:
                while len(self._descriptors) >= self._most:
                    self._descriptors.popitem(last=False)
                self._descriptors[name] = OpenFile(open_regular(self.folder / name))
            return self._descriptors[name]

    def _close_half(self) -> bool:
        """Give up those not read for the longest time; False if there are none."""
        with self._opening:
            half = -(-len(self._descriptors) // 2)
            for _ in range(half):
                self._descriptors.popitem(last=False)
            return half > 0


def open_files(path: str | os.PathLike[str], split: str, readers: int = 1) -> ShardFiles:
    """The files of the shard set at ``data.path``.

    Args:
        path: a folder or a URL; holds ``manifest.json``, directly or in a subfolder named ``split``.
        split: ``train`` or ``val``.
        readers: processes that divide the samples among them.

    Raises:
        UserError: there is no such place.
    """
    place = parse_place(path)
    if isinstance(place, RemotePath):
        from pipeline.data.remote_files import RemoteFiles  # imported late: a local set needs no client

        return RemoteFiles.find(place, split, readers)
    return LocalFiles(_find(place, split))


def _find(folder: Path, split: str) -> Path:
    """``folder``, or ``folder/split`` if the manifest is there."""
    if not folder.is_dir():
        raise UserError(f"shard folder {folder} does not exist", f"set data.path to the folder that {SHARDER} wrote")
    nested = folder / split
    return nested if (nested / MANIFEST).is_file() and not (folder / MANIFEST).is_file() else folder
