"""One pass over images that predicts their classes, or computes their features, and the files that it writes.

===============  ===================================================================================
``file``         as it was named
``top1``         index of the class with the highest score
``top1_name``    its name
``probability``  its softmax
``top5``         indices of the best classes, best first (--top of them)
``error``        why the image has no prediction; empty if it has one
===============  ===================================================================================
"""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

from pipeline.data.image_list import ImageList
from pipeline.data.loader import Loader
from pipeline.data.plan import EvalPlan
from pipeline.models.common.base import VisionModel
from pipeline.run.rank_rows import RankRows

if TYPE_CHECKING:
    import pyarrow as pa

COLUMNS = ("file", "top1", "top1_name", "probability", "top5", "error")


@torch.no_grad()
def predict(forward: Callable[[Tensor], Tensor], loader: Loader[EvalPlan], images: ImageList, rows: RankRows, top: int) -> None:
    """Predict the classes of all images. Collective.

    Args:
        forward: images (B, 3, H, W) -> logits (B, classes).
        loader: of ``images``.
        images: the samples of the loader's plan.
        rows: of :func:`prediction_dtype`.
        top: classes to keep per image.
    """

    def columns(batch: Tensor) -> dict[str, Tensor]:
        scores = forward(batch).float()  # (B, classes)
        probability, best = scores.softmax(dim=1).topk(top, dim=1)  # (B, top) each
        return {"top": best, "probability": probability, "finite": scores.isfinite().all(dim=1)}

    _run(loader, images, rows, columns)


@torch.no_grad()
def compute_features(forward: Callable[[Tensor], Tensor], loader: Loader[EvalPlan], images: ImageList, rows: RankRows) -> None:
    """As :func:`predict`, with ``forward`` returning features (B, D)."""
    _run(
        loader, images, rows, lambda batch: {"features": (them := forward(batch).float()), "finite": them.isfinite().all(dim=1)}
    )


def _run(loader: Loader[EvalPlan], images: ImageList, rows: RankRows, columns: Callable[[Tensor], dict[str, Tensor]]) -> None:
    world_silent = None if loader.plan.rank == 0 else True
    for _ in tqdm(range(len(loader.plan)), desc="predicting", unit="batch", leave=False, disable=world_silent):
        batch = next(loader)
        table = np.zeros(len(batch.images), rows.dtype)
        table["index"] = batch.request.position  # not .index, which of an image that did not decode is its substitute's
        table["valid"] = batch.request.position < len(images)
        table["label"] = batch.labels.cpu().numpy()
        values = columns(batch.images)
        finite = values.pop("finite").cpu().numpy()
        for name, value in values.items():
            table[name] = value.cpu().numpy()
        errors = {}
        for place, index in enumerate(table["index"].tolist()):
            if table["valid"][place]:
                reason = images.errors.pop(index, None) or ("" if finite[place] else "the model's scores are not finite")
                if reason:
                    errors[index] = reason
        rows.add(table, errors)
    rows.complete()


def prediction_dtype(top: int) -> np.dtype:
    """A row of predictions."""
    return np.dtype([*_EVERY_ROW, ("top", "<i4", (top,)), ("probability", "<f4", (top,))])


def features_dtype(width: int) -> np.dtype:
    """A row of features."""
    return np.dtype([*_EVERY_ROW, ("features", "<f4", (width,))])


_EVERY_ROW = [("valid", "?"), ("index", "<i8"), ("label", "<i4")]


def pooled_features(model: VisionModel) -> Callable[[Tensor], Tensor]:
    """The function images (B, 3, H, W) -> (B, D): what the model's classifier sees, D its inputs."""
    return model.pooled


