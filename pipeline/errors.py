"""Define errors of the user, one sentence each, and the exit codes of all commands."""

import difflib
import re
import reprlib
import signal
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

# Exit codes of every command; 75 and 76 ask the job script for a restart.
USER_ERROR = 2  # a mistake that a restart cannot fix
PREEMPTED = 75  # stopped by a signal, all that was trained is saved (EX_TEMPFAIL of sysexits.h)
RANK_LOST = 76  # another rank died or hangs

CREDENTIALS = "remove {}; the repository's docs/remote.md says which variables and files credentials are read from"
_LONGEST_VALUE = 80  # characters of a value that a message shows

# Extras with torchvision, whose wheels are each for one build of PyTorch -> their packages.
_WITH_TORCHVISION = {"timm": "torchvision timm", "torchvision": "torchvision", "detection": "torchvision pycocotools"}


def exit_reason(exit_code: int) -> str:
    """Say in words why a training ended with an exit code."""
    if exit_code == PREEMPTED:
        return "stopped by a signal"
    if exit_code == RANK_LOST:
        return "a process was lost"
    try:
        return f"a process was ended by {signal.Signals(exit_code - 128).name}"  # as shells and srun count it
    except ValueError:
        return "a process failed"


class UserError(ValueError):
    """A mistake in a config, a path or a data set, as one sentence: ``problem: remedy.``

    Commands print it and exit with code 2; library callers may catch it as a ``ValueError``.

    Args:
        problem: names the file or key, what was found and what is needed; the whole sentence if there is no ``remedy``.
        remedy: what the user can do, in the imperative, without a full stop. A caller with a better one uses ``error.problem``.
    """

    exit_code = USER_ERROR

    def __init__(self, problem: str, remedy: str = "") -> None:
        self.problem = without_secrets(problem)
        super().__init__(f"{self.problem}: {without_secrets(remedy)}." if remedy else self.problem)


class NotConnected(UserError):
    """The ranks did not find each other. Another start may succeed, so the job may be requeued."""

    exit_code = RANK_LOST
    missing: Sequence[int] = ()  # ranks that never came, where that is known


def without_secrets(text: str, is_url: bool = False) -> str:
    """A text, its URLs without users and passwords; where a text ``is_url``, these may have spaces."""
    return re.sub(r"(://)[^/]*@" if is_url else r"(://)[^/\s]*@", r"\1", text)


def check_no_secrets(name: str, text: str) -> None:
    """Raise a UserError, about ``name``, if a text has a URL with a user or a password, or is one."""
    if without_secrets(text, is_url=re.match(r"\S+://", text) is not None) != text:
        problem = f"{without_secrets(name, is_url=True)} must not hold a user or a password, which configs and logs would keep"
        raise UserError(problem, CREDENTIALS.format("them"))


def missing_extra(user: str, package: str, extra: str, otherwise: str = "", error: Exception | None = None) -> UserError:
    """``user``, such as an option, requires a package that an ``extra`` of pyproject.toml installs; ``error``: of its import."""
    state = f"which cannot be imported ({first_line(error)})" if error else "which is not installed"
    return UserError(f"{user} requires {package}, {state}", install_extra(extra) + otherwise)


def install_extra(extra: str) -> str:
    """The command that installs an extra beside this copy of the package, which no registry has."""
    import shlex
    from importlib import metadata

    try:
        pytorch = metadata.version("torch")
    except metadata.PackageNotFoundError:
        pytorch = ""
    if extra in _WITH_TORCHVISION and pytorch.endswith("+cpu"):
        release = pytorch.partition("+")[0]
        only = f"torchvision of PyPI loads only beside PyTorch of PyPI, not beside {pytorch}"
        run = f"run: pip install torch=={release} {_WITH_TORCHVISION[extra]}"
        return f"{only}; in a second environment, or after pip uninstall torch torchvision, {run}"
    clone = Path(__file__).resolve().parents[1]
    if (clone / "constraints.txt").is_file():
        here = clone == Path.cwd()
        target, constraints = (".", "constraints.txt") if here else (str(clone), shlex.quote(str(clone / "constraints.txt")))
        return f"pip install -e {shlex.quote(f'{target}[{extra}]')} -c {constraints}"
    # Of a wheel, which may be gone: what it says that the extra is.
    needs = metadata.requires("pervit-pipeline") or []
    named = [need.partition(";")[0].strip() for need in needs if f'extra == "{extra}"' in need]
    return f"pip install {shlex.join(named)}"


