"""A tree of class folders."""

from __future__ import annotations

import os
from pathlib import Path

from data_prep.sources.base import SPLIT_FOLDERS, Entry, ListedSource, read_listed
from pipeline.data.image_checks import is_image
from pipeline.errors import UserError


class ImageFolder(ListedSource):
    """A tree ``root/<split>/<class>/*.JPEG``, or ``root/<class>/*.JPEG`` with one split.

    Args:
        root: the tree. The folder of the val split may be called ``val`` or ``test``.
        split: ``train`` or ``val``.

    Raises:
        UserError: the folder or the split is missing, or there are no images.
    """

    kind = "imagefolder"

    def __init__(self, root: str | Path, split: str) -> None:
        folders = split_folders(Path(root))
        if folders and split not in folders:
            raise UserError(
                f"source folder {root} has the splits {list(folders)}, {split!r} needed",
                f"pass --split {next(iter(folders))} or add {Path(root) / split}",
            )
        self._root = folders.get(split, Path(root))
        class_names = sorted({entry.name for folder in folders.values() or [self._root] for entry in class_folders(folder)})
        entries: list[Entry] = []
        ignored = 0
        for class_name in class_names:
            folder = self._root / class_name
            files = list(os.scandir(folder)) if folder.is_dir() else []
            images = [file for file in files if file.is_file() and is_image(file.name)]
            entries += [Entry(class_name, f"{class_name}/{file.name}", file.stat().st_size) for file in images]
            ignored += len(files) - len(images)
        if not entries:
            raise UserError(
                f"source folder {self._root} holds 0 images in {len(class_names)} class folders, at least 1 needed",
                f"pass a folder that holds CLASS/*.JPEG or {split}/CLASS/*.JPEG",
            )
        super().__init__(root, class_names, entries, ignored)

    def _bytes(self, sample: int) -> bytes:
        return read_listed(self._root / self._names[sample], int(self._sizes[sample]))


def split_folders(root: Path) -> dict[str, Path]:
    """The split folders of a tree; empty for a plain tree of class folders.

    Raises:
        UserError: ``root`` is not a folder.
    """
    if not root.is_dir():
        raise UserError(
            f"source folder {root} {'is a file' if root.exists() else 'does not exist'}",
            "pass --source with the folder that holds the images",
        )
    found: dict[str, Path] = {}
    for split, names in SPLIT_FOLDERS.items():
        for name in names:
            # A folder "test" without class folders holds unlabelled images, or is itself a class.
            if (root / name).is_dir() and (name == split or class_folders(root / name)):
                found.setdefault(split, root / name)
    return found


def class_folders(folder: Path) -> list[os.DirEntry]:
    """The subfolders of a folder, except hidden ones."""
    return [entry for entry in os.scandir(folder) if entry.is_dir() and not entry.name.startswith(".")]
