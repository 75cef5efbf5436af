"""What a run says to people: one line at a time, above the progress bar if there is one, even where nobody can read it any more."""

from __future__ import annotations

import io
import os
import sys
import time
from contextlib import suppress
from typing import TYPE_CHECKING

from tqdm import tqdm

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer  # known to type checkers only


def say(text: str) -> None:
    """Print a line with the local date and time before it."""
    tqdm.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {text}")
    sys.stdout.flush()


def is_first_process() -> bool:
    """Whether this process will be rank 0: for what is said before PyTorch is there to ask."""
    rank = os.environ.get("SLURM_PROCID", "0") if "SLURM_STEP_ID" in os.environ else "0"
    return os.environ.get("RANK", rank) == "0"


def outlive_the_terminal() -> None:
    """From now on what cannot be printed is dropped: a training does not end because its terminal, or a ``| tee``, is gone."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        with suppress(OSError, ValueError, AttributeError):  # closed, or not a file: as it is, then
            raw = _LossyFile(stream.fileno(), "w", closefd=False)
            lossy = io.TextIOWrapper(
                io.BufferedWriter(raw), encoding=stream.encoding, errors=stream.errors, line_buffering=stream.line_buffering
            )
            stream.flush()
            setattr(sys, name, lossy)


class _LossyFile(io.FileIO):
    def write(self, data: ReadableBuffer, /) -> int:
        try:
            return super().write(data)
        except OSError:  # EIO: the terminal was closed; EPIPE: the reader has ended; ENOSPC: it may be possible again later
            return memoryview(data).nbytes


def duration(seconds: float) -> str:
    """As people say it, two units at most: ``40 s``, ``5 min``, ``1 h 12 min``, ``2 d 3 h``."""
    minutes = round(seconds / 60)
    if minutes < 1:
        return f"{seconds:.0f} s"
    if minutes < 60:
        return f"{minutes} min"
    if minutes < 24 * 60:
        return f"{minutes // 60} h {minutes % 60} min"
    hours = round(minutes / 60)
    return f"{hours // 24} d {hours % 24} h"