def first_line(error: BaseException) -> str:
    """The first line of an error's message, without a full stop, for the middle of a sentence; the error's type if it has none."""
    return (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(".: ")


class _Shortened(reprlib.Repr):
    """``repr`` with bounded length and depth, and YAML's words."""

    def __init__(self) -> None:
        super().__init__()
        self.maxstring = self.maxother = self.maxlong = _LONGEST_VALUE
        self.maxlist = self.maxtuple = self.maxdict = self.maxset = 8
        self.maxlevel = 3

    def repr_int(self, value: int, level: int) -> str:
        return f"a number of more than {_LONGEST_VALUE} digits" if abs(value) >= 10**_LONGEST_VALUE else repr(value)

    def repr_float(self, value: float, level: int) -> str:
        return f"{value:.0f}" if value.is_integer() and abs(value) < 1e15 else repr(value)

    def repr_bool(self, value: bool, level: int) -> str:
        return str(value).lower()

    def repr_NoneType(self, value: None, level: int) -> str:
        return "null"


shown = _Shortened().repr  # a value for a message


def first_invalid(error: Any, whole: str = "the file") -> str:
    """The first mistake in pydantic's ``ValidationError``: ``PLACE must ..., got ...``; ``whole``: the PLACE where no key is at fault."""
    problem = error.errors(include_url=False)[0]
    place = printable(".".join(str(part) for part in problem["loc"] if part != "[key]") or whole, 60)
    need = problem["msg"].partition(" should ")[2].partition(" after validation")[0]
    if not need:  # a key that is missing or unknown, or no JSON
        return f"{place} is missing" if problem["type"] == "missing" else f"{place}: {problem['msg']}"
    return f"{place} must {need}, got {shown(problem['input']):.60}"


def first_few(names: Sequence[str], most: int = 3) -> str:
    """The first of several names, for a message: ``a, b, c, ...``."""
    return ", ".join([*names[:most], *["..."] * (len(names) > most)])


def did_you_mean(name: str, known: Iterable[str], otherwise: str, form: str = "{}") -> str:
    """The remedy for an unknown name: the one of ``known`` that is closest, in a ``form``, or ``otherwise``."""
    close = difflib.get_close_matches(name, list(known), n=1)
    return f"did you mean {form.format(close[0])}?" if close else otherwise


def counted(number: int, word: str) -> str:
    """A number with its noun: ``1 shard``, ``2 shards``, ``3 classes``, ``4 batches``, ``1,000 images``."""
    return f"{number:,} {word}" if number == 1 else f"{number:,} {word}{'es' if word.endswith(('s', 'ch')) else 's'}"


def printable(text: str, limit: int) -> str:
    """Text from elsewhere that is safe to print: control characters become "?", and it is cut to ``limit`` characters."""
    if len(text) <= limit and text.isprintable():
        return text
    kept = "".join(c if c.isprintable() else "?" for c in text[: limit + 1])
    return kept if len(kept) <= limit else kept[: limit - 3] + "..."


def size_text(count: float) -> str:
    """A number of bytes in a readable unit, with three digits."""
    for unit, factor in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= 0.9995 * factor:  # what is rounded to 1000 of the smaller unit, too
            return f"{count / factor:.3g} {unit}"
    return f"{count:.0f} B"
