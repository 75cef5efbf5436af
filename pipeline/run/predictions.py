"""What a model says of each image of an evaluation, as a table: ``pipeline.evaluate --predictions FILE``.

========================= =============================================================================================
``key``                   of the image in its shards; ``CLASS/FILE`` of a folder of images
``label``                 index of its class; the parquet file's metadata has the names as JSON, ``classes``
``predicted``             index of the class with the highest score
``top5``                  indices of the five classes with the highest scores, best first; fewer with fewer classes
``probabilities``         the softmax of these, in the same order
``label_probability``     the softmax of the label
``loss``                  its cross entropy, in nats
========================= =============================================================================================

The rows are in the data set's order and those that the evaluation counted, for any world size and batch size.
"""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

import numpy as np

from pipeline.errors import UserError
from pipeline.files import check_writable, replace_file
from pipeline.run.rank_rows import PARQUET, RankRows, check_parquet, write_refusal

if TYPE_CHECKING:
    from torch import Tensor

    from pipeline.data.loader import Batch
    from pipeline.data.plan import EvalPlan
    from pipeline.distributed.world import World

CSV = ".csv"
_COLUMNS = ("key", "label", "predicted", "top5", "probabilities", "label_probability", "loss")


def check_predictions(path: Path) -> None:
    """Check, before the pass, that predictions can be written to ``path``.

    Raises:
        UserError: it ends with neither ``.parquet`` nor ``.csv``, cannot be written, or PyArrow is missing.
    """
    if path.suffix not in (PARQUET, CSV):
        raise UserError(f"--predictions {path} ends with neither {PARQUET} nor {CSV}", "name a file with one of these")
    check_writable(path)
    check_parquet("--predictions", path, instead=CSV)


class Predictions:
    """Collects the predictions of one pass as a consumer of :func:`pipeline.run.evaluation.evaluate`, then writes them.

    A context manager, which removes this rank's hidden files. Construction is collective.

    Args:
        path: the file, in a folder that all ranks see.
        plan: of this rank.
        world: all ranks.

    Raises:
        UserError: on every rank: the hidden files cannot be created.
    """

    def __init__(self, path: Path, plan: EvalPlan, world: World) -> None:
        self._path, self._plan, self._world = path, plan, world
        best = min(5, len(plan.shards.classes))
        fields: list[tuple] = [("valid", "?"), ("index", "<i8"), ("label", "<i4"), ("top", "<i4", (best,))]
        fields += [("probability", "<f4", (best,)), ("label_probability", "<f4"), ("loss", "<f4")]
        self._rows = RankRows(path, np.dtype(fields), plan, world)

    def __call__(self, batch: Batch, scores: Tensor, best: Tensor, losses: Tensor) -> None:
        """Note a batch.

        Args:
            batch: B images.
            scores: (B, classes) float32.
            best: (B, 5) int64, the classes with the highest scores.
            losses: (B,).
        """
        probabilities = scores.softmax(dim=1)  # (B, classes)
        rows = np.empty(len(scores), self._rows.dtype)
        rows["index"] = batch.request.index
        columns = {
            "valid": batch.valid,
            "label": batch.labels,
            "top": best,
            "probability": probabilities.gather(1, best),
            "label_probability": probabilities.gather(1, batch.labels[:, None])[:, 0],
            "loss": losses,
        }
        for name, values in columns.items():
            rows[name] = values.cpu().numpy()
        self._rows.add(rows)

    def write(self) -> None:
        """Write the file, or replace it as a whole. Collective.

        Raises:
            UserError: on every rank: it cannot be written.
        """
        from pipeline.distributed.agreement import do_in_main

        self._rows.complete()
        do_in_main(self._merge, self._world)

    def __enter__(self) -> Predictions:
        return self

    def __exit__(self, *_: object) -> None:
        self._rows.close()

    def _merge(self) -> None:
        try:
            replace_file(self._path, self._write_parquet if self._path.suffix == PARQUET else self._write_csv)
        except OSError as error:
            raise write_refusal(self._path, error) from None

    def _write_parquet(self, file: BinaryIO) -> None:
        import pyarrow as pa
        import pyarrow.parquet as pq

        whole, real = pa.int32(), pa.float32()
        types = (pa.string(), whole, whole, pa.list_(whole), pa.list_(real), real, real)
        images = self._plan.shards
        metadata = {"classes": json.dumps(images.classes)}
        if (named := getattr(images, "named", None)) is not None:
            metadata["class_names"] = json.dumps(named)
        schema = pa.schema(list(zip(_COLUMNS, types)), metadata=metadata)
        with pq.ParquetWriter(file, schema) as writer:
            for rows, _ in self._rows.merged():
                columns = [self._keys(rows), rows["label"], rows["top"][:, 0], list(rows["top"]), list(rows["probability"])]
                columns += [rows["label_probability"], rows["loss"]]
                writer.write_table(pa.table([pa.array(*column) for column in zip(columns, types)], schema=schema))

    def _write_csv(self, file: BinaryIO) -> None:
        text = io.TextIOWrapper(file, encoding="utf-8", newline="", write_through=True)
        writer = csv.writer(text, lineterminator="\n")
        writer.writerow(_COLUMNS)
        for rows, _ in self._rows.merged():
            for key, row in zip(self._keys(rows), rows):
                top = row["top"].tolist()
                probabilities, rest = row["probability"].tolist(), (row["label_probability"], row["loss"])
                lists = (" ".join(map(str, top)), " ".join(map(_digits, probabilities)))
                writer.writerow([key, row["label"], top[0], *lists, *map(_digits, rest)])
        text.detach()  # the caller closes the file

    def _keys(self, rows: np.ndarray) -> list[str]:
        return [self._plan.shards.key(index) for index in rows["index"].tolist()]


def _digits(value: float) -> str:
    return f"{value:.9g}"  # as many as tell any two float32 apart
