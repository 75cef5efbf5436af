"""What the writer needs of a source of images, and what all sources have in common: a list of images in a fixed order."""

from __future__ import annotations

import copy
import hashlib
import os
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, Protocol, TypeVar

import numpy as np

from pipeline.errors import UserError
from pipeline.files import open_regular

# The names that a split's folder may have; the first that is there counts. CIFAR's trees say test, and in ImageNet's, where
# both are there, test has no labels.
SPLIT_FOLDERS = {"train": ("train",), "val": ("val", "test")}
IMAGE_SUFFIXES = (".jpeg", ".jpg", ".png")
LARGEST_IMAGE = 256 << 20  # bytes: what is larger is no image that can be decoded, but may be gigabytes of zeros in a small zip


@dataclass(frozen=True)
class SourceImage:
    """One image as the source has it."""

    name: str  # for humans: the file's path within the source
    class_name: str  # wnid for ImageNet
    data: bytes  # the encoded JPEG or PNG; empty when the file is empty
    refused: str = ""  # why it was not read


class Source(Protocol):
    """What the writer needs of a source. ``len`` is the number of images; a selection is sent to other processes."""

    kind: str
    path: str
    ignored: int  # files that do not have an image's name
    class_names: list[str]  # in index order; every class that occurs in any split of the source
    labels: np.ndarray  # (n,) int32: the place of each image's class in class_names
    subset: float  # the share of each class that is left; 1.0: all

    def __len__(self) -> int: ...

    def read(self, sample: int) -> SourceImage: ...

    def select(self, samples: Sequence[int] | np.ndarray) -> Source:
        """A source of these samples alone, in this order: what a worker needs to write one shard."""

    def fingerprint(self) -> str:
        """Changes when an image is added, removed, renamed or resized; stays when only its path on disk does."""

    def total_bytes(self) -> int:
        """The encoded images together: about what the shards will take."""


class Entry(NamedTuple):
    """One image of a source's list."""

    class_name: str
    name: str
    size: int  # bytes
    place: int = 0  # where a source finds it again, when its name is not enough: an offset or a row


AnyListed = TypeVar("AnyListed", bound="ListedSource")


class ListedSource(ABC):
    """A source whose images are all listed when it is opened. The order is that of the classes and, in a class, of names.

    The list is kept in columns: ImageNet's 1.28 million entries take about 150 MB, and a selection is a slice.

    Args:
        path: where the images lie, for the manifest and for messages.
        class_names: in index order.
        entries: the images, in any order.
        ignored: files that do not have an image's name.
    """

    kind: str
    subset = 1.0

    def __init__(self, path: str | Path, class_names: list[str], entries: Iterable[Entry], ignored: int = 0) -> None:
        self.path = str(path)
        self.class_names = class_names
        self.ignored = ignored
        label_of = {class_name: label for label, class_name in enumerate(class_names)}
        entries = sorted(entries, key=lambda entry: (label_of[entry.class_name], entry.name))
        self.labels = np.array([label_of[entry.class_name] for entry in entries], dtype=np.int32)  # (n,)
        self._names = [entry.name for entry in entries]
        self._sizes = np.array([entry.size for entry in entries], dtype=np.int64)  # (n,)
        self._places = np.array([entry.place for entry in entries], dtype=np.int64)  # (n,)

    def __len__(self) -> int:
        return len(self._names)

    def read(self, sample: int) -> SourceImage:
        """One image.

        Raises:
            UserError: the source was cut off, damaged or changed since it was listed.
            OSError: the file system refuses.
        """
        name, class_name, size = self._names[sample], self.class_names[self.labels[sample]], int(self._sizes[sample])
        if size > LARGEST_IMAGE:
            return SourceImage(name, class_name, b"", f"{size / 1e6:.0f} MB, at most {LARGEST_IMAGE / 1e6:.0f} MB are read")
        return SourceImage(name, class_name, self._bytes(sample))

    @abstractmethod
    def _bytes(self, sample: int) -> bytes:
        """The encoded image."""

    def select(self: AnyListed, samples: Sequence[int] | np.ndarray) -> AnyListed:
        chosen = np.asarray(samples, dtype=np.int64)  # (m,)
        selection = copy.copy(self)
        selection._names = [self._names[sample] for sample in chosen]
        selection.labels, selection._sizes = self.labels[chosen], self._sizes[chosen]
        selection._places = self._places[chosen]
        return selection

    def fingerprint(self) -> str:
        digest = hashlib.sha256()
        for label, name, size in zip(self.labels, self._names, self._sizes):
            file_name = name.rpartition("/")[2]
            digest.update(f"{self.class_names[label]}/{file_name}\t{size}\n".encode(errors="surrogateescape"))
        return digest.hexdigest()

    def total_bytes(self) -> int:
        return int(self._sizes.sum())


def read_listed(path: Path, size: int) -> bytes:
    """A file's content, which has the size that it was listed with.

    Raises:
        UserError: it is gone, was replaced by something else, or has another size.
        OSError: the file system refuses.
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
    """The error for a source that is not what was listed; shards of one half before and one half after would be of neither."""
    return UserError(
        f"{path} {what}: the source was changed while it was sharded, an unchanged one needed: restore it and give the same "
        f"command again, or begin with an empty --output folder."
    )


def refuse_duplicates(path: str | Path, entries: list[Entry], remedy: str) -> None:
    """See that no two images of an archive have one name: when it is unpacked, one of them would vanish.

    Raises:
        UserError: two have.
    """
    seen: set[str] = set()
    for entry in entries:
        if entry.name in seen:
            raise UserError(f"{path} has 2 images named {entry.name}, 1 needed: {remedy}.")
        seen.add(entry.name)


def is_image(name: str) -> bool:
    """Whether a file of this name (its last part) is taken for an image."""
    return name.lower().endswith(IMAGE_SUFFIXES) and not name.startswith(".")
