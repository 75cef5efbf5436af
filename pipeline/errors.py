"""Errors that are the user's to mend: one sentence, no traceback."""

from __future__ import annotations

import errno
import os
import select
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn, TextIO

USER_ERROR = 2  # exit codes of every command: a mistake that a restart does not mend,
PREEMPTED = 75  # stopped by a signal, all that was trained is saved: start me again (sysexits.h: a temporary failure),
RANK_LOST = 76  # another process died or hangs: start us again


class UserError(ValueError):
    """A mistake in a config, a path or a data set.

    The message is one sentence that names the file or key, what was found, what is needed and the
    remedy. Commands print it and exit with 2; library callers may catch it as a ``ValueError``.
    """

    exit_code = USER_ERROR


class NotConnected(UserError):
    """The processes did not find each other: another start may, so the job may be requeued."""

    exit_code = RANK_LOST


def check_writable(path: Path) -> None:
    """See before the work begins that its result can be written to ``path``.

    Raises:
        UserError: it is a folder, or its folder does not exist or cannot be written.
    """
    if path.is_dir():
        raise UserError(f"{path} is a folder, the name of a file needed: add one.")
    if not os.access(path.absolute().parent, os.W_OK):
        raise UserError(
            f"{path}: the folder {path.absolute().parent} does not exist or cannot be written: create it or choose another."
        )


def _fail(message: str, code: int = USER_ERROR) -> NoReturn:
    print(message, file=sys.stderr)
    sys.stdout.flush()
    sys.stderr.flush()
    distributed = sys.modules.get("torch.distributed")  # without the function while it is being imported
    if distributed and getattr(distributed, "is_initialized", bool)():
        # With exchanges between processes under way the interpreter would crash as it tidies up, with another code.
        os._exit(code)
    sys.exit(code)


def _lacks_memory(error: Exception) -> bool:
    """Whether memory was refused: to Python, to a thread, to PyTorch on the CPU or a GPU, or to a library that was to be loaded."""
    if isinstance(error, MemoryError) or isinstance(error, OSError) and error.errno == errno.ENOMEM:
        return True
    said = ("allocate memory", "out of memory", "failed to map segment", "start new thread")
    return isinstance(error, RuntimeError | ImportError) and any(words in str(error) for words in said)


def _is_unread(stream: TextIO) -> bool:
    """Whether a stream leads into a pipe that nobody reads any longer."""
    poll = select.poll()
    poll.register(stream, 0)  # errors are told unasked
    return any(state & select.POLLERR for _, state in poll.poll(0))


def run_command(main: Callable[[], int | None]) -> NoReturn:
    """Run a command's ``main``: a :class:`UserError`, or a file system that refuses, becomes one line on stderr and exit code 2."""
    try:
        code = main()
    except UserError as error:
        _fail(f"error: {error}", error.exit_code)
    except KeyboardInterrupt:
        _fail("stopped; the same command goes on from what is saved", 130)
    except ModuleNotFoundError as error:
        if (error.name or "pipeline").partition(".")[0] in ("pipeline", "data_prep"):
            _fail(traceback.format_exc(), 1)
        _fail(
            f"error: {sys.executable} has no package {error.name!r}: use the Python of the environment that has this project's "
            f"packages (`source .venv/bin/activate`; `make install` in the repository makes it)."
        )
    except (MemoryError, OSError, RuntimeError, ImportError) as error:
        if _lacks_memory(error):
            reason = str(error).partition("\n")[0] or type(error).__name__
            _fail(
                f"error: there is not enough memory ({reason}): lower train.micro_batch_size or batch_size, or raise the limit (ulimit -v, --mem of sbatch).",
                1,  # another start may find more
            )
        if isinstance(error, BrokenPipeError) and _is_unread(sys.stdout):  # as in `... | head`
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for what Python still flushes
            sys.exit(1)
        if not isinstance(error, OSError) or error.filename is None and error.errno is None:
            _fail(traceback.format_exc(), 1)  # not from the file system
        _fail(
            f"error: {error.filename or 'writing a file'}: {error.strerror}: see to the path, its permissions and the free space."
        )
    except Exception:
        _fail(traceback.format_exc(), 1)
    sys.exit(code or 0)
