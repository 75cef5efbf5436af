"""Define what a source of images is, the base class of all of them, and their readers."""

from __future__ import annotations

import copy
import hashlib
import os
import tarfile
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, TypeVar

import numpy as np

from pipeline.errors import UserError, counted, first_few
from pipeline.files import open_regular

# Accepted names of a split's folder, in order of preference. CIFAR's trees use test; where ImageNet's have both, test is
# unlabelled.
SPLIT_FOLDERS = {"train": ("train",), "val": ("val", "test")}
SPLIT_NAMES = {
    "train": "train",
    "val": "val",
    "validation": "val",
    "dev": "val",
    "test": "val",
}  # in tables and file names -> split
_LARGEST_MEMBER = 1 << 30  # bytes, against decompression bombs; the largest real one, CIFAR-100's train batch, has 155 MB
LARGEST_IMAGE = 256 << 20  # bytes: more than any decodable image has, and a bound for zip bombs


@dataclass(frozen=True)
class SourceImage:
    """One image of a source."""

    name: str  # path within the source, for messages and lists
    class_name: str  # wnid for ImageNet
    data: bytes  # the encoded image; empty if the file is empty or was not read
    refused: str = ""  # why it was not read; empty if it was


class Entry(NamedTuple):
    """One image in a source's list."""

    class_name: str
    name: str
    size: int  # bytes
    place: int = 0  # source-specific position, such as an offset or a row; unused where the name suffices


AnySource = TypeVar("AnySource", bound="Source")


class Source(ABC):
    """A source that lists all images when it is opened, sorted by class index, then by name; ``len`` is their number.

    The list is stored in columns: ImageNet's 1.28 million entries take about 150 MB, and a selection, which is pickled for the
    workers, is an index operation.

    Args:
        path: of the source, for the manifest and messages.
        class_names: in index order; the classes of all splits of the source.
        entries: the images, in any order.
        ignored: names of files that are not images, or not where an image of a class is.
    """

    kind: str  # format, recorded in the manifest
    subset, subset_rule = 1.0, "random"  # fraction of each class that was kept, and which images of a class: random or first
    keep_formats = True  # whether its non-JPEG images may be stored in the format that they have
    class_words: Mapping[str, str] = {}  # class name -> what to call it, where the source says so
    empty: Sequence[str] = ()  # class folders without an image in any split
    unlabelled: str = ""  # how many images without a class were left out, and the first of them

    def __init__(self, path: str | Path, class_names: list[str], entries: Iterable[Entry], ignored: Iterable[str] = ()) -> None:
        self.path = str(path)
        self.class_names = class_names
        self.ignored = Counter(os.path.splitext(name)[1].lower() for name in ignored)  # ending, such as ".txt" -> how many
        label_of = {class_name: label for label, class_name in enumerate(class_names)}
        entries = sorted(entries, key=lambda entry: (label_of[entry.class_name], entry.name))
        self.labels = np.array([label_of[entry.class_name] for entry in entries], dtype=np.int32)  # (n,)
        self._names = [entry.name for entry in entries]
        self._sizes = np.array([entry.size for entry in entries], dtype=np.int64)  # (n,)
        self._places = np.array([entry.place for entry in entries], dtype=np.int64)  # (n,)

    def __len__(self) -> int:
        return len(self._names)

    def classes_with_images(self) -> set[str]:
        """The names of the classes that have an image."""
        return {self.class_names[label] for label in set(self.labels.tolist())}

    def read(self, sample: int) -> SourceImage:
        """Read one image.

        Raises:
            UserError: the source is damaged, or was changed since it was listed.
            OSError: the file cannot be read.
        """
        name, class_name, size = self._names[sample], self.class_names[self.labels[sample]], int(self._sizes[sample])
        if size > LARGEST_IMAGE:
            return SourceImage(name, class_name, b"", f"{size / 1e6:.0f} MB, at most {LARGEST_IMAGE / 1e6:.0f} MB are read")
        return SourceImage(name, class_name, self._bytes(sample))

    @abstractmethod
    def _bytes(self, sample: int) -> bytes:
        """The encoded image."""

    def select(self: AnySource, samples: Sequence[int] | np.ndarray) -> AnySource:
        """A source of only these samples, in this order."""
        chosen = np.asarray(samples, dtype=np.int64)  # (m,)
        selection = copy.copy(self)
        selection._names = [self._names[sample] for sample in chosen]
        selection.labels, selection._sizes = self.labels[chosen], self._sizes[chosen]
        selection._places = self._places[chosen]
        return selection

    def fingerprint(self) -> str:
        """SHA-256 of class, file name and size of every image: independent of where the source is stored."""
        digest = hashlib.sha256()
        for label, name, size in zip(self.labels, self._names, self._sizes):
            file_name = name.rpartition("/")[2]
            digest.update(f"{self.class_names[label]}/{file_name}\t{size}\n".encode(errors="surrogateescape"))
        return digest.hexdigest()

    def total_bytes(self) -> int:
        """Total size of the encoded images."""
        return int(self._sizes.sum())

    def left_out(self) -> Iterator[str]:
        """A sentence for each kind of thing that is there but becomes no sample or class."""
        if self.ignored:
            yield f"ignored {other_files(self.ignored)}: an image is a JPEG, PNG, WebP, TIFF or BMP file in the folder of its class"
        kept = set(self.class_names)
        if empty := [name for name in self.empty if name not in kept]:
            folders = counted(len(empty), "class folder")
            yield f"left out {folders} without an image ({first_few(empty)}): --keep-empty-classes makes each a class"
        if self.unlabelled:
            yield f"left out {self.unlabelled}"


