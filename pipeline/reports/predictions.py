"""Read the table of ``pipeline.evaluate --predictions FILE``, derive accuracy by class, confusions and mistakes; read their images."""

from __future__ import annotations

import base64
import csv
import io
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from pipeline.errors import UserError, missing_extra
from pipeline.inference.prediction_table import ENDINGS
from pipeline.page import Html, html
from pipeline.shards.image_folder import ImageFolder, open_split
from pipeline.shards.manifest import sample_key
from pipeline.shards.shard_set import ShardSet
from pipeline.stores.place import Place
from pipeline.stream.samples import DamagedSample

NAMES = tuple(f"predictions{ending}" for ending in reversed(ENDINGS))  # in the run folder
_NEEDED = ("file", "label", "top1", "top5", "probabilities", "label_probability")
_MAKE = "make it with `python -m pipeline.evaluate --checkpoint RUN --data SHARDS --predictions FILE`"
_LARGEST_CLASS = 10**6
_SIDE = 160  # pixels of the longer side of a picture in the page
_QUALITY = 82


@dataclass(frozen=True)
class Predictions:
    """n images, in the file's order.

    Attributes:
        path: the file.
        files: names of the images; of a shard set their keys.
        label, top1: (n,) class numbers.
        top5: (n, up to 5) class numbers, the likeliest first; -1 fills up.
        probabilities: (n, up to 5) float64, of ``top5``.
        label_probability: (n,) float64.
    """

    path: Path
    files: list[str]
    label: np.ndarray
    top1: np.ndarray
    top5: np.ndarray
    probabilities: np.ndarray
    label_probability: np.ndarray

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
        found = []
        for label in np.unique(self.label):
            members = self.label == label
            found.append((int(label), int(members.sum()), int(self.right[members].sum()), int(among[members].sum())))
        return found

    def confusions(self) -> list[tuple[int, int, int, float]]:
        """(label, predicted, images, share of the label's images) of every pair that was confused, the most frequent first."""
        wrong = ~self.right
        pairs, counts = np.unique(np.stack([self.label[wrong], self.top1[wrong]]), axis=1, return_counts=True)
        size = {label: images for label, images, _, _ in self.by_class()}
        found = [(int(a), int(b), int(count), count / size[int(a)]) for (a, b), count in zip(pairs.T, counts)]
        return sorted(found, key=lambda pair: (-pair[2], -pair[3], pair[0], pair[1]))

    def confident_mistakes(self, count: int) -> list[int]:
        """Images with the wrong class at the highest probability."""
        wrong = np.flatnonzero(~self.right)
        return wrong[np.argsort(-self.certainty[wrong], kind="stable")][:count].tolist()

    def uncertain_hits(self, count: int) -> list[int]:
        """Images with the right class at the lowest probability."""
        right = np.flatnonzero(self.right)
        return right[np.argsort(self.certainty[right], kind="stable")][:count].tolist()


def find_predictions(run: Path, given: Path | None) -> Path | None:
    """The file that was given, or the one in the run folder; None if there is none.

    Raises:
        UserError: the given one does not exist.
    """
    if given:
        if not given.is_file():
            raise UserError(f"--predictions {given} does not exist", _MAKE)
        return given
    return next((run / name for name in NAMES if (run / name).is_file()), None)


def read_predictions(path: Path) -> Predictions:
    """Read a parquet, CSV or JSON lines file.

    Raises:
        UserError: it cannot be read, or a column is missing or not of its kind.
    """
    columns = {".csv": _read_csv, ".jsonl": _read_json_lines}.get(path.suffix, _read_parquet)(path)
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


def _classes(values: list[Any]) -> np.ndarray:
    numbers = np.array([int(value) for value in values], dtype=np.int64)
    if ((numbers < 0) | (numbers >= _LARGEST_CLASS)).any():
        raise ValueError("a class number is out of range")
    return numbers


def _matrix(rows: list[Any], filling: float) -> np.ndarray:
    """Lists of up to five numbers as (n, longest)."""
    lists = [[float(value) for value in (row.split() if isinstance(row, str) else row)] for row in rows]
    longest = max(map(len, lists))
    if longest > 100:
        raise ValueError("a list has more than 100 numbers")
    whole = np.array([row + [filling] * (longest - len(row)) for row in lists], dtype=np.float64)
    if not np.isfinite(whole).all():
        raise ValueError("a number is not finite")
    return whole


