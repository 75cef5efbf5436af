"""Read a plain folder of images instead of a split of a shard set, for evaluation.

Images are checked and re-encoded as when shards are written, so that results are identical.
"""

import os
from abc import abstractmethod
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from pipeline.errors import UserError, first_few
from pipeline.shards.image_checks import ImageRules, Rejected, StoredImage, prepare_image, walk_images
from pipeline.shards.manifest import MANIFEST, SAMPLE_DTYPE
from pipeline.shards.shard_set import ShardSet
from pipeline.stores.place import Place, RemotePath
from pipeline.stream.samples import DamagedSample, Samples


class CheckedImages(Samples):
    """Samples that are not shards: images are checked, and where necessary re-encoded, as when shards are written.

    This happens when a batch asks for an image, so that nothing is read twice and each rank reads its own images only. A subclass finds
    an image and its label.
    """

    def __init__(self) -> None:
        self.samples = self
        # Checked by __getitem__, not yet read. Threads share it without a lock: each touches an index in one operation.
        self._coming: dict[int, StoredImage | DamagedSample] = {}

    @abstractmethod
    def look(self, index: int) -> StoredImage | DamagedSample:
        """The image as a shard would have it, or why it cannot be used. Thread-safe."""

    @abstractmethod
    def label(self, index: int) -> int:
        """The index of its class."""

    def __getitem__(self, indices: np.ndarray) -> np.ndarray:
        """(B,) of ``SAMPLE_DTYPE``. An unusable image is listed as 1 x 1 pixel; :meth:`read` raises the reason."""
        rows = np.zeros(len(indices), dtype=SAMPLE_DTYPE)
        for row, index in zip(rows, indices.tolist()):
            image = self.look(index)
            self._coming[index] = image
            width, height = (image.width, image.height) if isinstance(image, StoredImage) else (1, 1)
            row["label"], row["width"], row["height"] = self.label(index), width, height
        return rows

    def read_batch(self, indices: list[int]) -> list[np.ndarray | DamagedSample]:
        coming = [self._coming.pop(index, None) for index in indices]
        images = (image or self.look(index) for image, index in zip(coming, indices))
        return [image if isinstance(image, DamagedSample) else np.frombuffer(image.data, dtype=np.uint8) for image in images]


class ImageFolder(CheckedImages):
    """Samples from a folder of image files (``IMAGE_SUFFIXES``). Raises UserError: the folder is missing or has no images, or a
    class folder is not in ``classes``.

    Args:
        folder: holds ``<split>/<class>/*.JPEG`` or ``<class>/*.JPEG``, also in folders of a class; then :attr:`split` is None.
        classes: class names in index order; a class without a folder has no images. None: the folders, sorted.
    """

    def __init__(self, folder: Path, split: str, classes: Sequence[str] | None) -> None:
        super().__init__()
        self.split = split if (folder / split).is_dir() else None
        self.folder = folder / (self.split or "")
        check_data(self.folder)
        folders = sorted(entry.name for entry in os.scandir(self.folder) if entry.is_dir() and not entry.name.startswith("."))
        self.classes = folders if classes is None else list(classes)
        self.class_names = self.classes
        number = {name: label for label, name in enumerate(self.classes)}
        if unknown := [name for name in folders if name not in number]:
            must = f"the folders of {self.folder} must be classes of the model ({len(self.classes)}: {first_few(self.classes)})"
            remedy = "rename or remove them, or pass images of the data set that it was trained on"
            raise UserError(f"{must}, got {len(unknown)} others ({first_few(unknown)})", remedy)
        self._files = [f"{name}/{file}" for name in folders for file, image in walk_images(self.folder / name) if image]
        if not self._files:
            problem = f"{self.folder} must have a {MANIFEST} or images, got 0 images in {len(folders)} class folders"
            raise UserError(problem, f"pass a folder with shards, or one that holds CLASS/*.JPEG or {split}/CLASS/*.JPEG")
        self.labels = np.array([number[name.partition("/")[0]] for name in self._files])  # (n,)

    def __len__(self) -> int:
        return len(self._files)

    def key(self, index: int) -> str:
        """``class/file`` or ``class/folder/file``."""
        return self._files[index]

    def damaged(self, index: int, reason: str) -> DamagedSample:
        return DamagedSample(int(index), f"{self.folder / self._files[index]} {reason}")

    def label(self, index: int) -> int:
        return int(self.labels[index])

    def source_names(self, indices: Sequence[int]) -> Iterator[str]:
        return map(self.key, indices)

    def look(self, index: int) -> StoredImage | DamagedSample:
        try:
            return prepare_image((self.folder / self._files[index]).read_bytes(), ImageRules(), self._files[index])
        except Rejected as error:
            return self.damaged(index, f"cannot be used: {error}")
        except OSError as error:
            return self.damaged(index, f"cannot be read ({error.strerror})")


def check_data(path: Place) -> None:
    """Check that ``--data`` can be a shard set or a folder of images: a URL, or a folder. Raises UserError."""
    if not isinstance(path, RemotePath) and not path.is_dir():
        found = f"the file {path}" if path.exists() else f"{path}, which does not exist"
        problem = f"--data must be a folder, got {found}"
        raise UserError(problem, "pass a folder with shards, or one with a folder of images per class")


def open_split(path: Place, split: str, classes: Sequence[str] | None) -> ShardSet | ImageFolder:
    """Open a split, of which ``path`` is the folder or that above it: a shard set if there is a manifest, else an :class:`ImageFolder`."""
    if isinstance(path, RemotePath) or any((folder / MANIFEST).exists() for folder in (path, path / split)):
        return ShardSet(path, split)
    return ImageFolder(path, split, classes)
