"""Write TensorBoard's event files, synchronously; name and group its curves, and the settings by which it compares runs.

PyTorch's ``SummaryWriter`` writes from a thread: if its folder is removed or the disk is full, the thread dies with a
traceback, and a file that was removed is recreated without its former content. This module uses its record format alone.

TensorBoard sorts groups by name and expands the first. So ``at_a_glance`` has copies of the curves that tell whether a run
learns, is fast and is healthy: a point for each flush of the log, and for each evaluation.
"""

import io
import math
import os
import socket
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipeline.config import Config, flatten
from pipeline.files import GrowingFile, being_written

if TYPE_CHECKING:
    from torch import Tensor

GLANCE = "at_a_glance"
_UTILIZATION = ("images_per_second", "mfu", "data_wait", "memory_gib", "peak_memory_gib")
_TROUBLE = ("replaced", "bad_samples", "skipped_steps")
_GROUPS = {**dict.fromkeys(_UTILIZATION, "utilization"), **dict.fromkeys(_TROUBLE, "trouble")}
_BEGINNINGS = ("seed", "model.", "augment.", "train.", "optim.", "data.path", "data.crop_", "data.flip", "data.train_")
NO_CURVES = ("step", "time", "epoch", "samples", "correct1", "correct5", "count")  # straight lines, or duplicates


class EventFile:
    """One event file in ``folder``, a new one for each start; records stay in memory until :meth:`flush`. TensorBoard discards
    earlier files' records from ``purge_step`` on. Raises UserError: folder or file cannot be created."""

    def __init__(self, folder: Path, purge_step: int) -> None:
        # Imported here: it takes a second, and only rank 0 needs it.
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog, SourceMetadata
        from tensorboard.summary.writer.record_writer import RecordWriter
        from torch.utils.tensorboard import summary

        self._event, self._writer, self._summary = Event, RecordWriter, summary
        with being_written(folder):
            folder.mkdir(parents=True, exist_ok=True)
        name = f"events.out.tfevents.{int(time.time()):010d}.{socket.gethostname()}.{os.getpid()}.0"  # sorts by time
        self._file = GrowingFile(folder / name)
        self.flush, self.close = self._file.flush, self._file.close
        self._add(0, file_version="brain.Event:2", source_metadata=SourceMetadata(writer="pipeline.logs.tensorboard"))
        self._add(purge_step, session_log=SessionLog(status=SessionLog.START))

    def scalars(self, values: Mapping[str, float], step: int) -> None:
        """Add a point of each of several curves, by name."""
        for name, value in values.items():
            self._add(step, summary=self._summary.scalar(name, value))

    def image(self, name: str, image: "Tensor", step: int) -> None:
        """Add an image (3, H, W), uint8."""
        self._add(step, summary=self._summary.image(name, image, dataformats="CHW"))

    def text(self, name: str, markdown: str, step: int) -> None:
        """Add a page of text."""
        self._add(step, summary=self._summary.text(name, markdown))

    def hyperparameters(self, values: Mapping[str, float | str], step: int) -> None:
        """Add a row of TensorBoard's table of runs (HParams), whose further columns are the curves' latest values."""
        # Without a description of the experiment, which TensorBoard would take from any of the runs, it lists the columns of all, those
        # first in which runs differ.
        _, started, _ = self._summary.hparams(dict(values), {})
        self._add(step, summary=started)

    def _add(self, step: int, **content: Any) -> None:
        event, record = self._event(wall_time=time.time(), step=step, **content), io.BytesIO()
        self._writer(record).write(event.SerializeToString())  # adds length and checksums
        self._file.add(record.getvalue())


def suffix(weights: str) -> str:
    """What the names of an evaluation's curves end with: "_ema" for averaged weights."""
    return "" if weights == "model" else f"_{weights}"


def of_row(row: Mapping[str, Any], group: str, suffix: str = "") -> dict[str, float]:
    """Name -> value for a row of metrics.jsonl, of ``train`` or ``eval``."""
    curves = {}
    for name, value in row.items():
        if isinstance(value, (int, float)) and name not in NO_CURVES:
            own = _GROUPS.get(name.removesuffix("_rank"), group)
            own = {"store": "store", "slowest": "utilization"}.get(name.partition("_")[0], own)
            curves[f"{own}/{name}{suffix}"] = value
    return curves


def of_steps(rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Of the first group, for the rows of one flush."""
    last = rows[-1]
    return {
        f"{GLANCE}/2_loss": math.fsum(row["loss"] for row in rows) / len(rows),
        f"{GLANCE}/3_images_per_second": last["images_per_second"],
        f"{GLANCE}/4_skipped_or_bad": last["bad_samples"] + last.get("skipped_steps", 0),
        f"{GLANCE}/5_grad_norm": last["grad_norm"],
        f"{GLANCE}/6_data_wait": last["data_wait"],
    }


def of_evaluation(results: Mapping[str, Mapping[str, Any]]) -> dict[str, float]:
    """Of the first group, for results by name of the weights: that of the average where the run keeps one."""
    return {f"{GLANCE}/1_top1": results["ema" if "ema" in results else "model"]["top1"]}


def hyperparameters(config: Config) -> dict[str, float | str]:
    """Dotted key -> value of all that may change what is learned; null, lists and switches as text."""
    return {key: _plain(value) for key, value in flatten(config).items() if key.startswith(_BEGINNINGS)}


def _plain(value: Any) -> float | str:
    if isinstance(value, dict):
        return " ".join(f"{name}={_plain(part)}" for name, part in value.items()) or "none"
    if isinstance(value, (list, tuple)):
        return ",".join(map(str, value))
    if value is None:
        return "none"  # left out, a run would not count as one that differs
    return str(value).lower() if isinstance(value, bool) else value
