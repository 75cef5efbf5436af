"""A tree of class folders inside a zip file, read where it is."""

from __future__ import annotations

import zipfile
from functools import lru_cache
from pathlib import Path

from data_prep.sources.base import SPLIT_FOLDERS, Entry, ListedSource, changed, is_image, refuse_duplicates
from pipeline.errors import UserError

_ENCRYPTED = 0x1  # bit of a member's flags
_REPACK = "download it again or pack it again with zip -r"
_Member = tuple[tuple[str, ...], int, zipfile.ZipInfo]  # the parts of its path, its place in the list, what zipfile knows of it


class ZipFolder(ListedSource):
    """A zip of ``<split>/<class>/*.JPEG``, or of ``<class>/*.JPEG`` which holds one split, maybe below one more folder.

    Args:
        path: the zip file. The folder of the val split may be called ``val`` or ``test``.
        split: ``train`` or ``val``.

    Raises:
        UserError: not a zip, encrypted, no such split, no images, or two of one name.
    """

    kind = "zip"

    def __init__(self, path: str | Path, split: str) -> None:
        images, others = _members(str(path))
        folders = _split_folders(images)
        if folders and split not in folders:
            raise UserError(f"{path} has the splits {list(folders)}, {split!r} needed: pass --split {next(iter(folders))}.")
        depth = 2 if folders else 1  # folders above an image: SPLIT/CLASS or CLASS
        tops = set(folders.values())
        labelled = [member for member in images if len(member[0]) == depth + 1 and (not folders or member[0][0] in tops)]
        class_names = sorted({parts[-2] for parts, _, _ in labelled})
        # Named as in the unpacked tree, whatever is around it, so that both give the same shards.
        entries = [
            Entry(parts[-2], "/".join(parts[-2:]), info.file_size, place)
            for parts, place, info in labelled
            if not folders or parts[0] == folders[split]
        ]
        refuse_duplicates(path, entries, _REPACK)
        if not entries:
            raise UserError(
                f"{path} holds 0 images in {len(class_names)} class folders of its {split} split, at least 1 needed: "
                f"pass a zip of CLASS/*.JPEG or {split}/CLASS/*.JPEG."
            )
        super().__init__(path, class_names, entries, others + len(images) - len(labelled))

    def _bytes(self, sample: int) -> bytes:
        name, place, size = self._names[sample], int(self._places[sample]), int(self._sizes[sample])
        archive = _opened(self.path)
        member = next(iter(archive.infolist()[place : place + 1]), None)
        if member is None or not member.filename.endswith(name.rpartition("/")[2]) or member.file_size != size:
            raise changed(self.path, f"has another list of members ({name} is not in its place)")
        try:
            data = archive.read(member)
            if len(data) != size:
                raise zipfile.BadZipFile(f"{len(data)} bytes, {size} by the list of members")
            return data
        except Exception as error:  # each way of compression has errors of its own
            if isinstance(error, MemoryError) or isinstance(error, OSError) and error.errno is not None:
                raise
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
    except OSError:
        raise
    except Exception as error:  # zipfile does not expect everything that a list of members can say
        raise UserError(f"{path} is not a whole zip file ({error}), one needed: {_REPACK}.") from None


def _members(path: str) -> tuple[list[_Member], int]:
    """The images by the parts of their path, without folders around the whole tree, and the number of other files.

    Raises:
        UserError: encrypted.
    """
    listed = enumerate(_opened(path).infolist())
    infos = [(place, info) for place, info in listed if not info.is_dir() and not info.filename.startswith("__MACOSX/")]
    encrypted = sum(bool(info.flag_bits & _ENCRYPTED) for _, info in infos)
    if encrypted:
        raise UserError(f"{path} has {encrypted} encrypted members, 0 needed: pack it again without a password.")
    paths = [tuple(part for part in info.filename.split("/") if part not in ("", ".")) for _, info in infos]
    images = [(parts, *info) for parts, info in zip(paths, infos) if parts and is_image(parts[-1]) and parts[0][0] != "."]
    others = len(infos) - len(images)
    while len({m[0][0] for m in images}) == 1 and not _split_folders(images) and all(len(m[0]) > 2 for m in images):
        images = [(parts[1:], place, info) for parts, place, info in images]
    return images, others


def _split_folders(images: list[_Member]) -> dict[str, str]:
    """The splits that the tree names with a folder, and the folders' names."""
    top = {parts[0] for parts, _, _ in images if len(parts) > 2}  # with only a file behind it, it is a class
    named = {split: [name for name in names if name in top] for split, names in SPLIT_FOLDERS.items()}
    return {split: names[0] for split, names in named.items() if names}
