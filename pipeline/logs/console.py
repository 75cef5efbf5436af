"""Handle records of the ``pipeline`` logger: progress to stdout, warnings to stderr, both above the progress bar.

Any module logs to ``logging.getLogger(__name__)``; a command calls :func:`install`. Without it, in a library, Python's defaults
hold: warnings go to stderr, progress nowhere.
"""

import io
import logging
import sys
from contextlib import suppress
from typing import TYPE_CHECKING

from tqdm import tqdm

from pipeline.cluster.environment import is_first_process
from pipeline.terminal import Stage, fitted, paint, stamped

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer  # known to type checkers only

    from pipeline.cluster.world import World


class ConsoleHandler(logging.Handler):
    """``DATE TIME text`` on stdout, or ``warning: text`` on stderr, the form of a command's ``error: text``: a line per record in a
    file; a terminal has no date, and its lines are wrapped."""

    def emit(self, record: logging.LogRecord) -> None:
        # Nothing is caught here: a stream that cannot be written is the command's to judge, see outlive_the_terminal.
        text = record.getMessage()
        if record.levelno >= logging.WARNING:
            stream, colour = sys.stderr, "yellow" if record.levelno == logging.WARNING else "red"
            line = f"{paint(f'{record.levelname.lower()}:', colour, stream)} {text}"
        else:
            stream = sys.stdout
            line = stamped(text, stream, record.created)
        tqdm.write(fitted(line, stream), file=stream)
        stream.flush()


def install() -> None:
    """Send what the package logs, from level INFO, to the console. A second call changes nothing."""
    logger = logging.getLogger("pipeline")
    if not any(isinstance(handler, ConsoleHandler) for handler in logger.handlers):
        logger.addHandler(ConsoleHandler())
        logger.setLevel(logging.INFO)
        logger.propagate = False  # a library that configures the root logger would print every line twice


def say(text: str) -> None:
    """Log a line of progress, and see that it is shown."""
    install()
    logging.getLogger("pipeline").info(text)


def say_once(world: "World", text: str) -> None:
    """:func:`say` on rank 0 only: what takes seconds, or minutes on a busy disk."""
    if world.is_main:
        say(text)


def stage(what: str) -> Stage:
    """A :class:`Stage` of the command, shown by the first process."""
    return Stage(what, is_first_process())


def outlive_the_terminal() -> None:
    """Make stdout and stderr drop what cannot be written: a training survives the end of its terminal, or of ``| tee``."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        with suppress(OSError, ValueError, AttributeError):  # closed, or not a file: leave it
            raw = _LossyFile(stream.fileno(), "w", closefd=False)
            lines = stream.line_buffering or stream.write_through  # stderr: else a bar is not cleared before what is written
            lossy = io.TextIOWrapper(io.BufferedWriter(raw), stream.encoding, stream.errors, line_buffering=lines)
            stream.flush()
            setattr(sys, name, lossy)


class _LossyFile(io.FileIO):
    def write(self, data: "ReadableBuffer", /) -> int:
        try:
            return super().write(data)
        except OSError:  # EIO: the terminal was closed; EPIPE: the reader has exited; ENOSPC: may pass
            return memoryview(data).nbytes
