"""Read the table of ``pipeline.evaluate --predictions FILE``, derive accuracy by class, confusions and mistakes."""

import csv
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from pipeline.errors import UserError
from pipeline.inference.prediction_table import ENDINGS
from pipeline.lazy import import_library

_NEEDED = ("file", "label", "top1", "top5", "probabilities", "label_probability")
_MAKE = "make it with `pervit evaluate --checkpoint RUN --data SHARDS --predictions FILE`"
_LARGEST_CLASS = 10**6
_LONGEST_LIST = 100


@dataclass(frozen=True)
class Predictions:
    """n images, in the file's order."""

    path: Path  # the file
    files: list[str]  # names of the images; of a shard set their keys
    label: np.ndarray  # (n,) class numbers
    top1: np.ndarray  # (n,) class numbers
    top5: np.ndarray  # (n, up to 5) class numbers, the likeliest first; -1 fills up
    probabilities: np.ndarray  # (n, up to 5) float64, of ``top5``
    label_probability: np.ndarray  # (n,) float64

    @property
    def right(self) -> np.ndarray:
        """(n,) bool: the likeliest class is the label."""
        return self.label == self.top1

    @property
    def certainty(self) -> np.ndarray:
        """(n,) probability of the likeliest class."""
        return self.probabilities[:, 0]

    def by_class(self) -> list[tuple[int, int, int, int]]:
        """(class, images, right, right among the first five) of each class with images, by number."""
        among = (self.top5 == self.label[:, None]).any(axis=1)
        labels, place, images = np.unique(self.label, return_inverse=True, return_counts=True)
        sums = (np.bincount(place, found, len(labels)).astype(int).tolist() for found in (self.right, among))
        return list(zip(labels.tolist(), images.tolist(), *sums))

    def confusions(self) -> list[tuple[int, int, int, float]]:
        """(label, predicted, images, share of the label's images) of every pair that was confused, the most frequent first."""
        wrong = ~self.right
        pairs, counts = np.unique(np.stack([self.label[wrong], self.top1[wrong]]), axis=1, return_counts=True)
        size = {label: images for label, images, _, _ in self.by_class()}
        found = [(int(a), int(b), int(count), count / size[int(a)]) for (a, b), count in zip(pairs.T, counts)]
        return sorted(found, key=lambda pair: (-pair[2], -pair[3], pair[0], pair[1]))

    def ranked(self, right: bool, count: int) -> list[int]:
        """Images with the right class at the lowest probability, or with the wrong class at the highest."""
        found = np.flatnonzero(self.right == right)
        certainty = self.certainty[found] if right else -self.certainty[found]
        return found[np.argsort(certainty, kind="stable")][:count].tolist()


def find_predictions(run: Path, given: Path | None) -> Path | None:
    """The file that was given, or the one in the run folder; None: neither. Raises UserError: the given one is missing."""
    if given and not given.is_file():
        raise UserError(f"--predictions {given} does not exist", _MAKE)
    places = (run / f"predictions{ending}" for ending in reversed(ENDINGS))
    return given or next((place for place in places if place.is_file()), None)


def read_predictions(path: Path) -> Predictions:
    """Read a parquet, CSV or JSON lines file. Raises UserError: it cannot be read, or a column is missing or wrong."""
    try:
        columns = _columns(path)
    except UserError:
        raise
    except (OSError, ValueError, KeyError, TypeError, csv.Error) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise UserError(f"{path} cannot be read ({' '.join(reason.split())[:100]})", _MAKE) from None
    missing = [name for name in _NEEDED if name not in columns]
    if missing:
        raise UserError(f"{path} must have the columns {', '.join(_NEEDED)}, got no {missing[0]!r}", _MAKE)
    if not columns["file"]:
        raise UserError(f"{path} must have at least 1 image, got 0", _MAKE)
    try:
        found = Predictions(
            path=path,
            files=[str(name) for name in columns["file"]],
            label=_classes(columns["label"]),
            top1=_classes(columns["top1"]),
            top5=_matrix(columns["top5"], -1).astype(np.int64),
            probabilities=_matrix(columns["probabilities"], 0.0),
            label_probability=np.array([float(value) for value in columns["label_probability"]]),
        )
        if not found.probabilities.shape[1] or found.top5.shape != found.probabilities.shape:
            raise ValueError("top5 and probabilities differ in length")
    except (ValueError, TypeError, OverflowError) as error:
        raise UserError(f"{path} is damaged ({' '.join(str(error).split())[:100]})", _MAKE) from None
    return found


def _columns(path: Path) -> dict[str, list[Any]]:
    """Name of a column -> its cells, by the file's ending."""
    if path.suffix == ".jsonl":
        objects = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
        return {name: [row[name] for row in objects] for name in (objects[0] if objects else _NEEDED)}
    if path.suffix == ".csv":
        with open(path, newline="", encoding="utf-8", errors="replace") as file:  # a file's name need not be UTF-8
            names, *rows = [row for row in csv.reader(file) if row] or [[]]
        if any(len(row) != len(names) for row in rows):
            raise UserError(f"{path} is damaged (a row and the first line differ in their number of columns)", _MAKE)
        return {name: [row[place] for row in rows] for place, name in enumerate(names)}
    arrow = import_library("pyarrow", f"reading {path}", extra="insight")
    from pyarrow.parquet import read_table

    try:
        return read_table(path).to_pydict()
    except arrow.ArrowException as error:
        raise ValueError(str(error)) from None


def _classes(values: list[Any]) -> np.ndarray:
    numbers = np.array([int(value) for value in values], dtype=np.int64)
    if ((numbers < 0) | (numbers >= _LARGEST_CLASS)).any():
        raise ValueError("a class number is out of range")
    return numbers


def _matrix(rows: list[Any], filling: float) -> np.ndarray:
    """Lists of up to five numbers as (n, longest)."""
    lists = [[float(value) for value in (row.split() if isinstance(row, str) else row)] for row in rows]
    longest = max(map(len, lists))
    if longest > _LONGEST_LIST:
        raise ValueError(f"a list has more than {_LONGEST_LIST} numbers")
    whole = np.array([row + [filling] * (longest - len(row)) for row in lists], dtype=np.float64)
    if not np.isfinite(whole).all():
        raise ValueError("a number is not finite")
    return whole
