"""Read a sweep's file: one line of overrides for each run.

::

    # PerViT-T on the digits
    all: --config demo train.epochs=3

    optim.lr=1e-3 seed=0
    optim.lr=5e-4 seed=0
    --config pervit_s optim.lr=5e-4

Words are split as in a shell. Blank lines and what follows a ``#`` at the beginning of a word are comments. ``all:`` holds what every
run begins with; the words of a run's own line win. The folder of a run is named after its line, so that it stays the same when lines
are added, moved or removed.
"""

import hashlib
import os
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile
from pathlib import Path
from typing import NoReturn

from pipeline.config import Config, flatten, load_config, section_from_dict
from pipeline.errors import UserError
from pipeline.models.registry import check_name, model_entry
from pipeline.runs import CHECKPOINTS, METRICS
from pipeline.runs import CONFIG as RUN_CONFIG
from pipeline.stores.place import is_remote, parse_place

CONFIG = "--config"
_ALL = "all:"
_FOLDER = "output_dir"
_LONGEST = 120  # characters of a folder's name; file systems allow 255 bytes
_EXAMPLE = "--config pervit_t optim.lr=1e-3"


# What a word must not have, with the reason, and what to do.
_REFUSED = (
    ("%a", "%a, which a job array replaces", "write the value itself"),
    (r"\$(\w+|\{\w+\})|=~(?=/|$)", "{}, which only a shell replaces", "write the value itself"),
    ("\n", "a line break", "take it out"),
)


@dataclass(frozen=True)
class Words:
    """The words of a line, or of the command."""

    place: str  # for messages
    config: str = ""  # after ``--config``; empty: none
    overrides: tuple[str, ...] = ()

    @property
    def keys(self) -> list[str]:
        return [word.partition("=")[0] for word in self.overrides]


@dataclass(frozen=True)
class SweepRun:
    """A run of the file."""

    number: int  # among the file's, from 1
    line: int  # from 1
    name: str  # of its folder
    config_file: str
    overrides: tuple[str, ...]  # the last one is ``output_dir``
    config: Config  # of both

    @property
    def folder(self) -> Path:
        return self.config.folder


@dataclass(frozen=True)
class Sweep:
    """A file that was read and found right."""

    file: Path
    text: str  # as it was then
    folder: Path  # in which the runs' folders are
    runs: tuple[SweepRun, ...]


def read_sweep(file: Path, words: Sequence[str] = ()) -> Sweep:
    """Read a sweep's file and check every run's config; a ``UserError`` names the first mistake, with the file and the line. ``words``: of
    the command, for all runs: ``--config CONFIG`` and overrides. ``output_dir`` is the sweep's folder."""
    try:
        text = file.read_bytes().decode("utf-8-sig")
    except (FileNotFoundError, IsADirectoryError, UnicodeDecodeError) as error:
        kinds: dict[type[Exception], str] = {FileNotFoundError: "no such file", IsADirectoryError: "a folder"}
        got = kinds.get(type(error), "something that is not text in UTF-8")
        raise UserError(f"{file} must be a file with a line of overrides for each run, got {got}", "correct the path") from None
    return parse_sweep(file, text, words)


def parse_sweep(file: Path, text: str, words: Sequence[str] = (), variables: Mapping[str, str] = os.environ) -> Sweep:
    """:func:`read_sweep` of a file with this content. ``variables``: ``PERVIT_DATA`` and ``PERVIT_OUTPUT`` are ``data.path`` and the
    sweep's folder unless something else says them."""
    typed = read_words(words, f"the words after {file}")
    common, lines = Words(f"{file}"), []
    for number, line in enumerate(text.splitlines(), 1):
        place, own = f"{file}, line {number}", line.lstrip().removeprefix(_ALL)
        found = read_words(split_line(own, place), place)
        if own != line.lstrip():
            if common.place != f"{file}":
                raise UserError(f"{place} is a second '{_ALL}', after that of {common.place}", "make one line of both")
            common = found
        elif found.config or found.overrides:
            lines.append((number, found))
    if not lines:
        raise UserError(f"{file} must have a line for each run, got none", f"write lines such as '{_EXAMPLE}'")
    if variables.get("PERVIT_DATA"):
        common = replace(common, overrides=(f"data.path={variables['PERVIT_DATA']}", *common.overrides))
    named = variables.get("PERVIT_OUTPUT") or f"runs/{file.stem}"
    for word in (*common.overrides, *typed.overrides):
        if word.startswith(f"{_FOLDER}="):
            if word == f"{_FOLDER}=":
                raise UserError(f"{_FOLDER} must name the folder of a sweep's runs, got nothing", "name one, or take it out")
            named = word.partition("=")[2]
    if is_remote(named):
        raise UserError(f"{_FOLDER} of a sweep must be a folder of this machine, got {parse_place(named)}", "name one")
    folder = Path(named)
    _check_folder(folder)
    runs = tuple(_run(number, line, common, typed, own, folder) for number, (line, own) in enumerate(lines, 1))
    _check_apart(file, runs)
    return Sweep(file, text, folder, runs)


def folder_name(config: str, overrides: Sequence[str]) -> str:
    """The name of a run's folder, from its line alone; the order of the overrides makes no difference. Characters that a folder's name
    had better not have become ``_``, and eight digits of a checksum then tell two names apart."""
    words = [*([Path(config).stem] if config else []), *sorted(overrides)]
    whole = ",".join(words)
    name = ",".join(re.sub(r"[^\w.=+-]+", "_", word, flags=re.ASCII).strip("_").replace("=_", "=") for word in words)
    if name == whole and len(name) <= _LONGEST:
        return name
    return f"{name[:_LONGEST].rstrip('_,')}-{hashlib.sha256(whole.encode()).hexdigest()[:8]}"


