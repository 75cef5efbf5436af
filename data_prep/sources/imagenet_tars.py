"""Read ImageNet-1k's official archives ``ILSVRC2012_img_train.tar`` and ``ILSVRC2012_img_val.tar`` in place.

The tars are uncompressed, so that an image is a byte range: the headers are read once, then any process reads any image with
one ``pread``. Images are named as in the usual unpacked tree (``<wnid>/<file>``), so that the tars and that tree give identical
shards.
"""

from __future__ import annotations

import io
import os
import re
import tarfile
from collections.abc import Iterable, Iterator
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

from tqdm import tqdm

from data_prep.sources.base import Entry, Source, refuse_duplicates
from data_prep.sources.devkit import Devkit
from pipeline.errors import UserError
from pipeline.files import open_regular
from pipeline.shards.image_checks import is_image

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer  # known to type checkers only

TRAIN_TAR = "ILSVRC2012_img_train.tar"
VAL_TAR = "ILSVRC2012_img_val.tar"
_VAL_NAME = re.compile(r"ILSVRC2012_val_(\d{8})\.JPEG")
_CLASS_TAR = re.compile(r"(n\d{8})\.tar")
_DOWNLOAD = "download it again and compare its size or MD5 with image-net.org's"
_BLOCK = 512  # bytes, block size of a tar


class ImageNetTar(Source):
    """Images in an uncompressed tar; created by :func:`train_source` and :func:`val_source`."""

    kind = "imagenet-tar"

    def _bytes(self, sample: int) -> bytes:
        size, offset = int(self._sizes[sample]), int(self._places[sample])
        data = os.pread(_opened(self.path).fileno(), size, offset)
        if len(data) != size:
            raise UserError(
                f"{self.path} gave {len(data)} of the {size} bytes of {self._names[sample]} at offset {offset}", _DOWNLOAD
            )
        return data


def train_source(path: Path, more_classes: Iterable[str] = ()) -> ImageNetTar:
    """The train split, from a tar that holds one tar per class.

    Args:
        path: the outer tar.
        more_classes: wnids of the val split, so that both splits have the same class indices.

    Raises:
        UserError: truncated, damaged, or another tar.
    """
    wnids: list[str] = []
    entries: list[Entry] = []
    ignored: list[str] = []
    with tqdm(
        total=path.stat().st_size, desc=f"reading the headers of {path.name}", unit="B", unit_scale=True, disable=None
    ) as bar:
        for wnid, place, size in _class_tars(path):
            members = [(m.name.rpartition("/")[2], m) for m in _walk(path, f"{path}: {wnid}.tar", place, size) if not m.isdir()]
            images = [(name, m) for name, m in members if m.isfile() and not m.issparse() and is_image(name)]
            ignored += [name for name, m in members if (name, m) not in images] if len(images) < len(members) else []
            wnids.append(wnid)
            entries += [Entry(wnid, f"{wnid}/{name}", m.size, place + m.offset_data) for name, m in images]
            bar.update(size)
    if not entries:
        raise UserError(f"{path} must have at least 1 image, got 0", _DOWNLOAD)
    refuse_duplicates(path, entries, _DOWNLOAD)
    return ImageNetTar(path, sorted({*wnids, *more_classes}), entries, ignored)


def val_source(path: Path, devkit: Devkit, more_classes: Iterable[str] = ()) -> ImageNetTar:
    """The val split, from a tar of images, with labels from the devkit.

    Args:
        path: the tar.
        devkit: from ``ILSVRC2012_devkit_t12.tar.gz``.
        more_classes: wnids of the train split, so that both splits have the same class indices.

    Raises:
        UserError: truncated, damaged, another tar, or the number of images differs from that of the devkit's labels.
    """
    entries = []
    for member in _walk(path, str(path), 0, path.stat().st_size):
        file_name = member.name.rpartition("/")[2]
        number = _VAL_NAME.fullmatch(file_name)
        if member.isdir():
            continue
        if not (number and member.isfile()):
            raise UserError(
                f"{path}: member {member.name} is not one of ILSVRC2012_val_*.JPEG", f"pass {VAL_TAR} as it was downloaded"
            )
        wnid = devkit.wnid(int(number[1]))
        entries.append(Entry(wnid, f"{wnid}/{file_name}", member.size, member.offset_data))
    numbers = {entry.name.rpartition("/")[2] for entry in entries}
    if not len(entries) == len(numbers) == len(devkit.truth):
        raise UserError(
            f"{path} must have {len(devkit.truth)} images by the ground truth of {devkit.path}, got {len(numbers)}",
            _DOWNLOAD,
        )
    return ImageNetTar(path, sorted({*devkit.wnids, *more_classes}), entries)


