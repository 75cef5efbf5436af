"""A terminal that was closed, or a ``tee`` that has ended, ends no training: what nobody can read is not written.

Every line of the log that counts is also in ``metrics.jsonl``. Whether the run ends with its terminal is for the signal to
say (``stop_signal.py``): with ``nohup`` it goes on.
"""

from __future__ import annotations

import errno
import os
import sys
from typing import Any, TextIO


def outlive_readers() -> None:
    """From here on writing to stdout and stderr no longer fails because their terminal or the reader of their pipe is gone."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is not None and not isinstance(stream, _Outliving):
            setattr(sys, name, _Outliving(stream))


class _Outliving:
    """A stream that goes to /dev/null as soon as its reader is gone; a full disk is an error as before."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._gone = (errno.EPIPE, errno.EIO) if stream.isatty() else (errno.EPIPE,)  # EIO of a file is a broken disk

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        try:
            return self._stream.write(text)
        except OSError as error:
            self._give_up(error)
        return len(text)

    def flush(self) -> None:
        try:
            self._stream.flush()
        except OSError as error:
            self._give_up(error)

    def _give_up(self, error: OSError) -> None:
        if error.errno not in self._gone:
            raise error
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, self._stream.fileno())  # the descriptor: Python flushes what is left at its end, else with exit code 120
        os.close(nowhere)
