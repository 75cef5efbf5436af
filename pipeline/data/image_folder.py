"""A plain folder of images in the place of one split of a shard set, for an evaluation.

The images are checked, and the odd ones encoded anew, as when shards are written, so that the results are the same. That
happens when an image's turn comes: nothing is read twice, and of several processes each reads its own.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from pipeline.data.image_checks import ImageRules, Rejected, StoredImage, prepare_image
from pipeline.data.manifest import MANIFEST, SAMPLE_DTYPE
from pipeline.data.shards import DamagedSample, ShardSet
from pipeline.errors import UserError

_SUFFIXES = (".jpeg", ".jpg", ".png")  # as data_prep takes them for images
_SHOWN = 3  # classes in a message


class ImageFolder:
    """What :class:`EvalPlan` and :class:`Loader` use of a :class:`ShardSet`, from files.

    Args:
        folder: ``folder/split/<class>/*.JPEG`` or ``folder/<class>/*.JPEG`` (also ``.jpg``, ``.png``).
        split: the split's folder; it need not be there.
        classes: names in index order. Those that have no folder have no images.

    Attributes:
        split: None where the split has no folder of its own.
        samples: as of a shard set: ``samples[indices]`` has width, height and label of each.
        classes: class names in index order.

    Raises:
        UserError: no such folder, a class that is not among ``classes``, or no images.
    """

    def __init__(self, folder: Path, split: str, classes: Sequence[str]) -> None:
        self.split = split if (folder / split).is_dir() else None
        self.folder, self.classes = folder / (self.split or ""), list(classes)
        if not self.folder.is_dir():
            raise UserError(
                f"--data {folder} is no folder: pass a folder with shards, or one with a folder of images per class."
            )
        folders = sorted(entry.name for entry in os.scandir(self.folder) if entry.is_dir() and not entry.name.startswith("."))
        number = {name: label for label, name in enumerate(self.classes)}
        unknown = [name for name in folders if name not in number]
        if unknown:
            raise UserError(
                f"{self.folder} has {len(unknown)} folders that are no class of the model ({_some(unknown)}; its {len(self.classes)} "
                f"classes are {_some(self.classes)}): rename or remove them, or pass images of the data set that it was trained on."
            )
        listed = [(name, file) for name in folders for file in sorted(os.listdir(self.folder / name))]
        self._files = [f"{name}/{file}" for name, file in listed if _is_image(file)]
        if not self._files:
            raise UserError(
                f"{self.folder} holds no {MANIFEST} and 0 images in {len(folders)} class folders, at least 1 needed: pass a folder "
                f"with shards, or one that holds CLASS/*.JPEG or {split}/CLASS/*.JPEG."
            )
        self._labels = [number[name.partition("/")[0]] for name in self._files]
        self._coming: dict[int, StoredImage | DamagedSample] = {}  # looked at, not read yet
        self._lock = threading.Lock()

    @property
    def samples(self) -> ImageFolder:
        return self

    def __len__(self) -> int:
        return len(self._files)

    def __getitem__(self, indices: np.ndarray) -> np.ndarray:
        """(B,) of ``SAMPLE_DTYPE``; an image that cannot be used is 1 pixel wide and high here, and :meth:`read` says why."""
        rows = np.zeros(len(indices), dtype=SAMPLE_DTYPE)
        for row, index in zip(rows, indices.tolist()):
            image = self._look(index)
            with self._lock:
                self._coming[index] = image
            sound = isinstance(image, StoredImage)
            row["label"], row["width"], row["height"] = self._labels[index], *((image.width, image.height) if sound else (1, 1))
        return rows

    def key(self, index: int) -> str:
        """Which image sample ``index`` is: ``class/file``."""
        return self._files[index]

    def damaged(self, index: int, reason: str) -> DamagedSample:
        """The error that says what is wrong with an image."""
        return DamagedSample(int(index), f"{self.folder / self._files[index]} {reason}")

    def read(self, index: int) -> np.ndarray:
        """The encoded image, as it would be stored in a shard; threads may call this at the same time.

        Returns:
            (bytes,) uint8.

        Raises:
            DamagedSample: it cannot be read or decoded.
        """
        with self._lock:
            image = self._coming.pop(index, None)
        image = image or self._look(index)
        if isinstance(image, DamagedSample):
            raise image
        return np.frombuffer(image.data, dtype=np.uint8)

    def will_need(self, runs: list[tuple[int, int]]) -> None:
        """Nothing: an evaluation reads in order, which disks see by themselves."""

    def _look(self, index: int) -> StoredImage | DamagedSample:
        try:
            return prepare_image((self.folder / self._files[index]).read_bytes(), ImageRules())
        except Rejected as error:
            return self.damaged(index, f"cannot be used: {error}")
        except OSError as error:
            return self.damaged(index, f"cannot be read ({error.strerror})")


def open_split(path: Path, split: str, classes: Sequence[str]) -> ShardSet | ImageFolder:
    """Shards where a manifest is, else a folder of images whose folders are named by some of ``classes``.

    Raises:
        UserError: neither.
    """
    if any((folder / MANIFEST).exists() for folder in (path, path / split)):
        return ShardSet(path, split)
    return ImageFolder(path, split, classes)


def _is_image(name: str) -> bool:
    return name.lower().endswith(_SUFFIXES) and not name.startswith(".")


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:_SHOWN]) + (", ..." if len(names) > _SHOWN else "")
