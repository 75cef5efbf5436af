"""Where images come from. A source lists its samples in a fixed order and reads one by number."""

from __future__ import annotations

import hashlib
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from pipeline.errors import UserError

SPLITS = ("train", "val")
JPEG_SUFFIXES = (".jpeg", ".jpg")


@dataclass(frozen=True)
class SourceImage:
    """One image as the source has it."""

    name: str  # for humans: the file's path within the source
    class_name: str  # wnid for ImageNet
    data: bytes  # the encoded JPEG


class Source(Protocol):
    """What the writer needs of a source. ``len`` is the number of images; ``read`` may run in other processes."""

    kind: str
    path: str
    class_names: list[str]  # sorted; every class that occurs in any split of the source

    def __len__(self) -> int: ...

    def class_of(self, sample: int) -> str:
        """Class name of a sample, without reading it."""

    def bytes_of(self, sample: int) -> int:
        """Encoded size of a sample, without reading it."""

    def read(self, sample: int) -> SourceImage: ...

    def fingerprint(self) -> str:
        """Changes when an image is added, removed, renamed or resized; stays when only its path on disk does."""


class ImageFolder:
    """A tree ``root/<split>/<class>/*.JPEG``, or ``root/<class>/*.JPEG`` which holds one split.

    Args:
        root: the tree.
        split: ``train`` or ``val``.

    Raises:
        UserError: no such folder, no such split, or no images.
    """

    kind = "imagefolder"

    def __init__(self, root: str | Path, split: str) -> None:
        self.path = str(root)
        self._root = split_folder(Path(root), split)
        siblings = [Path(root) / name for name in SPLITS] if self._root != Path(root) else [self._root]
        self.class_names = sorted({entry.name for folder in siblings if folder.is_dir() for entry in _folders(folder)})
        self._files: list[tuple[str, str, int]] = []  # (class, file name, bytes), sorted
        for class_name in self.class_names:
            folder = self._root / class_name
            if folder.is_dir():
                self._files += sorted((class_name, e.name, e.stat().st_size) for e in os.scandir(folder) if _is_jpeg(e))
        if not self._files:
            raise UserError(
                f"source folder {self._root} holds 0 images in {len(self.class_names)} class folders, at least 1 needed: "
                f"pass a folder that holds CLASS/*.JPEG or {split}/CLASS/*.JPEG."
            )

    def __len__(self) -> int:
        return len(self._files)

    def class_of(self, sample: int) -> str:
        return self._files[sample][0]

    def bytes_of(self, sample: int) -> int:
        return self._files[sample][2]

    def read(self, sample: int) -> SourceImage:
        class_name, file_name, _ = self._files[sample]
        path = self._root / class_name / file_name
        return SourceImage(f"{class_name}/{file_name}", class_name, path.read_bytes())

    def fingerprint(self) -> str:
        digest = hashlib.sha256()
        for class_name, file_name, size in self._files:
            digest.update(f"{class_name}/{file_name}\t{size}\n".encode())
        return digest.hexdigest()


def available_splits(root: Path) -> list[str]:
    """The splits that a source tree names with a folder; empty for a plain tree of class folders.

    Raises:
        UserError: ``root`` is not a folder.
    """
    if not root.is_dir():
        raise UserError(f"source folder {root} does not exist: pass --source with the folder that holds the images.")
    return [split for split in SPLITS if (root / split).is_dir()]


def split_folder(root: Path, split: str) -> Path:
    """The folder whose subfolders are the classes of ``split``.

    Raises:
        UserError: the tree names its splits and ``split`` is not among them.
    """
    named = available_splits(root)
    if named and split not in named:
        raise UserError(f"source folder {root} has the splits {named}, {split!r} needed: pass --split {named[0]} or add {root / split}.")
    return root / split if named else root


def _folders(folder: Path) -> list[os.DirEntry]:
    return [entry for entry in os.scandir(folder) if entry.is_dir() and not entry.name.startswith(".")]


def _is_jpeg(entry: os.DirEntry) -> bool:
    return entry.is_file() and entry.name.lower().endswith(JPEG_SUFFIXES) and not entry.name.startswith(".")
