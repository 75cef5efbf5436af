"""A tree of class folders inside a zip file, read where it is."""

from __future__ import annotations

import zipfile
import zlib
from functools import lru_cache
from pathlib import Path

from data_prep.sources.base import SPLIT_FOLDERS, Entry, ListedSource, is_image
from pipeline.errors import UserError

_ENCRYPTED = 0x1  # bit of a member's flags
_REPACK = "download it again or pack it again with zip -r"
_Member = tuple[tuple[str, ...], zipfile.ZipInfo]  # the parts of its path, and what zipfile knows of it


class ZipFolder(ListedSource):
    """A zip of ``<split>/<class>/*.JPEG``, or of ``<class>/*.JPEG`` which holds one split, maybe below one more folder.

    Args:
        path: the zip file. The folder of the val split may be called ``val`` or ``test``.
        split: ``train`` or ``val``.

    Raises:
        UserError: not a zip, encrypted, no such split, or no images.
    """

    kind = "zip"

    def __init__(self, path: str | Path, split: str) -> None:
        images, others = _members(str(path))
        folders = _split_folders(images)
        if folders and split not in folders:
            raise UserError(f"{path} has the splits {list(folders)}, {split!r} needed: pass --split {next(iter(folders))}.")
        depth = 2 if folders else 1  # folders above an image: SPLIT/CLASS or CLASS
        tops = set(folders.values())
        labelled = [(p, info) for p, info in images if len(p) == depth + 1 and (not folders or p[0] in tops)]
        class_names = sorted({parts[-2] for parts, _ in labelled})
        entries = [
            Entry(parts[-2], info.filename, info.file_size)
            for parts, info in labelled
            if not folders or parts[0] == folders[split]
        ]
        if not entries:
            raise UserError(
                f"{path} holds 0 images in {len(class_names)} class folders of its {split} split, at least 1 needed: "
                f"pass a zip of CLASS/*.JPEG or {split}/CLASS/*.JPEG."
            )
        super().__init__(path, class_names, entries, others + len(images) - len(labelled))

    def _bytes(self, sample: int) -> bytes:
        name = self._names[sample]
        try:
            return _opened(self.path).read(name)
        except (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError) as error:
            raise UserError(f"{self.path}: {name} cannot be read ({error}), a whole member needed: {_REPACK}.") from None


def zip_splits(path: Path) -> list[str]:
    """The splits that a zip names with a folder; empty for a plain tree of class folders.

    Raises:
        UserError: not a zip, or encrypted.
    """
    return list(_split_folders(_members(str(path))[0]))


# Kept open, because a worker reads many shards' images and the list of members may be long.
@lru_cache(maxsize=2)
def _opened(path: str) -> zipfile.ZipFile:
    try:
        return zipfile.ZipFile(path)
    except zipfile.BadZipFile as error:
        raise UserError(f"{path} is not a whole zip file ({error}), one needed: {_REPACK}.") from None


def _members(path: str) -> tuple[list[_Member], int]:
    """The images by the parts of their path, without folders around the whole tree, and the number of other files.

    Raises:
        UserError: encrypted.
    """
    infos = [info for info in _opened(path).infolist() if not info.is_dir() and not info.filename.startswith("__MACOSX/")]
    encrypted = sum(bool(info.flag_bits & _ENCRYPTED) for info in infos)
    if encrypted:
        raise UserError(f"{path} has {encrypted} encrypted members, 0 needed: pack it again without a password.")
    paths = [tuple(part for part in info.filename.split("/") if part not in ("", ".")) for info in infos]
    images = [(parts, info) for parts, info in zip(paths, infos) if parts and is_image(parts[-1]) and parts[0][0] != "."]
    others = len(infos) - len(images)
    while len({parts[0] for parts, _ in images}) == 1 and not _split_folders(images) and all(len(p) > 2 for p, _ in images):
        images = [(parts[1:], info) for parts, info in images]
    return images, others


def _split_folders(images: list[_Member]) -> dict[str, str]:
    """The splits that the tree names with a folder, and the folders' names."""
    top = {parts[0] for parts, _ in images if len(parts) > 2}  # with only a file behind it, it is a class
    named = {split: [name for name in names if name in top] for split, names in SPLIT_FOLDERS.items()}
    return {split: names[0] for split, names in named.items() if names}
