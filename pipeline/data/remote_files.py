"""A shard set in a store, read by byte ranges: :class:`~pipeline.data.shard_files.ShardFiles`.

Ranges of a batch that are neighbours become one request; the requests of a batch, and those of the batches that are read ahead,
are in flight at the same time, so that their latency is waited for once and not per image. Blocks that were announced (block
order) are fetched whole and kept in memory until their samples were read.
"""

from __future__ import annotations

import errno
import hashlib
import os
import tempfile
import threading
from concurrent.futures import CancelledError
from dataclasses import dataclass
from pathlib import Path

from pipeline.data.manifest import MANIFEST, SHARDER, ShardManifest
from pipeline.data.remote_blocks import Blocks
from pipeline.errors import UserError
from pipeline.files import lock_bytes, replace_file, write_error
from pipeline.stores.client import Answer, Kind
from pipeline.stores.place import RemotePath
from pipeline.stores.store import Store

_GAP = 32 << 10  # bytes: ranges this close are read together; between the images of two samples there are about 3 kB
_SMALL_GAP = 4 << 10
_MOST_READERS = 4  # of a block, for whom fetching it as a whole is worth its bytes; more share a cache (data.cache)
_LARGEST = 8 << 20  # bytes of a request: larger ones gain nothing, and a cut answer loses more


@dataclass(frozen=True)
class Piece:
    """A request for a part of a file, and which of the wanted ranges it serves."""

    name: str
    begin: int
    size: int
    serves: list[int]


