"""Read a shard set in a store by byte ranges.

Ranges of a batch that are neighbours become one request; the requests of a batch, and those of the batches that are read ahead,
are in flight at the same time, so that their latency is waited for once and not per image. Blocks of adjacent samples
(``data.order=block``) are fetched whole and stay in memory until the window after next begins.
"""

import errno
import os
import tempfile
import threading
from bisect import bisect_right
from collections import deque
from collections.abc import Callable
from concurrent.futures import CancelledError, Future
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from pipeline.cluster.environment import is_first_process
from pipeline.errors import UserError
from pipeline.files import disk_reason, file_sha256, lock_bytes, replace_file
from pipeline.shards.files.local import Range, SourceFiles
from pipeline.shards.manifest import MANIFEST, SAMPLE_DTYPE, SHARDER, ShardManifest
from pipeline.stores.client import Kind
from pipeline.stores.opening import warn_of_redirect
from pipeline.stores.place import RemotePath
from pipeline.stores.store import Store, Threads

_GAP = 32 << 10  # bytes: ranges this close are read together; between the images of two samples there are about 3 kB
_SMALL_GAP = 4 << 10
_MOST_READERS = 4  # of a block, for whom fetching it as a whole is worth its bytes; more share a cache (data.cache)
_LARGEST = 8 << 20  # bytes of a request: larger ones gain nothing, and a cut answer loses more
_BLOCK_REQUESTS = 16  # at a time: 128 MiB in flight; reads of single samples, which are waited for, have threads of their own
_HEADER = 4096  # bytes, at most, before the rows of a sample table
_WINDOWS = 2  # of blocks in memory: the one that is being read, and the one that comes


@dataclass(frozen=True)
class Piece:
    """A request for a part of a file, and which of the wanted ranges it serves."""

    name: str
    begin: int
    size: int
    serves: list[int]


def join_ranges(wanted: list[Range], gap: int = _GAP, largest: int = _LARGEST) -> list[Piece]:
    """Put neighbours together, in requests of at most ``largest`` bytes.

    Between two, ``gap`` bytes may be read for nothing, but never many more than are wanted behind them.
    """
    pieces: list[Piece] = []
    for place in sorted(range(len(wanted)), key=lambda place: wanted[place][:2]):
        name, begin, size = wanted[place]
        if pieces and (last := pieces[-1]).name == name:
            end = max(last.begin + last.size, begin + size)
            if begin - (last.begin + last.size) <= min(gap, max(size, _SMALL_GAP)) and end - last.begin <= largest:
                pieces[-1] = Piece(name, last.begin, end - last.begin, [*last.serves, place])
                continue
        pieces.append(Piece(name, begin, size, [place]))
    return pieces


@dataclass(frozen=True)
class _Block:
    begin: int
    size: int
    parts: list[Future[memoryview]]

    def read(self, begin: int, size: int) -> bytes | memoryview:
        """Wait for bytes, at an offset in the block; raises what fetching them raised."""
        first, last = begin // _LARGEST, (begin + size - 1) // _LARGEST
        parts = [self.parts[number].result() for number in range(first, last + 1)]
        return (parts[0] if first == last else b"".join(parts))[begin - first * _LARGEST :][:size]


class _Blocks:
    def __init__(self, read: Callable[[str, int, int], memoryview]) -> None:
        self._read, self._threads = read, Threads(_BLOCK_REQUESTS)
        self._windows: deque[dict[str, list[_Block]]] = deque()
        self._lock = threading.Lock()

    def announce(self, ranges: list[Range]) -> None:
        """Fetch the blocks of a window, and forget the window before the last. Returns immediately."""
        window: dict[str, list[_Block]] = {}
        for name, begin, size in sorted(ranges):
            parts = [
                self._threads.submit(partial(self._read, name, begin + at, min(_LARGEST, size - at)))
                for at in range(0, size, _LARGEST)
            ]
            window.setdefault(name, []).append(_Block(begin, size, parts))
        with self._lock:
            self._windows.append(window)
            old = self._windows.popleft() if len(self._windows) > _WINDOWS else {}
        for blocks in old.values():
            for block in blocks:
                for part in block.parts:
                    part.cancel()

    def find(self, name: str, begin: int, size: int) -> Callable[[], bytes | memoryview] | None:
        """A function that waits for the bytes, if they are part of a block."""
        with self._lock:
            windows = list(self._windows)
        for window in reversed(windows):
            blocks = window.get(name, [])
            place = bisect_right(blocks, begin, key=lambda block: block.begin) - 1
            if place >= 0 and begin + size <= blocks[place].begin + blocks[place].size:
                return partial(blocks[place].read, begin - blocks[place].begin, size)
        return None