def _check_folder(folder: Path) -> None:
    if "%a" in str(folder):
        problem = f"the sweep's folder must not have %a in its name, which a job array replaces, got {folder}"
        raise UserError(problem, "choose another")
    a_run = any((folder / name).exists() for name in (METRICS, CHECKPOINTS, RUN_CONFIG))
    if a_run or folder.exists() and not folder.is_dir():
        got = "the folder of a run" if a_run else "a file"
        raise UserError(f"{folder} must be a folder for the runs of a sweep, got {got}", f"choose another with {_FOLDER}=")


def _run(number: int, line: int, common: Words, typed: Words, own: Words, folder: Path) -> SweepRun:
    """One line with what is common to all."""
    if _FOLDER in own.keys:
        remedy = f"take it out; '{_ALL} {_FOLDER}=DIR' is the folder of all"
        raise UserError(f"{own.place} sets {_FOLDER}, which a sweep derives from the line", remedy)
    for key in typed.keys:
        if key in own.keys:
            raise UserError(f"{own.place} sets {key}, and so do the words after the file", "take one out")
    config_file = own.config or typed.config or common.config
    if not config_file:
        remedy = f"begin it with {CONFIG} pervit_t, or write a line '{_ALL} {CONFIG} pervit_t'"
        raise UserError(f"{own.place} must have a config, got none", remedy)
    name = folder_name(own.config, own.overrides)
    overrides = (*_shared(common, typed), *own.overrides, f"{_FOLDER}={folder / name}")
    try:
        config = _checked(config_file, overrides)
    except UserError as error:
        _blame(error, config_file, common, typed, own)
    return SweepRun(number, line, name, config_file, overrides, config)


def _checked(config_file: str, overrides: Sequence[str]) -> Config:
    config = load_config(config_file, overrides)
    check_name(config.model.name)
    if config.model.switches:
        try:
            switches = model_entry(config.model.name).switches
        except ImportError:  # a login node without PyTorch: the training will check them
            return config
        section_from_dict(switches, config.model.switches, key="model.switches")
    return config


def _blame(error: UserError, config_file: str, common: Words, typed: Words, own: Words) -> NoReturn:
    """Say in which place the mistake is: the first that makes it without those after it."""
    named_by = next(words for words in (own, typed, common) if words.config)
    parts: tuple[tuple[Words, list[str]], ...] = ((named_by, []), (common, _shared(common)), (typed, _shared(common, typed)))
    for place, words in parts:
        try:
            _checked(config_file, words)
        except UserError as alone:
            if str(alone) == str(error):
                raise UserError(f"{place.place}: {error}") from None
    raise UserError(f"{own.place}: {error}") from None


def _shared(*words: Words) -> list[str]:
    return [word for place in words for word in place.overrides if not word.startswith(f"{_FOLDER}=")]


def _check_apart(file: Path, runs: Sequence[SweepRun]) -> None:
    """See that no two lines share a folder, or are one run under two names."""
    folders: dict[str, SweepRun] = {}
    contents: dict[str, SweepRun] = {}
    for run in runs:
        if (other := folders.setdefault(run.name.casefold(), run)) is not run:
            problem = f"{file}, line {run.line} and line {other.line} would both train in {other.folder}"
            raise UserError(problem, "take one out, or let them differ in an override")
        content = repr(sorted((key, value) for key, value in flatten(run.config).items() if key != _FOLDER))
        if (other := contents.setdefault(content, run)) is not run:
            raise UserError(f"{file}, line {run.line} is the same run as line {other.line}", "take one out")


def split_line(line: str, place: str) -> list[str]:
    """Split as a shell, up to a comment."""
    lexer = shlex.shlex(line, posix=True, punctuation_chars=False)
    lexer.whitespace_split, lexer.commenters = True, ""
    try:  # no override begins with #; within a word it is part of a value
        return list(takewhile(lambda word: not word.startswith("#"), lexer))
    except ValueError as error:
        if "escaped" in str(error):
            problem = f"{place} must not end with a backslash, which continues no line here"
            raise UserError(problem, "join the two lines") from None
        if re.search(r"(^|\s)#", line):  # an apostrophe in the comment
            return split_line(re.split(r"(?:^|\s)#", line, maxsplit=1)[0], place)
        raise UserError(f"{place} has a quote that is not closed", "close it") from None


def join_config(words: Sequence[str]) -> Iterator[str]:
    """The words with ``--config CONFIG`` as one, ``--config=CONFIG``."""
    rest = iter(words)
    for word in rest:
        yield f"{CONFIG}={next(rest, '')}" if word == CONFIG else word


def read_words(words: Sequence[str], place: str) -> Words:
    """Tell the config from the overrides; a ``UserError`` for a word that is neither, or a key twice."""
    config, overrides = "", []
    for word in join_config(words):
        key, _, value = word.partition("=")
        if key == CONFIG:
            if config or not value:
                got = f"a second {CONFIG}" if config else f"{CONFIG} without a config"
                raise UserError(f"{place} must have one {CONFIG} with a file or a name in configs/, got {got}", "correct it")
            config = value
            continue
        if word.startswith("-"):
            problem = f"{place} must have words {CONFIG} CONFIG and key=value, got {word!r}"
            raise UserError(problem, "options of the command stand before the file")
        for pattern, reason, remedy in _REFUSED:
            if found := re.search(pattern, word):
                raise UserError(f"{place} must not have {reason.format(found[0].lstrip('='))}, got {word!r}", remedy)
        overrides.append(word)
    made = Words(place, config, tuple(overrides))
    if twice := sorted({key for key in made.keys if made.keys.count(key) > 1}):
        raise UserError(f"{place} sets {twice[0]} twice", "keep one of them")
    return made
