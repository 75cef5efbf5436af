"""Parse a command's arguments, run it and end it: a mistake of the user is one sentence, not a traceback."""

import argparse
import errno
import os
import select
import signal
import sys
import textwrap
import time
import traceback
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from itertools import groupby
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from pipeline.errors import USER_ERROR, UserError, first_line, printable
from pipeline.terminal import fitted, paint

Main = TypeVar("Main", bound=Callable[[], int | None])


def _own(names: str) -> dict[str, str]:
    return {name: f"pipeline.{name}" for name in names.split()}


# Commands of ``pervit``, by what one wants to do -> module of ``python -m``. Named, not imported: most take a second to import, and
# ``pipeline`` does not know ``data_prep``.
COMMANDS = {
    "Try it": _own("demo"),
    "Data": {
        "shard": "data_prep.shard_imagenet",
        "verify-shards": "data_prep.verify_shards",
        "upload-shards": "data_prep.upload_shards",
        "stage-shards": "data_prep.stage_shards",
    },
    "Train": _own("plan doctor train sweep watch track checkpoint"),
    "Use": _own("evaluate predict probe export"),
    "Understand": _own("report analyze audit"),
    "Look up": _own("models config flops throughput"),
}


LAUNCHER = Path(__file__).parents[1] / "launch" / "local.sh"  # of a clone; an installed package trains with one process
# Whether torchrun's agent shows what this process prints beside the same of the node's first one, which gets some seconds to report it.
SPEAKS_SECOND, _FIRST_WORD = "TORCHELASTIC_RUN_ID" in os.environ and os.environ.get("LOCAL_RANK", "0") != "0", 3.0


class CommandParser(argparse.ArgumentParser):
    """A parser that lets ``look`` see the words first, with the options that it knows, for better answers than argparse's."""

    look: Callable[[Sequence[str], Collection[str]], None] | None = None

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        words = sys.argv[1:] if args is None else list(args)
        if self.look:
            self.look(words, self._option_string_actions)
        return super().parse_known_args(words, namespace)


class _HelpFormatter(argparse.HelpFormatter):
    """Writes prose as wide as the terminal; indented lines, which are commands, stay as they are."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        filled: list[str] = []
        for kept, group in groupby(text.splitlines(), key=lambda line: not line or line.startswith(" ")):
            lines = list(group)
            filled += lines if kept else textwrap.wrap(" ".join(lines), width, break_long_words=False, break_on_hyphens=False)
        return "\n".join(filled)


def command_parser(module: str, description: str | None, epilog: str | None = None) -> CommandParser:
    """A parser whose usage shows what was typed, not the file's name. ``module``: of the command, as for ``python -m``."""
    return CommandParser(
        prog=typed(module),
        description=description or "",  # None: of python -OO
        epilog=epilog or "",
        formatter_class=_HelpFormatter,
    )


def typed(module: str) -> str:
    """How this process was started: ``pervit``, ``pervit train``, ``pervit-train``, ``python FILE``, or ``python -m`` with the module."""
    called = Path(sys.argv[0])
    if called.name.startswith("pervit"):
        return called.name
    if called.name.startswith("__main__.py "):  # pipeline/__main__.py adds the command that it runs
        return f"python -m pipeline {called.name.partition(' ')[2]}"
    if called.suffix == ".py" and sys.modules["__main__"].__spec__ is None:  # a file: python data_prep/shard_imagenet.py
        return f"python {called}"
    return f"python -m {module}"


def python_command(processes: int, *words: str) -> list[str]:
    """The command that runs a module with arguments in so many processes of this machine. Raises UserError: there is no launcher for several."""
    if processes == 1:
        return [sys.executable, "-u", "-m", *words]
    if not LAUNCHER.is_file():
        problem = f"{processes} processes require {LAUNCHER}, which only a clone of the repository has"
        raise UserError(problem, "start one process")
    path = f"{Path(sys.executable).parent}:{os.environ.get('PATH', os.defpath)}"  # the launcher takes the python on it
    return ["env", f"PATH={path}", "bash", str(LAUNCHER), str(processes), "--", *words]