class Tally:
    """Counts rows as they are written: ``count`` with a prediction, ``errors`` without, and against labels ``correct1``, ``correct5``."""

    def __init__(self) -> None:
        self.count = self.errors = self.correct1 = self.correct5 = 0

    def watch(self, merged: Iterator[tuple[np.ndarray, list[str]]]) -> Iterator[tuple[np.ndarray, list[str]]]:
        """Pass rows on."""
        for rows, errors in merged:
            good = np.array([not error for error in errors], dtype=bool)
            self.count += int(good.sum())
            self.errors += int((~good).sum())
            if "top" in (rows.dtype.names or ()):
                hits = (rows["top"] == rows["label"][:, None]) & good[:, None]  # (n, top)
                self.correct1 += int(hits[:, 0].sum())
                self.correct5 += int(hits[:, :5].sum())
            yield rows, errors


Merged = Iterator[tuple[np.ndarray, list[str]]]
Named = Callable[[int], str]


def write_rows(path: Path, file: BinaryIO, merged: Merged, name: Named, classes: list[str]) -> None:
    """Write predictions as CSV, JSON lines or parquet, by the ending."""
    writer = {".csv": _csv, ".jsonl": _json_lines, ".parquet": _parquet}[path.suffix]
    writer(file, merged, name, classes)


def _rows(merged: Merged, name: Named, classes: list[str]) -> Iterator[dict[str, Any]]:
    for rows, errors in merged:
        for row, error in zip(rows, errors):
            top = row["top"].tolist()
            found = (
                (None, None, None, None) if error else (top[0], classes[top[0]], round(float(row["probability"][0]), 7), top)
            )
            yield dict(zip(COLUMNS, (name(int(row["index"])), *found, error)))


def _csv(file: BinaryIO, merged: Merged, name: Named, classes: list[str]) -> None:
    text = io.TextIOWrapper(file, encoding="utf-8", errors="surrogateescape", newline="", write_through=True)
    writer = csv.DictWriter(text, COLUMNS, lineterminator="\n")
    writer.writeheader()
    for row in _rows(merged, name, classes):
        writer.writerow({**row, "top5": " ".join(map(str, row["top5"] or ()))})
    text.detach()  # the caller closes the file


def _json_lines(file: BinaryIO, merged: Merged, name: Named, classes: list[str]) -> None:
    for row in _rows(merged, name, classes):
        file.write(json.dumps(row, ensure_ascii=True).encode() + b"\n")


def _parquet(file: BinaryIO, merged: Merged, name: Named, classes: list[str]) -> None:
    import pyarrow as pa

    types = (pa.string(), pa.int32(), pa.string(), pa.float32(), pa.list_(pa.int32()), pa.string())
    with _parquet_writer(file, pa.schema(list(zip(COLUMNS, types)), metadata={"classes": json.dumps(classes)})) as write:
        for part in merged:
            rows = list(_rows(iter([part]), lambda index: _printable(name(index)), classes))
            write({column: [row[column] for row in rows] for column in COLUMNS})


def write_features(path: Path, file: BinaryIO, merged: Merged, name: Named, count: int, width: int) -> None:
    """Write features as parquet (file, features, error) or as a NumPy array (count, width), NaN where there is an error."""
    if path.suffix == ".npy":
        header = {"descr": "<f4", "fortran_order": False, "shape": (count, width)}
        np.lib.format.write_array_header_1_0(file, header)
        for rows, errors in merged:
            features = np.where(np.array([bool(error) for error in errors])[:, None], np.float32("nan"), rows["features"])
            file.write(features.astype("<f4").tobytes())
        return
    import pyarrow as pa

    types = (pa.string(), pa.list_(pa.float32()), pa.string())
    with _parquet_writer(file, pa.schema(list(zip(("file", "features", "error"), types)))) as write:
        for rows, errors in merged:
            files = [_printable(name(index)) for index in rows["index"].tolist()]
            write({"file": files, "features": [None if e else f for f, e in zip(rows["features"], errors)], "error": errors})


@contextmanager
def _parquet_writer(file: BinaryIO, schema: pa.Schema) -> Iterator[Callable[[dict[str, list]], None]]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    with pq.ParquetWriter(file, schema) as writer:
        yield lambda columns: writer.write_table(pa.table(columns, schema=schema))


def _printable(name: str) -> str:
    return name.encode(errors="replace").decode()  # parquet's strings are UTF-8
