"""Write TensorBoard event files, synchronously.

PyTorch's ``SummaryWriter`` writes from a thread: if its folder is removed or the disk is full, the thread dies with a
traceback, and a file that was removed is recreated without its former content. This module uses its record format, not its
thread.
"""

from __future__ import annotations

import io
import os
import socket
import time
from collections.abc import Mapping
from pathlib import Path

from tensorboard.compat.proto.event_pb2 import Event, SessionLog, SourceMetadata
from tensorboard.summary.writer.record_writer import RecordWriter
from torch import Tensor
from torch.utils.tensorboard import summary

from pipeline.files import GrowingFile, write_error


class EventFile:
    """One TensorBoard event file; records stay in memory until :meth:`flush`.

    Args:
        folder: created if it does not exist; each start of a run adds a file.
        purge_step: TensorBoard discards earlier files' records from this step on.

    Raises:
        UserError: folder or file cannot be created.
    """

    def __init__(self, folder: Path, purge_step: int) -> None:
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise write_error(folder, error) from None
        name = f"events.out.tfevents.{int(time.time()):010d}.{socket.gethostname()}.{os.getpid()}.0"  # sorts by time
        self._file = GrowingFile(folder / name)
        source = SourceMetadata(writer="pipeline.logs.event_file")
        self._add(Event(file_version="brain.Event:2", source_metadata=source), step=0)
        self._add(Event(session_log=SessionLog(status=SessionLog.START)), step=purge_step)

    def scalars(self, values: Mapping[str, float], step: int) -> None:
        """Add a point of each of several curves, by name."""
        for name, value in values.items():
            self._add(Event(summary=summary.scalar(name, value)), step)

    def image(self, name: str, image: Tensor, step: int) -> None:
        """Add an image (3, H, W), uint8."""
        self._add(Event(summary=summary.image(name, image, dataformats="CHW")), step)

    def text(self, name: str, markdown: str, step: int) -> None:
        """Add a page of text."""
        self._add(Event(summary=summary.text(name, markdown)), step)

    def hyperparameters(self, values: Mapping[str, float | str], step: int) -> None:
        """Add a row of TensorBoard's table of runs (HParams), whose further columns are the curves' latest values.

        A description of the experiment, which TensorBoard would take from any of the runs, is left out: so it lists the columns of
        all, those first in which runs differ.
        """
        _, started, _ = summary.hparams(dict(values), {})
        self._add(Event(summary=started), step)

    def flush(self, to_disk: bool = False) -> None:
        """Write the records; see :meth:`GrowingFile.flush`.

        Raises:
            UserError: the disk is full, or folder or file were removed.
        """
        self._file.flush(to_disk)

    def close(self) -> None:
        """Flush and close. Raises UserError: as :meth:`flush`."""
        self._file.close()

    def _add(self, event: Event, step: int) -> None:
        event.wall_time, event.step = time.time(), step
        record = io.BytesIO()
        RecordWriter(record).write(event.SerializeToString())  # adds length and checksums
        self._file.add(record.getvalue())
