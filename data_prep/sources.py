"""Where images come from. A source lists its samples in a fixed order and reads one by number."""

from __future__ import annotations

import copy
import hashlib
import os
from collections.abc import Sequence
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
    """What the writer needs of a source. ``len`` is the number of images; a selection is sent to other processes."""

    kind: str
    path: str
    ignored: int  # files that do not have an image's name
    class_names: list[str]  # sorted; every class that occurs in any split of the source
    subset: float  # the share of each class that is left; 1.0: all

    def __len__(self) -> int: ...

    def read(self, sample: int) -> SourceImage: ...

    def select(self, samples: Sequence[int]) -> Source:
        """A source of these samples alone, in this order: what a worker needs to write one shard."""

    def fingerprint(self) -> str:
        """Changes when an image is added, removed, renamed or resized; stays when only its path on disk does."""

    def total_bytes(self) -> int:
        """The encoded images together: about what the shards will take."""


class ImageFolder:
    """A tree ``root/<split>/<class>/*.JPEG``, or ``root/<class>/*.JPEG`` which holds one split.

    Args:
        root: the tree.
        split: ``train`` or ``val``.

    Raises:
        UserError: no such folder, no such split, or no images.
    """

    kind = "imagefolder"
    subset = 1.0

    def __init__(self, root: str | Path, split: str) -> None:
        self.path = str(root)
        self._root = split_folder(Path(root), split)
        siblings = [Path(root) / name for name in SPLITS] if self._root != Path(root) else [self._root]
        self.class_names = sorted({entry.name for folder in siblings if folder.is_dir() for entry in _folders(folder)})
        self._files: list[tuple[str, str, int]] = []  # (class, file name, bytes), sorted
        self.ignored = 0
        for class_name in self.class_names:
            folder = self._root / class_name
            entries = list(os.scandir(folder)) if folder.is_dir() else []
            images = sorted((class_name, entry.name, entry.stat().st_size) for entry in entries if _is_jpeg(entry))
            self._files += images
            self.ignored += len(entries) - len(images)
        if not self._files:
            raise UserError(
                f"source folder {self._root} holds 0 images in {len(self.class_names)} class folders, at least 1 needed: "
                f"pass a folder that holds CLASS/*.JPEG or {split}/CLASS/*.JPEG."
            )

    def __len__(self) -> int:
        return len(self._files)

    def read(self, sample: int) -> SourceImage:
        class_name, file_name, _ = self._files[sample]
        path = self._root / class_name / file_name
        return SourceImage(f"{class_name}/{file_name}", class_name, path.read_bytes())

    def select(self, samples: Sequence[int]) -> ImageFolder:
        selection = copy.copy(self)
        selection._files = [self._files[sample] for sample in samples]
        return selection

    def fingerprint(self) -> str:
        digest = hashlib.sha256()
        for class_name, file_name, size in self._files:
            digest.update(f"{class_name}/{file_name}\t{size}\n".encode(errors="surrogateescape"))
        return digest.hexdigest()

    def total_bytes(self) -> int:
        return sum(size for _, _, size in self._files)


def available_splits(root: Path) -> list[str]:
    """The splits that a source tree names with a folder; empty for a plain tree of class folders.

    Raises:
        UserError: ``root`` is not a folder.
    """
    if not root.is_dir():
        raise UserError(
            f"source folder {root} {'is a file' if root.exists() else 'does not exist'}: pass --source with the folder that holds the images."
        )
    return [split for split in SPLITS if (root / split).is_dir()]


def split_folder(root: Path, split: str) -> Path:
    """The folder whose subfolders are the classes of ``split``.

    Raises:
        UserError: the tree names its splits and ``split`` is not among them.
    """
    named = available_splits(root)
    if named and split not in named:
        raise UserError(
            f"source folder {root} has the splits {named}, {split!r} needed: pass --split {named[0]} or add {root / split}."
        )
    return root / split if named else root


def _folders(folder: Path) -> list[os.DirEntry]:
    return [entry for entry in os.scandir(folder) if entry.is_dir() and not entry.name.startswith(".")]


def _is_jpeg(entry: os.DirEntry) -> bool:
    return entry.is_file() and entry.name.lower().endswith(JPEG_SUFFIXES) and not entry.name.startswith(".")