def _read_csv(path: Path) -> dict[str, list[Any]]:
    try:
        with open(path, newline="", encoding="utf-8", errors="replace") as file:  # a file's name need not be UTF-8
            rows = csv.reader(file)
            names = next(rows, [])
            listed = [row for row in rows if row]
    except (OSError, ValueError, csv.Error) as error:
        raise _unreadable(path, error) from None
    if any(len(row) != len(names) for row in listed):
        raise UserError(f"{path} is damaged (a row and the first line differ in their number of columns)", _MAKE)
    return {name: [row[place] for row in listed] for place, name in enumerate(names)}


def _read_json_lines(path: Path) -> dict[str, list[Any]]:
    try:
        rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
        return {name: [row[name] for row in rows] for name in (rows[0] if rows else _NEEDED)}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise _unreadable(path, error) from None


def _read_parquet(path: Path) -> dict[str, list[Any]]:
    try:
        from pyarrow import ArrowException
        from pyarrow.parquet import read_table
    except ImportError:
        raise missing_extra(f"reading {path}", "pyarrow", "insight") from None
    try:
        return read_table(path).to_pydict()
    except (OSError, ArrowException) as error:
        raise _unreadable(path, error) from None


def _unreadable(path: Path, error: Exception) -> UserError:
    reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    return UserError(f"{path} cannot be read ({' '.join(reason.split())[:100]})", _MAKE)


def class_namer(classes: list[str]) -> Callable[[int], str]:
    """The name of a class by its number; its number where there is no name."""
    return lambda number: classes[number] if 0 <= number < len(classes) else f"class {number}"


class Pictures:
    """Reads images of a data set.

    Args:
        folder: with shards or with images.
        classes: class names in index order, for a folder of images.

    Raises:
        UserError: there is no data set.
    """

    def __init__(self, folder: Place, classes: list[str], split: str = "val") -> None:
        self._set = open_split(folder, split, classes)
        self._names = {self._set.key(i): i for i in range(len(self._set))} if isinstance(self._set, ImageFolder) else {}
        self._first: dict[int, int] = {}
        if isinstance(self._set, ShardSet):
            shards, first = np.unique(self._set.samples["shard"], return_index=True)
            self._first = dict(zip(shards.tolist(), first.tolist()))

    @property
    def classes(self) -> list[str]:
        return list(self._set.class_names)

    def tag(self, key: str, label: int) -> Html | None:
        """The image of a key as an ``img`` element; None if it is not there, is of another label, or cannot be decoded."""
        index = self._index(key)
        if index is None:
            return None
        if int(self._set.samples[np.array([index])]["label"][0]) != label:
            return None  # another data set: a wrong picture would be worse than none
        try:
            return html('<img alt="{}" src="{}">', key, data_uri(self._set.read(index).tobytes()))
        except (DamagedSample, OSError, ValueError):
            return None

    def _index(self, key: str) -> int | None:
        if isinstance(self._set, ImageFolder):
            return self._names.get(key)
        shard, _, place = key.partition("-")
        if not (shard.isascii() and shard.isdigit() and place.isascii() and place.isdigit()) or len(key) > 30:
            return None
        index = self._first.get(int(shard), len(self._set)) + int(place)
        return index if index < len(self._set) and sample_key(int(shard), int(place)) == self._set.key(index) else None


def data_uri(encoded: bytes, side: int = _SIDE) -> str:
    """An image, made smaller, as the address of itself.

    Raises:
        OSError, ValueError: it cannot be decoded.
    """
    from PIL import Image

    with Image.open(io.BytesIO(encoded)) as image:
        small = image.convert("RGB")
    small.thumbnail((side, side))
    return _uri(small, "jpeg", quality=_QUALITY)


def file_uri(path: Path, longest: int = 1400) -> str:
    """A PNG file as an address of itself, made smaller where a side is longer than ``longest`` pixels.

    Raises:
        OSError, ValueError: it cannot be decoded.
    """
    from PIL import Image

    with Image.open(path) as image:
        image.load()
        shown = image if image.mode in ("RGB", "RGBA", "L", "P") else image.convert("RGB")
    if max(shown.size) > longest:
        shown = shown.convert("RGB")
        shown.thumbnail((longest, longest))
    return _uri(shown, "png", optimize=True)


def _uri(image: Any, form: str, **options: Any) -> str:
    file = io.BytesIO()
    image.save(file, form, **options)
    return f"data:image/{form};base64,{base64.b64encode(file.getvalue()).decode()}"
