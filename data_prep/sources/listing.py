"""Read a table of paths and labels: CSV, TSV or JSON lines."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator
from pathlib import Path

from data_prep import SPLITS
from data_prep.sources.base import SPLIT_NAMES, Entry, Source, in_order, read_listed
from data_prep.sources.labels import NoClass, class_of, without_class
from pipeline.errors import UserError, first_few

LISTING_SUFFIXES = (".csv", ".tsv", ".jsonl")
_PATH, _LABEL, _SPLIT = (
    ("path", "file", "filename", "file_name", "image"),
    ("label", "class", "class_name", "target"),
    ("split",),
)


class Listing(Source):
    """A file with a line per image: its path, relative to the file's folder or absolute, its class, and perhaps its split.

    The first line of a CSV or TSV names the columns: ``path`` (or file, filename, file_name, image), ``label`` (or class, class_name,
    target) and, if there are splits, ``split`` (train, val; validation and test are val). JSON lines have these as keys.

    Args:
        path: the file.
        split: ``train`` or ``val``.
        skip: leave out images without a class, instead of refusing them.

    Raises:
        UserError: a column, value or image is missing, or the split has no image.
    """

    kind = "listing"

    def __init__(self, path: str | Path, split: str, skip: bool = False) -> None:
        rows = _rows(Path(path))
        has_splits = any(row[2] for row in rows)
        of_split = [(name, label) for name, label, its in rows if not has_splits or its == split]
        self.unlabelled = without_class(path, [label for _, label in of_split if isinstance(label, NoClass)], skip)
        wanted = [(name, label) for name, label in of_split if not isinstance(label, NoClass)]
        if not wanted:
            raise UserError(
                f"{path} must list at least 1 image of the {split} split, got 0", "add some, or pass another --split"
            )
        self._folder = Path(path).parent
        missing = [name for name, _ in wanted if not (self._folder / name).is_file()]
        if missing:
            raise UserError(
                f"{path} lists {len(missing)} images that do not exist ({first_few(missing)})",
                f"write paths that are absolute or relative to {self._folder}",
            )
        entries = [Entry(label, name, (self._folder / name).stat().st_size) for name, label in wanted]
        super().__init__(path, in_order({label for _, label, _ in rows if not isinstance(label, NoClass)}), entries)

    def _bytes(self, sample: int) -> bytes:
        return read_listed(self._folder / self._names[sample], int(self._sizes[sample]))


def listing_splits(path: Path) -> list[str]:
    """The splits that a listing names; empty without a split column.

    Raises:
        UserError: as :class:`Listing`.
    """
    named = {split for _, _, split in _rows(path)}
    return [split for split in SPLITS if split in named]


def _rows(path: Path) -> list[tuple[str, str, str]]:
    """(path, label or :class:`NoClass`, split or "") of each line.

    Raises:
        UserError: a line that cannot be read, a column or a value that is missing, or an image listed twice.
    """
    rows, seen = [], set()
    for number, row in _parsed(path):
        name, label = str(_value(path, number, row, _PATH)), class_of(_value(path, number, row, _LABEL, needed=False))
        if isinstance(label, NoClass):
            label = NoClass(f"line {number}: {label}")
        split = str(_found(row, _SPLIT) or "")
        if split and split not in SPLIT_NAMES:
            raise UserError(f"{path}, line {number}: split is {split!r}", f"write one of {', '.join(SPLIT_NAMES)}")
        if name in seen:
            raise UserError(f"{path}, line {number}: {name} is listed twice", "remove one of the lines")
        seen.add(name)
        rows.append((name, label, SPLIT_NAMES.get(split, "")))
    if not rows:
        raise UserError(
            f"{path} must have at least 1 line with an image, got 0",
            f"write the columns {_PATH[0]},{_LABEL[0]} and a line per image",
        )
    unsplit = sum(not split for _, _, split in rows)
    if 0 < unsplit < len(rows):
        raise UserError(
            f"{path} has {unsplit} lines without a split and {len(rows) - unsplit} with one", "give each line a split, or none"
        )
    return rows


def _parsed(path: Path) -> Iterator[tuple[int, dict]]:
    """Line number and content of each line."""
    try:
        with open(path, encoding="utf-8-sig", newline="") as file:
            if path.suffix == ".jsonl":
                for number, line in enumerate(file, 1):
                    if line.strip():
                        row = json.loads(line)
                        if not isinstance(row, dict):
                            raise ValueError(f"line {number} is not an object")
                        yield number, row
            else:
                reader = csv.DictReader(file, delimiter="\t" if path.suffix == ".tsv" else ",", strict=True)
                for row in reader:
                    yield reader.line_num, row
    except (ValueError, csv.Error, RecursionError) as error:
        raise UserError(f"{path} is not {path.suffix[1:].upper()} in UTF-8 ({error})", "correct the line") from None


def _found(row: dict, names: tuple[str, ...]) -> object:
    return next((row[name] for name in names if row.get(name) is not None), None)


def _value(path: Path, number: int, row: dict, names: tuple[str, ...], needed: bool = True) -> object:
    """The value in the first of the columns that has one; without ``needed``, there must be such a column, but it may be empty."""
    value = _found(row, names)
    if (value in (None, "") or isinstance(value, dict | list)) if needed else row.keys().isdisjoint(names):
        columns = ", ".join(str(key) for key in row) or "nothing"
        raise UserError(
            f"{path}, line {number} must have a {names[0]}, got {columns}",
            f"add the column {names[0]} (or {', '.join(names[1:])})",
        )
    return value
