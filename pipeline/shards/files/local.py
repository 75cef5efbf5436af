"""Read the files of a shard set from wherever they are: a folder, a store, or the cache of the node."""

import errno
import os
import stat
import threading
import weakref
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from pipeline.cluster.environment import allow_more_files
from pipeline.errors import UserError
from pipeline.files import open_regular
from pipeline.shards.manifest import MANIFEST, ShardManifest
from pipeline.stores.place import Place

Range = tuple[str, int, int]  # of a file: its name, the offset of the first byte, bytes


class ShardFiles(ABC):
    """The files of one shard set, by their plain names in the manifest. All methods are thread-safe."""

    folder: Place  # where they are: a message calls a file ``folder / name``
    repeats = False  # whether a read has been repeated many times when it fails, so that another one is no use

    @abstractmethod
    def read(self, name: str, offset: int, size: int) -> bytes | memoryview:
        """Bytes of a file; fewer than ``size`` where it ends. Raises OSError: they cannot be read; ``strerror`` is the
        reason; UserError: none of the files can be read any more."""

    def read_many(self, ranges: list[Range]) -> Iterable[bytes | memoryview | OSError]:
        """For each range what :meth:`read` returns, or the ``OSError`` that it raises. Raises UserError as :meth:`read`."""
        for wanted in ranges:
            try:
                yield self.read(*wanted)
            except OSError as error:
                yield error

    @abstractmethod
    def will_need(self, ranges: list[Range]) -> None:
        """Announce the ranges of a window, which will be read soon. Returns immediately, and never fails."""

    @abstractmethod
    def forget_if_replaced(self, name: str) -> None:
        """If the file is another one than when it was read first, read that from now on."""

    def take_counts(self) -> dict[str, int] | None:
        """Count the requests since the last call: :meth:`pipeline.stores.store.Store.take_counts`; None without a store."""
        return None


class SourceFiles(ShardFiles):
    """The files where a set lies as a whole, with its sample tables."""

    manifest: ShardManifest

    @abstractmethod
    def expect(self, name: str, size: int, remedy: str) -> None:
        """Check, before anything is read, that a file is there and as large as the manifest says; if not, a ``UserError``."""

    @abstractmethod
    def whole(self, name: str) -> Path:
        """A path on this machine with a file's whole content, to be mapped into memory; it may not exist. Raises OSError, UserError."""

    def will_open(self, count: int) -> None:  # noqa: B027 (nothing to prepare by default)
        """Announce that ``count`` tars will be read in turns."""


class OpenFile:
    """A file that is closed when nobody holds it any more: another thread may be reading from it when it is given up.

    All that needs the descriptor is done here, by methods, which hold the object: numbers of closed files are used again. So who calls
    ``close`` must be the only one that has it.
    """

    def __init__(self, descriptor: int) -> None:
        self._descriptor, self.close = descriptor, weakref.finalize(self, os.close, descriptor)
        self.close.atexit = False  # threads may still read

    def read(self, offset: int, size: int) -> bytes:
        """Bytes at an offset; fewer than asked for if the file ends before. Raises OSError: from the system."""
        return os.pread(self._descriptor, size, offset)

    def advise(self, offset: int, size: int) -> None:
        """Ask the kernel to read bytes into the page cache. Only a hint: it never fails."""
        with suppress(OSError):
            os.posix_fadvise(self._descriptor, offset, size, os.POSIX_FADV_WILLNEED)

    def is_at(self, path: Path, follow_links: bool = True) -> bool:
        with suppress(OSError):
            return os.path.samestat(os.fstat(self._descriptor), os.stat(path, follow_symlinks=follow_links))
        return False


class LocalFiles(SourceFiles):
    """:class:`ShardFiles` in a folder of a file system. Tars that were read stay open, as many as the system allows: those read last.

    They are read with ``pread`` and not mapped, so that a tar that is truncated under a running job is an error, not a SIGBUS.
    Raises as :meth:`ShardManifest.read`.
    """

    def __init__(self, folder: Path) -> None:
        self.folder: Path = folder
        self.manifest = ShardManifest.read(folder)
        self._descriptors: OrderedDict[str, OpenFile] = OrderedDict()  # the one read last comes last
        self._most = 1 << 20  # open at a time
        self._opening = threading.Lock()

    def expect(self, name: str, size: int, remedy: str) -> None:
        path = self.folder / name
        try:
            found = path.stat()
        except FileNotFoundError:
            raise UserError(f"{path} is missing ({size} bytes by {MANIFEST})", remedy) from None
        if not stat.S_ISREG(found.st_mode):
            raise UserError(f"{path} must be a regular file", remedy)
        if found.st_size != size:
            raise UserError(f"{path} must have {size} bytes by {MANIFEST}, got {found.st_size}", remedy)

    def will_open(self, count: int) -> None:
        self._most = max(1, min(count, allow_more_files(count)))

    def whole(self, name: str) -> Path:
        return self.folder / name

    def read(self, name: str, offset: int, size: int) -> bytes:
        try:
            return self._open(name).read(offset, size)
        except OSError as error:
            if error.errno not in (errno.EMFILE, errno.ENFILE):
                raise
            with self._opening:  # give up those not read for the longest time
                half = -(-len(self._descriptors) // 2)
                for _ in range(half):
                    self._descriptors.popitem(last=False)
            if half:
                return self.read(name, offset, size)
            # Too many open files is not the sample's fault.
            raise UserError(f"{self.folder}: {error.strerror}", "raise `ulimit -n`, or use larger shards") from None

    def will_need(self, ranges: list[Range]) -> None:
        for name, begin, size in ranges:
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