def join_ranges(wanted: list[tuple[str, int, int]], gap: int = _GAP, largest: int = _LARGEST) -> list[Piece]:
    """Put neighbours together.

    Args:
        wanted: (name, begin, size) each.
        gap: bytes between two that may be read for nothing; never many more than are wanted behind it.
        largest: bytes of a request of several.

    Returns:
        Pieces that cover all of them, each exactly once.
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


class RemoteFiles:
    """Files below a URL.

    Args:
        place: holds them.
        store: of the place.
        content: of its manifest.
        readers: processes among which the samples of a block are divided.
    """

    def __init__(self, place: RemotePath, store: Store, content: bytes, readers: int = 1) -> None:
        self.folder, self.store, self._readers = place, store, readers
        self._blocks = Blocks(self.read)
        self._manifest = ShardManifest.parse(content, place / MANIFEST)
        self._bytes = {shard.file: shard.bytes for split in self._manifest.splits.values() for shard in split.shards}
        self._tags: dict[str, str] = {}  # etags, as they were when a file was read first
        self._listed: dict[str, int] | None = None
        self._lock = threading.Lock()

    @classmethod
    def find(cls, place: RemotePath, split: str, readers: int = 1) -> RemoteFiles:
        """The set at a place, or in its subfolder named ``split``.

        Raises:
            UserError: there is no manifest, or the store does not answer.
        """
        for folder in (place, place / split):
            store = Store(folder, probe=MANIFEST)
            try:
                return cls(folder, store, bytes(store.fetch(MANIFEST).data), readers)
            except FileNotFoundError:
                continue
            except OSError as error:
                raise UserError(f"{folder / MANIFEST} cannot be read ({error.strerror})", "see to the store") from None
        raise UserError(
            f"{place / MANIFEST} is missing, one manifest per shard set needed",
            f"set data.path to the place that {SHARDER} wrote, or copy a shard set there, manifest.json last",
        )

    def manifest(self) -> ShardManifest:
        return self._manifest

    def expect(self, name: str, size: int, remedy: str) -> None:
        """Compared with the store's list of the place, where it has one; otherwise with the first answer for each file."""
        if self._listed is None:
            self._listed = self.store.sizes()
        if not self._listed or name.endswith(".idx"):  # which nothing here reads
            return
        if name not in self._listed:
            raise UserError(f"{self.folder / name} is missing, {size} bytes needed by {MANIFEST}", remedy)
        if self._listed[name] != size:
            raise UserError(f"{self.folder / name} has {self._listed[name]} bytes, {size} needed by {MANIFEST}", remedy)

    def will_open(self, count: int) -> None:
        """Nothing stays open but connections."""

    def whole(self, name: str) -> Path:
        """A copy in the folder for temporary files, which the processes of the node share: it is named by its content."""
        sha256 = next((info.samples_sha256 for info in self._manifest.splits.values() if info.samples_file == name), "")
        folder = Path(tempfile.gettempdir()) / f"pervit-tables-{os.getuid()}"
        path = folder / f"{sha256}.npy"
        try:
            folder.mkdir(mode=0o700, exist_ok=True)
            if folder.lstat().st_uid != os.getuid() or folder.is_symlink():
                raise PermissionError(errno.EACCES, "it is another user's", str(folder))
            with open(folder / ".lock", "ab") as lock:
                lock_bytes(
                    lock.fileno(), folder / ".lock", int(sha256[:7], 16), 1, wait=True
                )  # one process of the node fetches it
                if not _is_whole(path, sha256):
                    data = self.store.fetch(name).data
                    replace_file(path, lambda file: file.write(data))
        except FileNotFoundError as error:
            if error.filename == str(self.folder / name):
                raise
            raise write_error(path, error) from None
        except OSError as error:
            if error.filename == str(self.folder / name):
                raise UserError(f"{self.folder / name} cannot be read ({error.strerror})", "see to the store") from None
            raise UserError(
                f"{path} cannot be written ({error.strerror}): the table of samples is kept there",
                "set TMPDIR to a folder on a disk of the node",
            ) from None
        return path

    def read(self, name: str, offset: int, size: int) -> memoryview:
        return self._checked(name, self.store.read(name, offset, size))

    def read_many(self, wanted: list[tuple[str, int, int]]) -> list[bytes | memoryview | OSError]:
        found: list[bytes | memoryview | OSError] = [b""] * len(wanted)
        coming = {place: block for place, each in enumerate(wanted) if (block := self._blocks.find(*each))}
        alone = [place for place in range(len(wanted)) if place not in coming]
        pieces = join_ranges([wanted[place] for place in alone])
        answers = self.store.threads.map(lambda piece: self.read(piece.name, piece.begin, piece.size), pieces)
        for piece, data in zip(pieces, answers):
            if isinstance(data, BaseException) and not isinstance(data, OSError):
                raise data
            for place in (alone[number] for number in piece.serves):
                begin = wanted[place][1] - piece.begin
                found[place] = data if isinstance(data, OSError) else data[begin : begin + wanted[place][2]]
        for place, bytes_of in coming.items():
            try:
                found[place] = bytes_of()
            except (OSError, CancelledError):  # a block failed; its other samples may be sound
                found[place] = self._try(*wanted[place])
        return found

    def _try(self, name: str, begin: int, size: int) -> memoryview | OSError:
        try:
            return self.read(name, begin, size)
        except OSError as error:
            return error

    def will_need(self, name: str, begin: int, size: int) -> None:
        """Nothing: single ranges come soon enough when they are read, and whole blocks are :meth:`will_need_blocks`."""

    def will_need_blocks(self, ranges: list[tuple[str, int, int]]) -> None:
        """Fetch blocks that will be read soon, unless most of what they hold is for other processes. Returns immediately."""
        if self._readers <= _MOST_READERS:
            self._blocks.announce(ranges)

    def forget_if_replaced(self, name: str) -> None:
        with self._lock:
            self._tags.pop(name, None)

    def take_counts(self) -> dict[str, int]:
        return self.store.take_counts()

    def _checked(self, name: str, answer: Answer) -> memoryview:
        """Compare the file that an answer is from with the manifest and with earlier answers.

        Raises:
            OSError: it is another file.
        """
        with self._lock:
            before = self._tags.setdefault(name, answer.tag)
        needed = self._bytes.get(name, answer.size)
        if answer.size != needed or answer.tag != before:
            self.store.count(Kind.CHANGED)
            what = (
                f"it has {answer.size} bytes, {needed} needed by {MANIFEST}"
                if answer.size != needed
                else "its etag is another one"
            )
            raise OSError(errno.ESTALE, f"the file was replaced: {what}", str(self.folder / name))
        return answer.data


def _is_whole(path: Path, sha256: str) -> bool:
    digest = hashlib.sha256()
    try:
        with open(path, "rb") as file:
            while block := file.read(1 << 20):
                digest.update(block)
    except FileNotFoundError:
        return False
    return digest.hexdigest() == sha256
