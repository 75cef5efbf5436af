"""Read a tree of class folders, unpacked or in a zip file."""

from __future__ import annotations

import os
import zipfile
from collections import Counter
from collections.abc import Iterable, Sequence
from functools import lru_cache
from pathlib import Path

from data_prep.sources.base import SPLIT_FOLDERS, Entry, Source, changed, other_files, read_listed, refuse_duplicates
from pipeline.errors import UserError, counted
from pipeline.shards.image_checks import IMAGE_SUFFIXES, is_image, walk_images

_ENCRYPTED = 0x1  # bit 0 of a member's flags
_REPACK = "download it again or pack it again with zip -r"
_Member = tuple[tuple[str, ...], int, zipfile.ZipInfo]  # parts of the path, index in the list of members, header


class ImageFolder(Source):
    """A tree ``root/<split>/<class>/*.JPEG``, or ``root/<class>/*.JPEG`` with one split; a class may have further folders.

    Args:
        root: the tree. The folder of the val split may be called ``val`` or ``test``.
        split: ``train`` or ``val``.
        keep_empty: whether a folder without an image in any split is a class.

    Raises:
        UserError: there are no images, or none in a folder of its class.
    """

    kind = "imagefolder"

    def __init__(self, root: str | Path, split: str, keep_empty: bool = False) -> None:
        folders = split_folders(Path(root))
        self._root = folders[split] if folders else Path(root)
        class_names = sorted({entry.name for folder in folders.values() or [self._root] for entry in class_folders(folder)})
        entries: list[Entry] = []
        beside = [entry for place in {Path(root), self._root} for entry in os.scandir(place)]
        ignored = [entry.name for entry in beside if not entry.is_dir() and not entry.name.startswith(".")]
        self.empty = []
        for class_name in class_names:
            folder, before = self._root / class_name, len(entries)
            for name, image in walk_images(folder) if folder.is_dir() else ():
                if image:
                    entries.append(Entry(class_name, f"{class_name}/{name}", (folder / name).stat().st_size))
                else:
                    ignored.append(name)
            others = (other / class_name for other in folders.values() if other != self._root)
            if len(entries) == before and not any(
                image for other in others if other.is_dir() for _, image in walk_images(other)
            ):
                self.empty.append(class_name)
        super().__init__(root, _classes(class_names, self.empty, keep_empty), entries, ignored)
        if not entries:
            raise _no_images(self._root, split, len(class_names), self.ignored)

    def _bytes(self, sample: int) -> bytes:
        return read_listed(self._root / self._names[sample], int(self._sizes[sample]))


def _no_images(place: str | Path, split: str, folders: int, ignored: Counter[str]) -> UserError:
    """The error for a split without an image in so many folders of classes; there may be some outside of them."""
    if outside := sum(ignored[ending] for ending in IMAGE_SUFFIXES):
        return UserError(
            f"{place} must have a folder for each class, got {counted(outside, 'image')} outside of any",
            f"move them into {place}/CLASS, or list them in a .csv with the columns path and label and pass that as --source",
        )
    return UserError(
        f"{place} must have at least 1 image of its {split} split, got 0 in {counted(folders, 'class folder')}"
        + (f", and {other_files(ignored)}" if ignored else ""),
        f"pass a folder or zip of CLASS/*.JPEG or {split}/CLASS/*.JPEG",
    )


def _classes(names: Iterable[str], empty: Sequence[str], keep_empty: bool) -> list[str]:
    return sorted({*names} | {*empty} if keep_empty else {*names} - {*empty})


def split_folders(root: Path) -> dict[str, Path]:
    """The split folders of a tree; empty for a plain tree of class folders."""
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


