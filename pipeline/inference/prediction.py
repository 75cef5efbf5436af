"""Predict the classes of images, compute their features, or collect what an evaluation says of each, as rows that rank 0 merges.

Each rank collects its rows in hidden files, and rank 0 puts them together in the order of the batches: memory does not grow.
"""

import json
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, ExitStack, suppress
from pathlib import Path
from secrets import token_hex
from types import MappingProxyType
from typing import Any, BinaryIO

import numpy as np
import torch
from torch import Tensor

from pipeline.cluster.agreement import do_in_main, raise_on_all
from pipeline.cluster.world import World
from pipeline.errors import UserError
from pipeline.files import disk_reason, remove_leftovers
from pipeline.inference.evaluation import Consumer, Forward
from pipeline.inference.image_list import ImageList
from pipeline.inference.prediction_table import Merged
from pipeline.loader.batches import EvalBatches
from pipeline.loader.loader import Batch, Loader
from pipeline.terminal import Progress

_KINDS = ("rows", "errors")  # hidden files of each rank
_ROWS_AT_ONCE = 16384  # in memory


class RankRows(AbstractContextManager["RankRows"]):
    """Rows of one pass, of a ``dtype`` whose field ``valid`` marks those that count, in hidden files beside the result at ``path``, in a
    folder that all ranks see. A context manager, which removes this rank's. Construction is collective. Raises UserError: on
    every rank: the hidden files cannot be created."""

    def __init__(self, path: Path, dtype: np.dtype, batches: EvalBatches, world: World) -> None:
        self._path, self.dtype, self._batches, self._world = path, dtype, batches, world
        if world.is_main:
            remove_leftovers(path)
        self._token = world.from_main(token_hex(4))  # apart from those of another pass into the same file
        self._failure: UserError | None = None
        self._files: list[BinaryIO] = []
        try:
            self._files = [open(self._part(kind, world.rank), "xb") for kind in _KINDS]
        except OSError as error:
            self._failure = self._refusal(error)
        raise_on_all(self._failure, world)

    def add(self, errors: Mapping[int, str] = MappingProxyType({}), **columns: Any) -> None:
        """Add a batch: by field of the dtype (batch_size, ...), padding included; by an image's index why it has no result."""
        if self._failure:
            return
        rows = np.zeros(len(columns["index"]), self.dtype)
        for name, values in columns.items():
            rows[name] = values.cpu().numpy() if isinstance(values, Tensor) else values
        try:
            self._files[0].write(rows.tobytes())
            for index in sorted(errors):
                self._files[1].write(json.dumps([index, errors[index]]).encode() + b"\n")
        except OSError as error:  # said when all ranks are done: the others are in a collective
            self._failure = self._refusal(error)

    def publish(self, write: Callable[[Merged], object]) -> None:
        """End the pass, and let rank 0 ``write`` the valid rows of all ranks in their order: it gets some at a time, at least once, with no
        row perhaps. Collective. Raises UserError: on every rank: some rank could not write."""
        try:
            for file in self._files:
                file.close()
        except OSError as error:
            self._failure = self._failure or self._refusal(error)
        raise_on_all(self._failure, self._world)

        def publish() -> None:
            try:
                write(self._merged())
            except OSError as error:
                raise self._refusal(error) from None

        do_in_main(publish, self._world)

    def _merged(self) -> Merged:
        with ExitStack() as stack:
            opened = [
                [stack.enter_context(open(self._part(kind, rank), "rb")) for kind in _KINDS] for rank in range(self._world.size)
            ]
            waiting = [_next_error(errors) for _, errors in opened]
            held: list[np.ndarray] = []
            said: list[str] = []
            for _ in range(len(self._batches)):
                for rank, (part, errors) in enumerate(opened):
                    rows = np.fromfile(part, self.dtype, self._batches.batch_size)
                    rows = rows[rows["valid"]]
                    held.append(rows)
                    for index in rows["index"].tolist():
                        if index != waiting[rank][0]:
                            said.append("")
                            continue
                        said.append(waiting[rank][1])
                        waiting[rank] = _next_error(errors)
                if len(said) >= _ROWS_AT_ONCE:
                    yield np.concatenate(held), said
                    held, said = [], []
            yield np.concatenate([np.empty(0, self.dtype), *held]), said

    def __exit__(self, *_: object) -> None:
        for kind, file in zip(_KINDS, self._files):
            with suppress(OSError):
                file.close()
            self._part(kind, self._world.rank).unlink(missing_ok=True)

    def _part(self, kind: str, rank: int) -> Path:
        return self._path.with_name(f".{self._path.name}.{self._token}-{kind}-{rank:05d}.tmp")

    def _refusal(self, error: OSError) -> UserError:
        problem = f"{error.filename or self._path} cannot be written or read ({disk_reason(self._path, error)})"
        return UserError(problem, "pass a file in a folder that all processes share and can write, with enough space")


def _next_error(file: BinaryIO) -> tuple[int, str]:
    line = file.readline()
    index, reason = json.loads(line) if line else (-1, "")  # no image has this number
    return index, reason


@torch.no_grad()
def predict(forward: Forward, top: int | None, loader: Loader[EvalBatches], images: ImageList, rows: RankRows) -> None:
    """Add a row for each image: the ``top`` classes of logits (B, classes), or, with None, features (B, D). Collective."""
    for _ in Progress(len(loader.batches), "predicting", "batches", loader.batches.rank == 0):
        batch = next(loader)
        results = forward(batch.images).float()  # (B, classes) or (B, D)
        if top is None:
            values = {"features": results}
        else:
            probability, best = results.softmax(dim=1).topk(top, dim=1)  # (B, top) each
            values = {"top": best, "probability": probability}
        finite = results.isfinite().all(dim=1).cpu().numpy()
        position = batch.request.position  # not .index, which of an image that did not decode is its substitute's
        valid = position < len(images)
        errors = {}
        for index, usable in zip(position[valid].tolist(), finite[valid]):
            if reason := images.errors.pop(index, None) or ("" if usable else "the model's scores are not finite"):
                errors[index] = reason
        rows.add(errors, index=position, valid=valid, label=batch.labels, **values)


def collect_evaluated(rows: RankRows) -> Consumer:
    """A consumer of :func:`~pipeline.inference.evaluation.evaluate` that adds each batch to ``rows``, of
    :func:`~pipeline.inference.prediction_table.prediction_dtype` with labels."""

    def consume(batch: Batch, scores: Tensor, best: Tensor, losses: Tensor) -> None:
        probabilities = scores.softmax(dim=1)  # (B, classes)
        own = probabilities.gather(1, batch.labels[:, None])[:, 0]  # (B,)
        told: dict[str, Any] = {"index": batch.request.index, "valid": batch.valid, "label": batch.labels, "loss": losses}
        rows.add(top=best, probability=probabilities.gather(1, best), label_probability=own, **told)

    return consume


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