def train_classes(path: Path) -> list[str]:
    """The wnids of the class tars in the train tar, from the headers of the outer tar only.

    Raises:
        UserError: truncated, damaged, or not a tar of class tars.
    """
    return sorted(wnid for wnid, _, _ in _class_tars(path))


def tar_split(path: Path) -> str:
    """The split that a tar holds, from its first member.

    Raises:
        UserError: neither of ImageNet's two tars.
    """
    first = next((member.name for member in _walk(path, str(path), 0, path.stat().st_size) if not member.isdir()), "nothing")
    name = first.rpartition("/")[2]
    if not (_CLASS_TAR.fullmatch(name) or _VAL_NAME.fullmatch(name)):
        raise UserError(
            f"{path} must begin with a class's tar (nXXXXXXXX.tar) or ILSVRC2012_val_*.JPEG, got {first}",
            f"pass {TRAIN_TAR} or {VAL_TAR}; of WebDataset tars, pass their folder or a path with {{000..123}}",
        )
    return "train" if _CLASS_TAR.fullmatch(name) else "val"


def _class_tars(path: Path) -> Iterator[tuple[str, int, int]]:
    """(wnid, offset, size in bytes) of each class's tar."""
    for member in _walk(path, str(path), 0, path.stat().st_size):
        name = _CLASS_TAR.fullmatch(member.name.rpartition("/")[2])
        if member.isdir():
            continue
        if not (name and member.isfile()):
            raise UserError(
                f"{path}: member {member.name} is not a class's tar (nXXXXXXXX.tar)", f"pass {TRAIN_TAR} as it was downloaded"
            )
        yield name[1], member.offset_data, member.size


def _walk(path: Path, name: str, place: int, size: int) -> Iterator[tarfile.TarInfo]:
    """The members of a tar within a file; their offsets are relative to its start.

    ``tarfile`` mistakes a damaged header, or truncation between two members, for the end of the archive, so this checks for the
    zero block that marks the end.

    Args:
        path: the file.
        name: of the tar, for messages.
        place: offset of the tar in the file.
        size: of the tar in bytes.

    Raises:
        UserError: truncated, damaged or not a tar.
    """
    with open(open_regular(path), "rb", buffering=0) as file:
        try:
            with tarfile.open(fileobj=_Part(file.fileno(), place, size), mode="r:") as archive:
                for member in archive:
                    if member.size < 0 or member.isfile() and member.offset_data + member.size > size:
                        raise tarfile.ReadError(f"{member.name} has {member.size} bytes")
                    yield member
                end = archive.offset
        except (tarfile.TarError, ValueError, OverflowError, RecursionError) as error:  # impossible values in headers
            raise UserError(f"{name} ({size} bytes) is cut off or not a tar ({error})", _DOWNLOAD) from None
        if os.pread(file.fileno(), max(0, min(_BLOCK, size - end)), place + end) != bytes(_BLOCK):
            raise UserError(f"{name} ({size} bytes) is cut off or damaged at byte {end}", _DOWNLOAD)


class _Part(io.RawIOBase):
    """A read-only file object for a byte range of a file."""

    def __init__(self, descriptor: int, start: int, size: int) -> None:
        super().__init__()
        self._descriptor, self._start, self._size, self._position = descriptor, start, size, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        position = offset + {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: self._size}[whence]
        if position < 0:
            raise ValueError(f"a position of {position}")
        self._position = min(position, self._size)  # positions past the end are all alike
        return self._position

    def readinto(self, buffer: WriteableBuffer, /) -> int:
        view = memoryview(buffer)
        wanted = max(0, min(len(view), self._size - self._position))
        data = os.pread(self._descriptor, wanted, self._start + self._position)
        view[: len(data)] = data
        self._position += len(data)
        return len(data)


# Cached: a worker reads the images of many shards.
@lru_cache(maxsize=2)
def _opened(path: str) -> io.FileIO:
    return open(path, "rb", buffering=0)
