"""Read iNaturalist's competition data: images in nested folders, labels in COCO-style annotation files.

``train2019.json`` and ``val2019.json`` (any year, or no year) list ``images`` with their relative paths, ``categories``, and in
``annotations`` the category of each image.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

from data_prep import SPLITS
from data_prep.sources.base import Entry, Source, read_listed
from pipeline.errors import UserError, shown


class INaturalist(Source):
    """Images and labels from an annotation file. Classes are indexed in the order of their category ids.

    Args:
        folder: holds the annotation files and, in subfolders, the images.
        split: ``train`` or ``val``.

    Raises:
        UserError: annotations are unreadable or inconsistent, or images are missing.
    """

    kind = "inaturalist"

    def __init__(self, folder: str | Path, split: str) -> None:
        self._folder = Path(folder)
        annotations = {name: _read(path) for name, path in annotation_files(self._folder).items()}
        path = annotation_files(self._folder)[split]
        names = _class_names([tree["categories"] for tree in annotations.values()], path)
        labels = {(row["image_id"], row["category_id"]) for row in annotations[split]["annotations"]}
        category_of = dict(labels)
        if len(labels) != len(category_of):
            raise UserError(
                f"{path} must give each image one category, got two for {len(labels) - len(category_of)} images",
                "download it again",
            )
        unlabelled = [row["file_name"] for row in annotations[split]["images"] if category_of.get(row["id"]) not in names]
        if unlabelled:
            raise UserError(
                f"{path} has {len(unlabelled)} images without one of its {len(names)} categories ({unlabelled[0]}, ...)",
                "download it again",
            )
        files = {row["file_name"]: names[category_of[row["id"]]] for row in annotations[split]["images"]}
        twice = len(annotations[split]["images"]) - len(files)
        if twice:
            raise UserError(f"{path} lists {twice} images twice", "download it again")
        missing = [name for name in files if not (self._folder / name).is_file()]
        if missing or not files:
            raise UserError(
                f"{path} lists {len(files)} images, of which {len(missing)} are not in {folder} "
                f"({missing[0] if missing else 'none'}, ...)",
                "unpack the images there",
            )
        entries = [Entry(class_name, name, (self._folder / name).stat().st_size) for name, class_name in files.items()]
        super().__init__(folder, [names[number] for number in sorted(names)], entries)

    def _bytes(self, sample: int) -> bytes:
        return read_listed(self._folder / self._names[sample], int(self._sizes[sample]))


def annotation_files(folder: Path) -> dict[str, Path]:
    """The annotation file of each split that has one.

    Raises:
        UserError: several years in one folder.
    """
    found: dict[str, Path] = {}
    for split in SPLITS:
        named = [path for path in sorted(folder.glob(f"{split}*.json")) if re.fullmatch(rf"{split}(\d{{4}})?\.json", path.name)]
        files = [path for path in named if path.is_file()]
        if len(files) > 1:
            raise UserError(
                f"{folder} must have one annotation file for {split}, got {len(files)} ({files[0].name}, {files[1].name})",
                "move those of the other years elsewhere",
            )
        if files:
            found[split] = files[0]
    return found


def _read(path: Path) -> dict[str, list[dict]]:
    """Read the three lists of an annotation file, keeping and validating the keys that are used."""
    needed = {"images": ("id", "file_name"), "annotations": ("image_id", "category_id"), "categories": ("id", "name")}
    try:
        tree = json.loads(path.read_bytes())
        tables = {table: [{key: row[key] for key in keys} for row in tree[table]] for table, keys in needed.items()}
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise UserError(
            f"{path} must have images, annotations and categories as in iNaturalist's files ({type(error).__name__}: {error})",
            "download it again",
        ) from None
    for table, rows in tables.items():
        for number, row in enumerate(rows):
            for key, value in row.items():
                wanted = _WANTED.get(key, _NUMBER)
                if not wanted[0](value):
                    raise UserError(
                        f"{path}: {key} of {table} {number} must be {wanted[1]}, got {shown(value):.60}", "download it again"
                    )
    return tables


def _is_below_the_folder(name: object) -> bool:
    return isinstance(name, str) and name.isprintable() and not name.startswith("/") and ".." not in name.split("/")


_NUMBER = (lambda value: type(value) is int, "a whole number")
_WANTED = {
    "file_name": (_is_below_the_folder, "a path below the folder"),
    "name": (lambda value: isinstance(value, str), "a string"),
}


def _class_names(tables: list[list[dict]], path: Path) -> dict[int, str]:
    """Category id -> class name over all splits. If two categories have the same name, every name gets its id appended."""
    names = {row["id"]: str(row["name"]) for table in tables for row in table}
    rows = {(row["id"], str(row["name"])) for table in tables for row in table}
    if len(rows) != len(names):
        raise UserError(
            f"{path} and the other split's file must agree on names, got two for {len(rows) - len(names)} categories",
            "take both files of one year",
        )
    unique = len(set(names.values())) == len(names)
    return names if unique else {number: f"{name} ({number})" for number, name in names.items()}