def other_files(count: Counter[str]) -> str:
    """How many there are, and their most common endings: ``4 other files (3 .gif, 1 .heic)``."""
    endings = [f"{n:,} {ending or 'without an ending'}" for ending, n in count.most_common()]
    return f"{counted(count.total(), 'other file')} ({first_few(endings, 8)})"


def read_listed(path: Path, size: int) -> bytes:
    """Read a file and check that its size is still the listed one.

    Raises:
        UserError: it is gone, is not a regular file, or has another size.
        OSError: it cannot be read.
    """
    try:
        with open(open_regular(path), "rb") as file:
            data, found = file.read(size), os.fstat(file.fileno()).st_size
    except FileNotFoundError:
        raise changed(path, "is gone") from None
    if len(data) != size or found != size:
        raise changed(path, f"has {found} bytes now, {size} when it was listed")
    return data


def changed(path: str | Path, what: str) -> UserError:
    """The error for a source that changed after it was listed: the shards would mix two versions of it."""
    return UserError(
        f"{path} {what}: the source was changed while it was sharded",
        "restore it and run the same command again, or start with an empty --output folder",
    )


def refuse_duplicates(path: str | Path, entries: list[Entry], remedy: str) -> None:
    """Check that the images of an archive have distinct names: unpacking would overwrite one of two.

    Raises:
        UserError: two images have the same name.
    """
    seen: set[str] = set()
    for entry in entries:
        if entry.name in seen:
            raise UserError(f"{path} must have one image of each name, got two named {entry.name}", remedy)
        seen.add(entry.name)


def in_order(class_names: Iterable[str]) -> list[str]:
    """Class names in index order: by number if all are whole numbers, so that 10 comes after 9 and labels stay what they were."""
    names = list(class_names)
    return sorted(names, key=int) if all(name.isascii() and name.isdigit() for name in names) else sorted(names)


def read_tar_gz(path: Path, key: Callable[[str], str | None], what: str, remedy: str) -> dict[str, bytes]:
    """Read selected members of an archive; of several with the same key, the last.

    Args:
        path: the archive.
        key: maps a member's name to its key in the result, or to None to skip it.
        what: name of the expected archive, for the message.
        remedy: for the message.

    Returns:
        Key -> content.

    Raises:
        UserError: not a complete tar.gz, or a member is larger than 1 GiB.
        OSError: the file cannot be read.
    """
    found: dict[str, bytes] = {}
    try:
        with open(open_regular(path), "rb") as file, tarfile.open(fileobj=file, mode="r:gz") as archive:
            for member in archive:
                if not 0 <= member.size <= _LARGEST_MEMBER:
                    raise tarfile.ReadError(f"{member.name} has {member.size} bytes, {_LARGEST_MEMBER} at most")
                name = key(member.name)
                if name is not None and member.isfile() and not member.issparse():
                    content = archive.extractfile(member)
                    assert content  # a file has some
                    found[name] = content.read()
    except Exception as error:  # gzip, zlib and tarfile raise various exceptions
        if isinstance(error, MemoryError) or isinstance(error, OSError) and error.errno is not None:
            raise
        raise UserError(f"{path} is not a complete tar.gz ({error}): {what} is one", remedy) from None
    return found