class ZipFolder(Source):
    """A zip of ``<split>/<class>/*.JPEG``, or of ``<class>/*.JPEG`` with one split, possibly within further folders.

    Args:
        path: the zip file. The folder of the val split may be called ``val`` or ``test``.
        split: ``train`` or ``val``.
        keep_empty: whether a folder without an image in any split is a class.

    Raises:
        UserError: not a zip, encrypted, no images, none in a folder of its class, or two images with the same name.
    """

    kind = "zip"

    def __init__(self, path: str | Path, split: str, keep_empty: bool = False) -> None:
        images, others = _members(str(path))
        ignored = ["/".join(parts) for parts in others if parts[-1]]
        folders = _split_folders(images)
        depth = 2 if folders else 1  # folders above an image: SPLIT/CLASS or CLASS
        tops = set(folders.values())
        labelled: list[_Member] = []
        for member in images:
            parts = member[0]
            if len(parts) > depth and (not folders or parts[0] in tops):
                labelled.append(member)
            else:
                ignored.append("/".join(parts))
        class_names = {parts[depth - 1] for parts, _, _ in labelled}
        below = {parts[depth - 1] for parts in others if len(parts) > depth and (not folders or parts[0] in tops)}
        self.empty = sorted(below - class_names)
        # Named as in the unpacked tree, without enclosing folders, so that both give the same shards.
        entries = [
            Entry(parts[depth - 1], "/".join(parts[depth - 1 :]), info.file_size, place)
            for parts, place, info in labelled
            if not folders or parts[0] == folders[split]
        ]
        refuse_duplicates(path, entries, _REPACK)
        super().__init__(path, _classes(class_names, self.empty, keep_empty), entries, ignored)
        if not entries:
            raise _no_images(path, split, len(class_names), self.ignored)

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
        except Exception as error:  # every compression method raises its own exceptions
            if isinstance(error, MemoryError) or isinstance(error, OSError) and error.errno is not None:
                raise
            raise UserError(f"{self.path}: {name} cannot be read ({error})", _REPACK) from None


def zip_splits(path: Path) -> list[str]:
    """The splits with a folder of their own; empty for a plain tree of class folders.

    Raises:
        UserError: not a zip, or encrypted.
    """
    return list(_split_folders(_members(str(path))[0]))


# Cached: a worker reads the images of many shards, and parsing a long list of members takes time.
@lru_cache(maxsize=2)
def _opened(path: str) -> zipfile.ZipFile:
    try:
        return zipfile.ZipFile(path)
    except OSError:
        raise
    except Exception as error:  # zipfile can raise nearly any exception on a malformed list of members
        raise UserError(f"{path} is not a complete zip file ({error})", _REPACK) from None


def _members(path: str) -> tuple[list[_Member], list[tuple[str, ...]]]:
    """The images, and the paths of all else, folders ending in ""; without the folders that enclose the whole tree.

    Raises:
        UserError: encrypted.
    """
    listed = enumerate(_opened(path).infolist())
    infos = [(place, info) for place, info in listed if not info.filename.startswith("__MACOSX/")]
    encrypted = sum(bool(info.flag_bits & _ENCRYPTED) for _, info in infos)
    if encrypted:
        raise UserError(f"{path} must not be encrypted, got {encrypted} encrypted members", "pack it again without a password")
    paths = [tuple(part for part in info.filename.split("/") if part not in ("", ".")) for _, info in infos]
    paths = [(*parts, "") if info.is_dir() else parts for parts, (_, info) in zip(paths, infos)]
    shown = [n for n, parts in enumerate(paths) if parts and not any(part.startswith(".") for part in parts[:-1])]
    images = [(paths[n], *infos[n]) for n in shown if is_image(paths[n][-1])]
    others = [paths[n] for n in shown if not is_image(paths[n][-1])]
    while len({m[0][0] for m in images}) == 1 and not _split_folders(images) and any(len(m[0]) > 2 for m in images):
        enclosing = images[0][0][0]
        others = [parts[1:] if parts[0] == enclosing and parts[1:] else parts[-1:] for parts in others]
        images = [(parts[1:], place, info) for parts, place, info in images]
    return images, others


def _split_folders(images: list[_Member]) -> dict[str, str]:
    """Split -> name of its folder, for the splits that have one."""
    top = {parts[0] for parts, _, _ in images if len(parts) > 2}  # a folder that holds images directly is a class
    named = {split: [name for name in names if name in top] for split, names in SPLIT_FOLDERS.items()}
    return {split: names[0] for split, names in named.items() if names}
