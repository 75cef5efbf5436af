"""Write what a model predicts of each image as a table, for ``pipeline.predict`` and ``pipeline.evaluate --predictions``.

=====================  =============================================================================================
``file``               as it was named; of a shard set the image's key, of a folder of images ``CLASS/FILE``
``top1``               index of the class with the highest score
``top1_name``          its name
``probability``        its softmax
``top5``               indices of the best classes, best first (``--top`` of them)
``error``              why the image has no prediction; empty if it has one
``label``              of evaluations, as all that follow: index of the image's class
``probabilities``      the softmax of ``top5``, in the same order
``label_probability``  the softmax of the label
``loss``               its cross entropy, in nats
=====================  =============================================================================================

The metadata of a parquet file has the classes as JSON: ``classes``, and ``class_names`` if they have other names. The rows are in the
order of the images, for any world size and batch size.
"""

import csv
import io
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from pipeline.errors import UserError, missing_extra
from pipeline.files import check_writable, replace_file

COLUMNS = ("file", "top1", "top1_name", "probability", "top5", "error")
LABEL_COLUMNS = ("label", "probabilities", "label_probability", "loss")
ENDINGS, FEATURE_ENDINGS = (".csv", ".jsonl", ".parquet"), (".npy", ".parquet")
_LISTS = ("top5", "probabilities")

_EVERY_ROW: list[tuple] = [("valid", "?"), ("index", "<i8"), ("label", "<i4")]

Merged = Iterator[tuple[np.ndarray, list[str]]]
"""Parts of the rows, each row with its error or ""."""


def check_file(option: str, path: Path, endings: Sequence[str] = ENDINGS) -> None:
    """Check, before the pass, that the table that ``option`` names can be written. Raises UserError: it has another ending than
    ``endings``, cannot be written, or PyArrow is missing."""
    if path.suffix not in endings:
        raise UserError(f"{option} must end with {', '.join(endings[:-1])} or {endings[-1]}, got {path}", "rename the file")
    check_writable(path)
    if path.suffix != ".parquet":
        return
    try:
        import pyarrow.parquet  # noqa: F401
    except ImportError as error:
        raise missing_extra(f"{option} {path}", "PyArrow", "insight", f", or write a {endings[0]} file", error) from None


def prediction_dtype(top: int, labelled: bool = False) -> np.dtype:
    """A row of predictions with ``top`` classes; ``labelled``: with what an evaluation adds."""
    fields = [*_EVERY_ROW, ("top", "<i4", (top,)), ("probability", "<f4", (top,))]
    return np.dtype([*fields, ("label_probability", "<f4"), ("loss", "<f4")] if labelled else fields)


def features_dtype(width: int) -> np.dtype:
    """A row of features."""
    return np.dtype([*_EVERY_ROW, ("features", "<f4", (width,))])


@dataclass(frozen=True)
class Names:
    """What the numbers of a table stand for."""

    file: Callable[[int], str]  # index of an image -> its name
    classes: list[str]  # that identify the classes, by index
    shown: list[str]  # what to call them


def write_rows(path: Path, merged: Merged, names: Names, labelled: bool = False) -> None:
    """Write predictions, with ``labelled`` those of an evaluation, as CSV, JSON lines or parquet, by the ending."""
    columns = (*COLUMNS, *LABEL_COLUMNS) if labelled else COLUMNS

    def write(file: BinaryIO) -> None:
        if path.suffix == ".parquet":
            called = {} if names.shown == names.classes else {"class_names": json.dumps(names.shown)}
            with _parquet_writer(file, columns, {"classes": json.dumps(names.classes), **called}) as write_table:
                for part in merged:
                    rows = [{**row, "file": _printable(row["file"])} for row in _rows(iter([part]), columns, names)]
                    write_table({column: [row[column] for row in rows] for column in columns})
        elif path.suffix == ".jsonl":
            for row in _rows(merged, columns, names):
                file.write(json.dumps(row, ensure_ascii=True).encode() + b"\n")
        else:
            text = io.TextIOWrapper(file, encoding="utf-8", errors="surrogateescape", newline="", write_through=True)
            writer = csv.DictWriter(text, columns, lineterminator="\n")
            writer.writeheader()
            for row in _rows(merged, columns, names):
                writer.writerow({**row, **{name: " ".join(map(str, row[name] or ())) for name in _LISTS if name in row}})
            text.detach()  # the caller closes the file

    replace_file(path, write)


def _rows(merged: Merged, columns: Sequence[str], names: Names) -> Iterator[dict[str, Any]]:
    for rows, errors in merged:
        for row, error in zip(rows, errors):
            values: dict[str, Any] = {"file": names.file(int(row["index"])), "error": error}
            if not error:
                top, probabilities = row["top"].tolist(), row["probability"].tolist()
                values |= {"top1": top[0], "top1_name": names.shown[top[0]], "top5": top, "label": int(row["label"])}
                values |= {"probability": round(probabilities[0], 7), "probabilities": [_shortest(p) for p in probabilities]}
                values |= {name: _shortest(row[name]) for name in ("label_probability", "loss") if name in columns}
            yield {column: values.get(column) for column in columns}


def _shortest(value: float) -> float:
    return float(f"{value:.9g}")  # as many digits as tell any two float32 apart


def write_features(path: Path, merged: Merged, names: Names, count: int, width: int) -> None:
    """Write features as parquet (file, features, error), or as a NumPy array (count, width), NaN where there is an error, with a
    ``.txt`` of the files' names beside it."""

    def write_array(file: BinaryIO) -> None:
        np.lib.format.write_array_header_1_0(file, {"descr": "<f4", "fortran_order": False, "shape": (count, width)})
        for rows, errors in merged:
            features = np.where(np.array([bool(error) for error in errors])[:, None], np.float32("nan"), rows["features"])
            file.write(features.astype("<f4").tobytes())

    def write_parquet(file: BinaryIO) -> None:
        with _parquet_writer(file, ("file", "features", "error")) as write:
            for rows, errors in merged:
                files = [_printable(names.file(index)) for index in rows["index"].tolist()]
                features = [None if error else values for values, error in zip(rows["features"], errors)]
                write({"file": files, "features": features, "error": errors})

    if path.suffix == ".parquet":
        replace_file(path, write_parquet)
        return
    replace_file(path, write_array)
    lines = (f"{names.file(index)}\n".encode(errors="surrogateescape") for index in range(count))
    replace_file(path.with_suffix(".txt"), lambda file: file.writelines(lines))


@contextmanager
def _parquet_writer(
    file: BinaryIO, columns: Sequence[str], metadata: Mapping[str, str] | None = None
) -> Iterator[Callable[[dict[str, list]], None]]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    types: dict[str, pa.DataType] = dict.fromkeys(("file", "top1_name", "error"), pa.string())
    types |= dict.fromkeys(("top1", "label"), pa.int32()) | {"top5": pa.list_(pa.int32())}
    types |= dict.fromkeys(("probability", "label_probability", "loss"), pa.float32())
    types |= dict.fromkeys(("probabilities", "features"), pa.list_(pa.float32()))
    schema = pa.schema([(column, types[column]) for column in columns], metadata=metadata)
    with pq.ParquetWriter(file, schema) as writer:
        yield lambda table: writer.write_table(pa.table(table, schema=schema))


def _printable(name: str) -> str:
    return name.encode(errors="replace").decode()  # parquet's strings are UTF-8
