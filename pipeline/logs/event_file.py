"""TensorBoard's curves and images, written at once and in the process itself.

PyTorch's ``SummaryWriter`` writes from a thread: when its folder is removed or the disk is full, the thread dies with a
traceback on the screen, and a file that was removed begins anew, without what was in it. Its records are used here, not its thread.
"""

from __future__ import annotations

import io
import os
import socket
import time
from pathlib import Path

from tensorboard.compat.proto.event_pb2 import Event, SessionLog, SourceMetadata
from tensorboard.summary.writer.record_writer import RecordWriter
from torch import Tensor
from torch.utils.tensorboard import summary

from pipeline.files import GrowingFile, write_error


class EventFile:
    """One TensorBoard event file; what is added lies in memory until :meth:`flush`.

    Args:
        folder: created if it does not exist; each start of a run adds a file to it.
        purge_step: TensorBoard forgets what earlier files say of this step and later ones.

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

    def scalar(self, name: str, value: float, step: int) -> None:
        """A point of a curve."""
        self._add(Event(summary=summary.scalar(name, value)), step)

    def image(self, name: str, image: Tensor, step: int) -> None:
        """A picture: (3, H, W), uint8."""
        self._add(Event(summary=summary.image(name, image, dataformats="CHW")), step)

    def text(self, name: str, markdown: str, step: int) -> None:
        """A page of text."""
        self._add(Event(summary=summary.text(name, markdown)), step)

    def flush(self, to_disk: bool = False) -> None:
        """Write what was added; see :meth:`GrowingFile.flush`.

        Raises:
            UserError: the disk is full, or folder or file were removed.
        """
        self._file.flush(to_disk)

    def close(self) -> None:
        """Write what is left, and close.

        Raises:
            UserError: as :meth:`flush`.
        """
        self._file.close()

    def _add(self, event: Event, step: int) -> None:
        event.wall_time, event.step = time.time(), step
        record = io.BytesIO()
        RecordWriter(record).write(event.SerializeToString())  # length and checksums around it
        self._file.add(record.getvalue())