def _fail(message: str, code: int = USER_ERROR) -> NoReturn:
    if SPEAKS_SECOND:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)  # from the agent, if the first one has failed too: then all is said
        time.sleep(_FIRST_WORD)
    if message.startswith("error: "):
        message = fitted(paint("error:", "red", sys.stderr) + message.removeprefix("error:"), sys.stderr)
    print(message, file=sys.stderr)
    sys.stdout.flush()
    sys.stderr.flush()
    distributed = sys.modules.get("torch.distributed")  # lacks the function while it is being imported
    if distributed and getattr(distributed, "is_initialized", bool)():
        # With collectives pending the interpreter would crash during its shutdown, with another exit code.
        os._exit(code)
    sys.exit(code)


def lacks_memory(error: Exception) -> bool:
    """Whether an allocation failed: in Python, for a thread, in PyTorch on CPU or GPU, or while loading a library."""
    if isinstance(error, MemoryError) or isinstance(error, OSError) and error.errno == errno.ENOMEM:
        return True
    said = ("allocate memory", "out of memory", "failed to map segment", "start new thread")
    return isinstance(error, RuntimeError | ImportError) and any(words in str(error) for words in said)


@contextmanager
def interrupted_later() -> Iterator[None]:
    """Put Ctrl-C off while libraries are loaded: raised in a C++ module that is being initialized, it would abort the process."""
    if signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield
        return
    received: list[int] = []
    signal.signal(signal.SIGINT, lambda number, _frame: received.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if received:
        raise KeyboardInterrupt


def begins_anew(main: Main) -> Main:
    """Mark a command's ``main`` that, given again after Ctrl-C, starts from the beginning; others continue where they stopped."""
    main.begins_anew = True  # type: ignore[attr-defined]
    return main


def run_command(main: Callable[[], int | None]) -> NoReturn:
    """Run a command's ``main`` and exit: a :class:`UserError` or an ``OSError`` of the file system becomes one line on stderr.
    ``main`` returns its exit code, or None for 0; what Ctrl-C prints depends on :func:`begins_anew`."""
    # Threads that have done their share spin for the others, ten times as long by default. On a busy machine that takes the core which
    # those wait for: training is up to a quarter slower. A tenth of this costs 14 % where the cores are quiet, this nothing.
    os.environ.setdefault("GOMP_SPINCOUNT", "30000")
    try:
        code = main()
    except UserError as error:
        _fail(f"error: {error}", error.exit_code)
    except KeyboardInterrupt:
        anew = getattr(main, "begins_anew", False)
        after = "starts from the beginning" if anew else "continues from what was saved, if anything was"
        _fail(f"stopped; the same command {after}", 130)
    except ModuleNotFoundError as error:
        if (error.name or "pipeline").partition(".")[0] in ("pipeline", "data_prep"):
            _fail(traceback.format_exc(), 1)
        made = "(`source .venv/bin/activate`; `make install` in the repository makes it)"
        use = f"use the Python of the environment with this project's packages {made}"
        _fail(f"error: {sys.executable} has no package {error.name!r}: {use}.")
    except Exception as error:
        if lacks_memory(error):
            remedy = "lower train.micro_batch_size or batch_size, or raise the limit (ulimit -v, --mem of sbatch)"
            # Not USER_ERROR: another start may find more memory.
            _fail(f"error: there is not enough memory ({first_line(error)}): {remedy}.", 1)
        if isinstance(error, BrokenPipeError):
            poll = select.poll()
            poll.register(sys.stdout, 0)  # POLLERR, of a pipe whose reader has exited, is always reported
            if any(state & select.POLLERR for _, state in poll.poll(0)):  # as in `... | head`
                os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python flushes stdout at exit
                sys.exit(1)
        if not isinstance(error, OSError) or error.filename is None and error.errno is None:
            _fail(traceback.format_exc(), 1)  # not an error of the file system
        place = printable(str(error.filename or "reading or writing a file"), 500)
        _fail(f"error: {place}: {error.strerror}: check the path, its permissions and the free space.")
    sys.exit(code or 0)
