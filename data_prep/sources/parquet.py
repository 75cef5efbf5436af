"""Read a data set of parquet files that hold encoded images, as Hugging Face stores them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

from data_prep.sources.base import SPLIT_NAMES
from data_prep.sources.labels import NoClass, class_of
from data_prep.sources.staged import Part
from pipeline.errors import UserError, missing_extra

_IMAGE, _LABEL = ("image", "img", "jpg", "png"), ("label", "labels", "fine_label", "class", "cls", "target")
_ROWS = 64  # read at once: memory is a few of these images


def parquet_files(folder: Path) -> dict[str, list[Path]]:
    """Split -> its files: those whose name, or folder, begins with the split's name; all are train where none does."""
    files = sorted(path for path in folder.rglob("*.parquet") if path.is_file() and not path.name.startswith("."))
    found: dict[str, list[Path]] = {}
    for path in files:
        words = [*path.relative_to(folder).parts[:-1], path.name]
        split = next(
            (SPLIT_NAMES[name] for word in reversed(words) for name in SPLIT_NAMES if word.lower().startswith(name)), None
        )
        if split:
            found.setdefault(split, []).append(path)
    if "val" in found and any(path.name.startswith(("val", "dev")) for path in found["val"]):
        found["val"] = [path for path in found["val"] if not path.name.startswith("test")]  # as with folders: val before test
    return found or ({"train": files} if files else {})


def parquet_parts(files: list[Path], image: str | None = None, label: str | None = None) -> tuple[list[Part], list[str] | None]:
    """The parts for :class:`~data_prep.sources.staged.Staged`, and the class names, where the files know them.

    Args:
        files: of one split.
        image, label: columns; None: by type and name.

    Raises:
        UserError: pyarrow is missing, or a file has no such columns.
    """
    try:
        import pyarrow.parquet as pq
    except ModuleNotFoundError:
        raise missing_extra(f"reading {files[0]}", "pyarrow", "parquet") from None
    parts, names = [], None
    for path in files:
        try:
            schema = pq.read_schema(path)
        except Exception as error:  # pyarrow has no one base of its errors
            raise UserError(f"{path} is not a complete parquet file ({str(error)[:100]})", "download it again") from None
        features = _features(schema.metadata)
        image_column = image or _choose(path, schema.names, features, "Image", _IMAGE, "--image-column")
        label_column = label or _choose(path, schema.names, features, "ClassLabel", _LABEL, "--label-column")
        for option, column in (("--image-column", image_column), ("--label-column", label_column)):
            if column not in schema.names:
                raise UserError(
                    f"{option} is {column}, but {path} has the columns {', '.join(schema.names)}", "pass one of these"
                )
        names = features.get(label_column, {}).get("names") or names
        identity = f"{path.name} {path.stat().st_size} {image_column} {label_column}"
        parts.append(Part(str(path), identity, partial(_images, path, image_column, label_column, names)))
    return parts, names


def _images(path: Path, image: str, label: str, names: list[str] | None) -> Iterator[tuple[str, str, bytes]]:
    import pyarrow.parquet as pq

    row = 0
    with pq.ParquetFile(path) as file:
        for batch in file.iter_batches(batch_size=_ROWS, columns=[image, label]):
            for picture, value in zip(batch.column(image).to_pylist(), batch.column(label).to_pylist()):
                data: Any = picture.get("bytes") if isinstance(picture, dict) else picture
                if not isinstance(data, bytes):
                    raise UserError(
                        f"{path}, row {row} has no encoded image in {image}", "pass a data set that carries its images"
                    )
                name = picture.get("path") if isinstance(picture, dict) else None
                yield (
                    f"{path.stem}/{row:08d}_{Path(name).name if name else 'image'}",
                    _named(class_of(value), names),
                    data,
                )
                row += 1


def _named(number: str, names: list[str] | None) -> str:
    """The name of a class that is a number in a file with names; :class:`NoClass` for a number beyond them."""
    if not names or isinstance(number, NoClass):
        return number
    return names[int(number)] if number.isdigit() and int(number) < len(names) else NoClass(number)


def _features(metadata: dict[bytes, bytes] | None) -> dict[str, dict]:
    """The column types that the `datasets` library notes in a file."""
    try:
        return json.loads((metadata or {})[b"huggingface"])["info"]["features"]
    except (KeyError, ValueError, TypeError):
        return {}


def _choose(path: Path, columns: list[str], features: dict[str, dict], kind: str, usual: tuple[str, ...], option: str) -> str:
    typed = [name for name in columns if isinstance(features.get(name), dict) and features[name].get("_type") == kind]
    named = [name for name in usual if name in columns]
    if len(typed) == 1:
        return typed[0]
    if named and (not typed or named[0] in typed):
        return named[0]
    raise UserError(
        f"{path} has the columns {', '.join(columns)}, of which it is not clear which to take", f"pass {option} NAME"
    )
