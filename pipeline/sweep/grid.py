"""Make a sweep's file with every combination of some values."""

from __future__ import annotations

import itertools
import re
import shlex
from collections.abc import Sequence
from pathlib import Path

from pipeline.errors import UserError
from pipeline.sweep.lines import parse_sweep

_OPENING, _CLOSING = "([{", ")]}"


def grid(words: Sequence[str]) -> str:
    """The file for ``key=value,value`` words: a line for each combination, the last key changing fastest.

    Args:
        words: ``--config CONFIG,CONFIG`` and overrides with values separated by commas; a comma within brackets or quotes belongs
            to the value. What has one value only goes into the line for all.

    Raises:
        UserError: a word of another form, an empty value, or a combination that is not a valid config.
    """
    common: list[str] = []
    axes: list[list[str]] = []
    todo = list(words)
    while todo:
        word = todo.pop(0)
        if word == "--config":
            if not todo:
                raise UserError("--config requires a file or a name in configs/, got nothing", "write --config pervit_t")
            key, values = "--config ", todo.pop(0)
        elif word.startswith("--config="):
            key, values = "--config ", word.partition("=")[2]
        else:
            name, equals, values = word.partition("=")
            if not equals or not name or word.startswith("-"):
                raise UserError(f"--grid must have words key=value,value, got {word!r}", "write for example optim.lr=1e-3,5e-4")
            key = f"{name}="
        choices = [_word(key, value) for value in _values(values)]
        if not all(_values(values)):
            raise UserError(f"{word} has an empty value between its commas", "correct it")
        if len(set(choices)) < len(choices):
            raise UserError(f"{word} has a value twice", "take one out")
        if len(choices) > 1:
            axes.append(choices)
        else:
            common += choices
    if not axes:
        raise UserError("--grid must have a key with several values, got none", "write for example optim.lr=1e-3,5e-4 seed=0,1")
    lines = [" ".join(combination) for combination in itertools.product(*axes)]
    has_config = any(choice.startswith("--config ") for choice in (*common, *(axis[0] for axis in axes)))
    text = "".join(f"{line}\n" for line in ([f"all: {' '.join(common)}"] if common else []) + lines)
    if has_config:
        parse_sweep(Path("grid"), text, variables={})
    return text


def _word(key: str, value: str) -> str:
    if key == "--config ":
        return key + shlex.quote(value)
    whole = key + value
    return whole if re.fullmatch(r"[\w@+=:,./{}\[\]#-]+", whole) else shlex.quote(whole)


def _values(text: str) -> list[str]:
    """Split at the commas outside of brackets and quotes.

    Raises:
        UserError: one of those is not closed.
    """
    values, depth, quote = [""], 0, ""
    for character in text:
        if quote:
            quote = "" if character == quote else quote
        elif character in "'\"":
            quote = character
        elif character in _OPENING:
            depth += 1
        elif character in _CLOSING:
            depth = max(0, depth - 1)
        if character == "," and depth == 0 and not quote:
            values.append("")
        else:
            values[-1] += character
    if depth or quote:
        raise UserError(
            f"{text} has a {'quote' if quote else 'bracket'} that is not closed, commas within it separate nothing",
            "close it, and quote the word for the shell",
        )
    return values