class RemoteFiles(SourceFiles):
    """Files below a URL; ``readers`` processes divide the samples of a block among them."""

    repeats = True

    def __init__(self, place: RemotePath, store: Store, content: bytes, readers: int = 1) -> None:
        self.folder, self.store, self._readers = place, store, readers
        self._blocks = _Blocks(self.read)
        self.manifest = ShardManifest.parse(content, place / MANIFEST)
        self._bytes = {shard.file: shard.bytes for split in self.manifest.splits.values() for shard in split.shards}
        self._tags: dict[str, str] = {}  # etags, as they were when a file was read first
        self._listed: dict[str, int] | None = None

    @classmethod
    def find(cls, place: RemotePath, split: str, readers: int = 1) -> "RemoteFiles":
        """The set at a place, or in its subfolder named ``split``. Raises UserError: no manifest, or the store does not answer."""
        for folder in (place, place / split):
            store = Store(folder, probe=MANIFEST)
            try:
                content = bytes(store.fetch(MANIFEST).data)
                if "http" in place.scheme and is_first_process():
                    warn_of_redirect(str(folder / MANIFEST))
                return cls(folder, store, content, readers)
            except FileNotFoundError:
                continue
            except OSError as error:
                raise UserError(f"{folder / MANIFEST} cannot be read ({error.strerror})", "check the store") from None
        remedy = f"set data.path to the place that {SHARDER} wrote, or copy a shard set there, manifest.json last"
        raise UserError(f"{place / MANIFEST} is missing: the place is not a shard set", remedy)

    def expect(self, name: str, size: int, remedy: str) -> None:
        """Compared with the store's list of the place, where it has one; otherwise with the first answer for each file."""
        if self._listed is None:
            self._listed = self.store.sizes()
        if not self._listed or name.endswith(".idx"):  # which nothing here reads
            return
        if name not in self._listed:
            raise UserError(f"{self.folder / name} is missing ({size} bytes by {MANIFEST})", remedy)
        if self._listed[name] != size:
            raise UserError(f"{self.folder / name} must have {size} bytes by {MANIFEST}, got {self._listed[name]}", remedy)

    def whole(self, name: str) -> Path:
        """A copy in the folder for temporary files, which the processes of the node share: it is named by its content."""
        info = next(info for info in self.manifest.splits.values() if info.samples_file == name)
        sha256, most = info.samples_sha256, info.samples * SAMPLE_DTYPE.itemsize + _HEADER
        folder = Path(tempfile.gettempdir()) / f"pervit-tables-{os.getuid()}"
        path = folder / f"{sha256}.npy"
        try:
            folder.mkdir(mode=0o700, exist_ok=True)
            if folder.lstat().st_uid != os.getuid() or folder.is_symlink():
                raise PermissionError(errno.EACCES, "it is another user's", str(folder))
            with open(folder / ".lock", "ab") as lock:
                # One process of the node fetches it.
                lock_bytes(lock.fileno(), folder / ".lock", int(sha256[:7], 16), 1, wait=True)
                if not path.exists() or file_sha256(path) != sha256:
                    replace_file(path, lambda file: self.store.download(name, file.fileno(), most))
        except OSError as error:
            if error.filename != str(self.folder / name):
                problem = f"{path} cannot be written ({disk_reason(path, error)}): the sample table is kept there"
                raise UserError(problem, "set TMPDIR to a folder on a disk of the node") from None
            if isinstance(error, FileNotFoundError):
                raise
            raise UserError(f"{self.folder / name} cannot be read ({error.strerror})", "check the store") from None
        return path

    def read(self, name: str, offset: int, size: int) -> memoryview:
        """See the base class; an ``OSError`` too if the file is not that of the manifest, or of earlier answers."""
        answer = self.store.read(name, offset, size)
        before = self._tags.setdefault(name, answer.version.tag)
        expected = self._bytes.get(name, answer.size)
        if answer.size != expected or answer.version.tag != before:
            self.store.count(Kind.CHANGED)
            sizes = f"it must have {expected} bytes by {MANIFEST}, got {answer.size}"
            what = sizes if answer.size != expected else "its etag is another one"
            raise OSError(errno.ESTALE, f"the file was replaced: {what}", str(self.folder / name))
        return answer.data

    def read_many(self, ranges: list[Range]) -> list[bytes | memoryview | OSError]:
        found: list[bytes | memoryview | OSError] = [b""] * len(ranges)
        coming = {place: read_block for place, wanted in enumerate(ranges) if (read_block := self._blocks.find(*wanted))}
        alone = [place for place in range(len(ranges)) if place not in coming]
        pieces = join_ranges([ranges[place] for place in alone])
        answers = self.store.threads.map(lambda piece: self.read(piece.name, piece.begin, piece.size), pieces)
        for piece, data in zip(pieces, answers):
            if isinstance(data, BaseException) and not isinstance(data, OSError):
                raise data
            for place in (alone[number] for number in piece.serves):
                begin = ranges[place][1] - piece.begin
                found[place] = data if isinstance(data, OSError) else data[begin : begin + ranges[place][2]]
        for place, read_block in coming.items():
            try:
                found[place] = read_block()
            except (OSError, CancelledError):  # a block failed; its other samples may be sound
                (found[place],) = super().read_many([ranges[place]])
        return found

    def will_need(self, ranges: list[Range]) -> None:
        """Fetch blocks as a whole, unless most of what they hold is for other processes."""
        if self._readers <= _MOST_READERS:
            self._blocks.announce(ranges)

    def forget_if_replaced(self, name: str) -> None:
        self._tags.pop(name, None)

    def take_counts(self) -> dict[str, int]:
        return self.store.take_counts()
