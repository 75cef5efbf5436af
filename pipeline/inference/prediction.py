"""Predict the classes of images, or compute their features, and collect what an evaluation says of each image, as rows of a table."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

from pipeline.inference.evaluation import Consumer
from pipeline.inference.image_list import ImageList
from pipeline.inference.prediction_table import Merged
from pipeline.inference.rank_rows import RankRows
from pipeline.loader.batches import EvalBatches
from pipeline.loader.loader import Batch, Loader

Columns = Callable[[Tensor], dict[str, Tensor]]  # images (B, 3, H, W) -> columns of B rows; ``finite`` says which have a result


def score_columns(forward: Callable[[Tensor], Tensor], top: int) -> Columns:
    """The ``top`` classes of each image, by a function from images to logits (B, classes)."""

    def columns(images: Tensor) -> dict[str, Tensor]:
        scores = forward(images).float()  # (B, classes)
        probability, best = scores.softmax(dim=1).topk(top, dim=1)  # (B, top) each
        return {"top": best, "probability": probability, "finite": scores.isfinite().all(dim=1)}

    return columns


def feature_columns(forward: Callable[[Tensor], Tensor]) -> Columns:
    """The features of each image, by a function from images to (B, D)."""

    def columns(images: Tensor) -> dict[str, Tensor]:
        features = forward(images).float()  # (B, D)
        return {"features": features, "finite": features.isfinite().all(dim=1)}

    return columns


@torch.no_grad()
def predict(columns: Columns, loader: Loader[EvalBatches], images: ImageList, rows: RankRows) -> None:
    """Add a row of :func:`score_columns` or :func:`feature_columns` for each image. Collective."""
    silent = None if loader.batches.rank == 0 else True
    for _ in tqdm(range(len(loader.batches)), desc="predicting", unit="batch", leave=False, disable=silent):
        batch = next(loader)
        values = columns(batch.images)
        finite = values.pop("finite").cpu().numpy()
        position = batch.request.position  # not .index, which of an image that did not decode is its substitute's
        table = _table(rows, index=position, valid=position < len(images), label=batch.labels, **values)
        errors = {}
        for place, index in enumerate(table["index"].tolist()):
            if table["valid"][place]:
                reason = images.errors.pop(index, None) or ("" if finite[place] else "the model's scores are not finite")
                if reason:
                    errors[index] = reason
        rows.add(table, errors)


def collect_evaluated(rows: RankRows) -> Consumer:
    """A consumer of :func:`~pipeline.inference.evaluation.evaluate` that adds each batch to ``rows``, of
    :func:`~pipeline.inference.prediction_table.prediction_dtype` with labels."""

    def consume(batch: Batch, scores: Tensor, best: Tensor, losses: Tensor) -> None:
        probabilities = scores.softmax(dim=1)  # (B, classes)
        own = probabilities.gather(1, batch.labels[:, None])[:, 0]  # (B,)
        told = {"index": batch.request.index, "valid": batch.valid, "label": batch.labels, "loss": losses}
        rows.add(_table(rows, top=best, probability=probabilities.gather(1, best), label_probability=own, **told))

    return consume


def _table(rows: RankRows, **columns: Any) -> np.ndarray:
    """(B,) of the rows' dtype, of tensors and arrays by column."""
    table = np.zeros(len(columns["index"]), rows.dtype)
    for name, values in columns.items():
        table[name] = values.cpu().numpy() if isinstance(values, Tensor) else values
    return table


class Tally:
    """Counts rows as they are written: ``count`` with a prediction, ``errors`` without, and against labels ``correct1``, ``correct5``."""

    def __init__(self) -> None:
        self.count = self.errors = self.correct1 = self.correct5 = 0

    def watch(self, merged: Merged) -> Merged:
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
