"""A plain folder of images in place of a split of a shard set, for evaluation.

Images are checked and re-encoded as when shards are written (:mod:`pipeline.data.checked_images`), so that results are identical.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from pipeline.data.checked_images import CheckedImages
from pipeline.data.image_checks import AS_IN_SHARDS, Rejected, StoredImage, prepare_image
from pipeline.data.kept_formats import IMAGE_SUFFIXES
from pipeline.data.manifest import MANIFEST
from pipeline.data.shards import DamagedSample, ShardSet
from pipeline.errors import UserError
from pipeline.stores.place import Place, RemotePath

_SHOWN = 3  # classes listed in a message


class ImageFolder(CheckedImages):
    """:class:`~pipeline.data.samples.Samples` from a folder of image files.

    Args:
        folder: holds ``<split>/<class>/*.JPEG`` or ``<class>/*.JPEG`` (also ``.jpg``, ``.png``, ``.webp``, ``.tif``, ``.tiff``, ``.bmp``).
        split: name of the split's folder, if there is one.
        classes: class names in index order; a class without a folder has no images. None: the folders, sorted.

    Attributes:
        split: None if the split has no folder of its own.
        samples: as in a shard set: ``samples[indices]`` gives width, height and label of each.
        classes: class names in index order.
        class_names: the same: what to call the classes is not known here.

    Raises:
        UserError: the folder is missing or has no images, or a class folder is not in ``classes``.
    """

    def __init__(self, folder: Path, split: str, classes: Sequence[str] | None) -> None:
        super().__init__()
        self.split = split if (folder / split).is_dir() else None
        self.folder = folder / (self.split or "")
        if not self.folder.is_dir():
            raise UserError(
                f"--data {folder} is no folder", "pass a folder with shards, or one with a folder of images per class"
            )
        folders = sorted(entry.name for entry in os.scandir(self.folder) if entry.is_dir() and not entry.name.startswith("."))
        self.classes = folders if classes is None else list(classes)
        self.class_names = self.classes
        number = {name: label for label, name in enumerate(self.classes)}
        unknown = [name for name in folders if name not in number]
        if unknown:
            raise UserError(
                f"{self.folder} has {len(unknown)} folders that are not classes of the model ({_some(unknown)}; its {len(self.classes)} "
                f"classes are {_some(self.classes)})",
                "rename or remove them, or pass images of the data set that it was trained on",
            )
        listed = [(name, file) for name in folders for file in sorted(os.listdir(self.folder / name))]
        self._files = [f"{name}/{file}" for name, file in listed if _is_image(file)]
        if not self._files:
            raise UserError(
                f"{self.folder} holds no {MANIFEST} and 0 images in {len(folders)} class folders, at least 1 needed",
                f"pass a folder with shards, or one that holds CLASS/*.JPEG or {split}/CLASS/*.JPEG",
            )
        self._labels = [number[name.partition("/")[0]] for name in self._files]

    def __len__(self) -> int:
        return len(self._files)

    def key(self, index: int) -> str:
        """The name of sample ``index``: ``class/file``."""
        return self._files[index]

    def damaged(self, index: int, reason: str) -> DamagedSample:
        """An error about a sample, to be raised by the caller."""
        return DamagedSample(int(index), f"{self.folder / self._files[index]} {reason}")

    def label(self, index: int) -> int:
        return self._labels[index]

    def look(self, index: int) -> StoredImage | DamagedSample:
        try:
            return prepare_image((self.folder / self._files[index]).read_bytes(), AS_IN_SHARDS, self._files[index])
        except Rejected as error:
            return self.damaged(index, f"cannot be used: {error}")
        except OSError as error:
            return self.damaged(index, f"cannot be read ({error.strerror})")


def open_split(path: Place, split: str, classes: Sequence[str] | None) -> ShardSet | ImageFolder:
    """Open a split: a shard set if there is a manifest, else a folder of images.

    Args:
        path: the data folder, or that of the split; a URL is one with shards.
        split: ``train`` or ``val``.
        classes: class names in index order, for a folder of images; None: its folders, sorted.

    Raises:
        UserError: neither, or one that is damaged.
    """
    if isinstance(path, RemotePath) or any((folder / MANIFEST).exists() for folder in (path, path / split)):
        return ShardSet(path, split)
    return ImageFolder(path, split, classes)


def _is_image(name: str) -> bool:
    return name.lower().endswith(IMAGE_SUFFIXES) and not name.startswith(".")


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:_SHOWN]) + (", ..." if len(names) > _SHOWN else "")
